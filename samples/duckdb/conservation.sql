-- What does not add up, in whole nanoseconds: no rows, or it is a defect worth reporting.
SELECT
    'step' AS what,
    engine,
    step::VARCHAR AS id,
    coalesce(slices_ns, 0) + padding_ns + unattributed_ns - measured_ns AS off_by_ns
FROM read_parquet('demo.parquet/steps/*/*/*.parquet', union_by_name = true)
LEFT JOIN (
    SELECT engine, dp_rank, rank, step, sum(ns) AS slices_ns
    FROM read_parquet('demo.parquet/slices/*/*/*.parquet', union_by_name = true)
    GROUP BY ALL
) USING (engine, dp_rank, rank, step)
WHERE coalesce(slices_ns, 0) + padding_ns + unattributed_ns <> measured_ns
UNION ALL
SELECT
    'request',
    engine,
    request,
    coalesce(list_sum(map_values(ledger_ns)), 0) - (delivered_ns - arrived_ns)
FROM read_parquet('demo.parquet/requests/*/*/*.parquet', union_by_name = true)
WHERE NOT joined_late
    AND coalesce(list_sum(map_values(ledger_ns)), 0) <> delivered_ns - arrived_ns;
