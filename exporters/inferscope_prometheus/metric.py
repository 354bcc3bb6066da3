"""A family with our labels, and more of its own."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from inferscope_prometheus import names

Rows = Iterable[tuple[tuple[str, ...], float]]
"""The values of all labels, and the number."""


def counter(name: str, says: str, labels: tuple[str, ...], rows: Rows) -> CounterMetricFamily:
    """Return a counter; the name goes without `_total`."""
    family = CounterMetricFamily(name, says, labels=(*names.LABELS, *labels))
    for values, number in rows:
        family.add_metric(values, number)
    return family


def gauge(name: str, says: str, labels: tuple[str, ...], rows: Rows) -> GaugeMetricFamily:
    """Return a gauge."""
    family = GaugeMetricFamily(name, says, labels=(*names.LABELS, *labels))
    for values, number in rows:
        family.add_metric(values, number)
    return family
