"""Prometheus families of the collector itself, without an engine."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric

from inferscope.fold import CollectorInfo
from inferscope_prometheus.metric import family_of
from inferscope_prometheus.metric_table import OF_ALL


def collector_families(running: CollectorInfo) -> Iterator[Metric]:
    """Return the families at one time."""
    about = (running.version, running.config_hash, running.shard)
    yield family_of("collector_info", [((*OF_ALL, *about), 1.0)])
    reloads = {"good": running.num_reloads, "bad": running.num_reloads_refused}
    for name, nums in (
        ("collector_reloads_total", reloads),
        ("rings_refused_total", running.num_refused),
    ):
        yield family_of(name, (((*OF_ALL, word), float(num)) for word, num in nums.items()))
