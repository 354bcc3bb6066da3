-- Where the requests' time went, by cause: the ledgers, summed.
SELECT
    cause,
    sum(ns) / 1e9 AS seconds,
    round(100 * sum(ns) / sum(sum(ns)) OVER (), 1) AS percent
FROM (
    SELECT
        unnest(map_keys(ledger_ns)) AS cause,
        unnest(map_values(ledger_ns)) AS ns
    FROM read_parquet('demo.parquet/requests/*/*/*.parquet', union_by_name = true)
    WHERE NOT joined_late
)
GROUP BY cause
HAVING sum(ns) > 0
ORDER BY seconds DESC;
