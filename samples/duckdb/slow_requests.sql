-- The ten latest first tokens, and the largest cause of each wait.
SELECT
    coalesce(external_id, request) AS request,
    delivered_utc AT TIME ZONE 'UTC' AS delivered_utc,
    prompt_tokens,
    (first_token_ns - arrived_ns) / 1e6 AS ttft_ms,
    (
        SELECT arg_max(cause, ns)
        FROM (
            SELECT
                unnest(map_keys(ttft_ledger_ns)) AS cause,
                unnest(map_values(ttft_ledger_ns)) AS ns
        )
    ) AS mostly
FROM read_parquet('demo.parquet/requests/*/*/*.parquet', union_by_name = true)
WHERE first_token_ns IS NOT NULL AND NOT joined_late
ORDER BY ttft_ms DESC
LIMIT 10;
