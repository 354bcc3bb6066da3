"""Host resources of an engine's processes: cores and memory, from the host's sampler."""

from __future__ import annotations

from collections.abc import Collection

from inferscope.records import CounterSample

HOST_SOURCE = "host"
_GONE_NS = 1_500_000_000
"""Time without samples after which a process is no longer counted."""
_SILENT_NS = 2_000_000_000


class HostUse:
    """Host resources of one engine's processes."""

    def __init__(self) -> None:
        self._newest: dict[int, tuple[int, float, float]] = {}
        """Time of the sample, cores and resident bytes, by PID."""

    def take(self, record: CounterSample, pids: Collection[int]) -> dict[str, float]:
        """Add a sample of one of these processes; return the sums over all of them."""
        pid, cpu_ns = record.values.get("pid"), record.values.get("cpu_ns")
        if pid is None or cpu_ns is None or pid not in pids:
            return {}
        cores = cpu_ns / max(1, record.end_ns - record.start_ns)
        self._newest[int(pid)] = (record.t_ns, cores, record.values.get("rss_bytes", 0.0))
        there = [each for each in self._newest.values() if record.t_ns - each[0] < _GONE_NS]
        return {
            "cpu_cores": sum(each[1] for each in there),
            "rss_bytes": sum(each[2] for each in there),
        }

    def is_reported(self, now_ns: int) -> bool:
        """Return whether any of the processes was sampled recently."""
        return any(now_ns - each[0] < _SILENT_NS for each in self._newest.values())
