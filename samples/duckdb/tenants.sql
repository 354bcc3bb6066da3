-- What each tenant used: the long tail that no metric can hold.
SELECT
    model,
    coalesce(tenant, '(none)') AS tenant,
    count(*) AS requests,
    sum(prompt_tokens) AS prompt_tokens,
    sum(cached_tokens) AS cached_tokens,
    sum(output_tokens) AS output_tokens,
    sum(compute_ns.prefill + compute_ns.decode) / 1e9 AS device_seconds
FROM read_parquet('demo.parquet/requests/*/*/*.parquet', union_by_name = true)
GROUP BY ALL
ORDER BY device_seconds DESC;
