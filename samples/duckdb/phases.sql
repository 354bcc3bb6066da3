-- Device seconds and tokens by hour and phase. Draft and verify are parts of decode.
SELECT
    date,
    hour,
    CASE phase WHEN 'prefill' THEN 'prefill' ELSE 'decode' END AS phase,
    sum(ns) / 1e9 AS device_seconds,
    sum(tokens) AS tokens,
    round(sum(tokens) / (sum(ns) / 1e9)) AS tokens_per_device_second
FROM read_parquet('demo.parquet/slices/*/*/*.parquet', hive_partitioning = true, union_by_name = true)
GROUP BY ALL
ORDER BY ALL;
