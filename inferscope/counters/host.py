"""The host: processor time and memory of the engines' processes; all there is without a GPU.

Each process has a clock of its own in the kernel, to the nanosecond, that anybody may read: so a
sample is two system calls, and no tool that counts in ticks of 10 ms.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from inferscope.counters.claims import HOST
from inferscope.counters.processes import Observed, observed
from inferscope.counters.source import Claimer, facts, sample
from inferscope.records import CounterSample

LOOK_NS = 2_000_000_000
"""Between looks at which processes there are."""
_CPUCLOCK_SCHED = 2
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class HostSource:
    """Reads /proc and the processes' clocks.

    Attributes:
        name: host.
        period_ns: between two reads.
    """

    name = "host"

    def __init__(self, folder: Path, claims: Claimer, *, period_ns: int) -> None:
        """Take the folder of the engines' rings."""
        self.period_ns = period_ns
        self._folder = folder
        self._claims = claims
        self._look_ns = 0
        self._there: list[Observed] = []
        self._before: dict[int, tuple[int, int]] = {}
        """By pid: when its clock was read, and what it showed."""

    def open(self, now_ns: int) -> list[CounterSample]:
        """Begin.

        Raises:
            Unavailable: somebody else does this for these engines.
        """
        self._claims.take(HOST)
        cores = len(os.sched_getaffinity(0))
        return [facts(self.name, "", now_ns, {"cores": str(cores), "host": os.uname().nodename})]

    def read(self, now_ns: int) -> list[CounterSample]:
        """Return a sample of each process of an engine that was there at the last read too."""
        if now_ns >= self._look_ns:
            self._look_ns = now_ns + LOOK_NS
            self._there = observed(self._folder, now_ns)
            pids = {process.pid for process in self._there}
            self._before = {pid: was for pid, was in self._before.items() if pid in pids}
        told = []
        for process in self._there:
            try:
                cpu_ns, rss_bytes = _cpu_ns(process.pid), _rss_bytes(process.pid)
            except OSError:  # it has ended
                self._before.pop(process.pid, None)
                continue
            before = self._before.get(process.pid)
            self._before[process.pid] = (now_ns, cpu_ns)
            if before is None or cpu_ns < before[1]:
                continue
            values = {
                "pid": float(process.told_pid),
                "cpu_ns": float(cpu_ns - before[1]),
                "rss_bytes": float(rss_bytes),
            }
            told.append(sample(self.name, "", start_ns=before[0], end_ns=now_ns, values=values))
        return told

    def close(self) -> None:
        """Forget the processes."""
        self._there, self._before, self._look_ns = [], {}, 0


def _cpu_ns(pid: int) -> int:
    """Return the processor time that a process has had, all threads of it together."""
    # The kernel's MAKE_PROCESS_CPUCLOCK (linux/posix-timers.h), which clock_getcpuclockid(3) is.
    return time.clock_gettime_ns(~pid << 3 | _CPUCLOCK_SCHED)


def _rss_bytes(pid: int) -> int:
    statm = Path(f"/proc/{pid}/statm").read_text(encoding="ascii")
    return int(statm.split()[1]) * _PAGE_BYTES
