"""What an engine's processes take of the host: cores and memory, as the host's sampler tells."""

from __future__ import annotations

from collections.abc import Collection

from inferscope.records import CounterSample

TELLS_CPU = "host"
_GONE_NS = 1_500_000_000
"""A process of which nothing was told for this long is not counted any more."""
_SILENT_NS = 2_000_000_000


class HostUse:
    """The processes of one engine."""

    def __init__(self) -> None:
        self._told: dict[int, tuple[int, float, float]] = {}
        """By pid: when it was told, cores, resident bytes."""

    def take(self, record: CounterSample, pids: Collection[int]) -> dict[str, float]:
        """Take a sample, if it is of one of these processes; return the sums over all of them."""
        pid, cpu_ns = record.values.get("pid"), record.values.get("cpu_ns")
        if pid is None or cpu_ns is None or pid not in pids:
            return {}
        cores = cpu_ns / max(1, record.end_ns - record.start_ns)
        self._told[int(pid)] = (record.t_ns, cores, record.values.get("rss_bytes", 0.0))
        there = [each for each in self._told.values() if record.t_ns - each[0] < _GONE_NS]
        return {
            "cpu_cores": sum(each[1] for each in there),
            "rss_bytes": sum(each[2] for each in there),
        }

    def is_told(self, now_ns: int) -> bool:
        """Tell whether any of them was told of lately."""
        return any(now_ns - each[0] < _SILENT_NS for each in self._told.values())
