"""Families with our common labels and further ones."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from inferscope_prometheus import names

Rows = Iterable[tuple[tuple[str, ...], float]]
"""Values of all labels, and the number."""


def counter(name: str, help_text: str, labels: tuple[str, ...], rows: Rows) -> CounterMetricFamily:
    """Return a counter family; `name` goes without `_total`."""
    family = CounterMetricFamily(name, help_text, labels=(*names.LABELS, *labels))
    for values, number in rows:
        family.add_metric(values, number)
    return family


def gauge(name: str, help_text: str, labels: tuple[str, ...], rows: Rows) -> GaugeMetricFamily:
    """Return a gauge family."""
    family = GaugeMetricFamily(name, help_text, labels=(*names.LABELS, *labels))
    for values, number in rows:
        family.add_metric(values, number)
    return family
