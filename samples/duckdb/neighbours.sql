-- Decode steps that shared the device with somebody's prefill, and what that did to their length.
WITH steps AS (
    SELECT
        engine,
        dp_rank,
        rank,
        step,
        sum(CASE phase WHEN 'prefill' THEN tokens ELSE 0 END) AS prefill_tokens,
        count(*) FILTER (phase <> 'prefill') AS decodes
    FROM read_parquet('demo.parquet/slices/*/*/*.parquet', union_by_name = true)
    GROUP BY ALL
)
SELECT
    CASE
        WHEN prefill_tokens = 0 THEN 'no prefill'
        WHEN prefill_tokens <= 64 THEN 'up to 64 tokens'
        ELSE 'more than 64 tokens'
    END AS beside,
    count(*) AS steps,
    round(median(measured_ns) / 1e6, 3) AS median_ms,
    round(quantile_cont(measured_ns, 0.99) / 1e6, 3) AS p99_ms
FROM steps
JOIN read_parquet('demo.parquet/steps/*/*/*.parquet', union_by_name = true) USING (engine, dp_rank, rank, step)
WHERE decodes > 0 AND NOT cold
GROUP BY beside
ORDER BY median_ms;
