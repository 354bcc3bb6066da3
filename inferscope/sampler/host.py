"""The host source: CPU time and memory of the engines' processes, also without a GPU.

The kernel keeps a CPU clock per process, in nanoseconds, that all users may read. A sample costs
two system calls and is finer than the 10 ms ticks of /proc.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from inferscope.records import CounterSample
from inferscope.sampler.claims import HOST
from inferscope.sampler.processes import Observed, observed
from inferscope.sampler.source import Claimer, facts, sample

LOOK_NS = 2_000_000_000
"""Interval in nanoseconds between searches for engine processes."""
_CPUCLOCK_SCHED = 2
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class HostSource:
    """Reader of /proc and of the processes' CPU clocks.

    Attributes:
        name: "host".
        period_ns: period of reads in nanoseconds.
    """

    name = "host"

    def __init__(self, folder: Path, claims: Claimer, *, period_ns: int) -> None:
        """Store the directory of the engines' rings."""
        self.period_ns = period_ns
        self._folder = folder
        self._claims = claims
        self._look_ns = 0
        self._there: list[Observed] = []
        self._before: dict[int, tuple[int, int]] = {}
        """Time of the last read and CPU time then, both in nanoseconds, by PID."""

    def open(self, now_ns: int) -> list[CounterSample]:
        """Claim the host; return its properties.

        Raises:
            Unavailable: another sampler samples the host for these engines.
        """
        self._claims.take(HOST)
        cores = len(os.sched_getaffinity(0))
        return [facts(self.name, "", now_ns, {"cores": str(cores), "host": os.uname().nodename})]

    def read(self, now_ns: int) -> list[CounterSample]:
        """Return a sample of each engine process that the last read covered too."""
        if now_ns >= self._look_ns:
            self._look_ns = now_ns + LOOK_NS
            self._there = observed(self._folder, now_ns)
            pids = {process.pid for process in self._there}
            self._before = {pid: was for pid, was in self._before.items() if pid in pids}
        samples = []
        for process in self._there:
            try:
                cpu_ns, rss_bytes = _cpu_ns(process.pid), _rss_bytes(process.pid)
            except OSError:  # the process has exited
                self._before.pop(process.pid, None)
                continue
            before = self._before.get(process.pid)
            self._before[process.pid] = (now_ns, cpu_ns)
            if before is None or cpu_ns < before[1]:
                continue
            values = {
                "pid": float(process.own_pid),
                "cpu_ns": float(cpu_ns - before[1]),
                "rss_bytes": float(rss_bytes),
            }
            samples.append(sample(self.name, "", start_ns=before[0], end_ns=now_ns, values=values))
        return samples

    def close(self) -> None:
        """Clear the table of processes."""
        self._there, self._before, self._look_ns = [], {}, 0


def _cpu_ns(pid: int) -> int:
    """Return the CPU time of all threads of a process in nanoseconds."""
    # The kernel's MAKE_PROCESS_CPUCLOCK (linux/posix-timers.h), which clock_getcpuclockid(3) is.
    return time.clock_gettime_ns(~pid << 3 | _CPUCLOCK_SCHED)


def _rss_bytes(pid: int) -> int:
    statm = Path(f"/proc/{pid}/statm").read_text(encoding="ascii")
    return int(statm.split()[1]) * _PAGE_BYTES
