"""Families of the client library from rows of METRICS."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from inferscope_prometheus.metric_table import BOUNDS_S, METRICS
from inferscope_prometheus.page import HistogramFamily

Rows = Iterable[tuple[tuple[str, ...], float]]
"""Values of all labels, and the number."""


def family_of(name: str, rows: Rows) -> Metric:
    """Return the counter or gauge family of a metric."""
    row = METRICS[name]
    kind = CounterMetricFamily if row.kind == "counter" else GaugeMetricFamily
    made = kind(row.full_name, row.help, labels=row.labels)
    for values, number in rows:
        made.add_metric(values, number)
    return made


def family_if_rows(name: str, rows: Rows) -> Iterator[Metric]:
    """Return the family of a metric, or none if it has no rows: its source is absent."""
    made = family_of(name, rows)
    if made.samples:
        yield made


def histogram_of(name: str) -> HistogramFamily:
    """Return the family of a histogram, without series."""
    row = METRICS[name]
    return HistogramFamily(row.full_name, row.help, labels=row.labels, bounds_s=BOUNDS_S[row.kind])
