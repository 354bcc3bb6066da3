"""Prometheus families of the collector itself, without an engine."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric

from inferscope.fold import CollectorInfo
from inferscope_prometheus import names
from inferscope_prometheus.metric import counter, gauge


def collector_families(running: CollectorInfo) -> Iterator[Metric]:
    """Return the families at one time."""
    yield gauge(
        "inferscope_collector_info",
        "Version and configuration of the collector.",
        ("version", "config_hash", "shard"),
        [((*names.OF_ALL, running.version, running.config_hash, running.shard), 1.0)],
    )
    reloads = (("good", running.num_reloads), ("bad", running.num_reloads_refused))
    yield counter(
        "inferscope_collector_reloads",
        "Configuration reloads, by result: applied or rejected.",
        ("result",),
        [((*names.OF_ALL, result), float(num)) for result, num in reloads],
    )
    yield counter(
        "inferscope_rings_refused",
        "Rings not followed: engine of another user, or limit reached.",
        ("reason",),
        [((*names.OF_ALL, reason), float(num)) for reason, num in running.num_refused.items()],
    )
