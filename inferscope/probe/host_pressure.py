"""Readings of the host's kernel: time that this process wanted a CPU and had none, and why.

The kernel counts it in files under /proc. They are read once a second, on the probe's housekeeping
thread. Each is opened for its reading only: a host that closes all descriptors may give their
numbers to files of its own. A counter that this kernel or container does not show is left out of
the sample.

    run_wait_ns       /proc/self/task/*/schedstat   ready to run, waiting in a CPU's queue
    steal_ns, host_busy_ns     /proc/stat           the hypervisor's part, and all CPUs in use
    quota_ns          cpu.stat of the cgroup        held back by its CPU quota
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from heapq import nlargest
from pathlib import Path

PERIOD_NS = 1_000_000_000
MOST_THREADS = 32
"""Threads whose wait is read: those that computed most between the last two scans."""
_BUSY = 0.1
"""Least CPU time of a busy thread in a window, as a share of the busiest thread's."""
_RESCAN = 10
"""Readings between two scans of all threads."""
_STAT_BYTES, _LINE_BYTES = 512, 256
_TICK_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
_CGROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")
_NS_PER_UNIT = {b"throttled_usec": 1_000, b"throttled_time": 1}
"""Units of throttled time in versions 2 and 1 of control groups."""


class HostPressure:
    """Counters of the host around one process, read as amounts over windows."""

    def __init__(self) -> None:
        self._quota_paths: tuple[str, ...] | None = None
        self._threads: list[str] = []
        self._threads_ns: dict[str, tuple[int, int]] = {}
        """Time on a CPU and waiting for one, by thread, at the last reading."""
        self._scanned_ns: dict[str, int] = {}
        """Time on a CPU, of every thread of the process at the last scan."""
        self._num_read = 0
        self._read_ns = 0
        self._before: dict[str, int] = {}

    def is_due(self, now_ns: int) -> bool:
        """Return whether a period has passed since the last reading."""
        return now_ns - self._read_ns >= PERIOD_NS

    def read(self, now_ns: int) -> tuple[int, dict[str, float]] | None:
        """Return the window's start and what was counted in it; None at the first reading.

        Args:
            now_ns: the window's end.
        """
        waited_ns = self._waits_ns()
        levels = self._levels()
        start_ns, self._read_ns = self._read_ns, now_ns
        before, self._before = self._before, levels
        self._num_read += 1
        if not start_ns:
            return None
        values = {
            word: float(max(0, level - before[word]))
            for word, level in levels.items()
            if word in before
        }
        if waited_ns is not None:
            values["run_wait_ns"] = float(waited_ns)
        values["pid"] = float(os.getpid())
        values["num_cpus"] = float(os.cpu_count() or 1)
        return start_ns, values

    def _levels(self) -> dict[str, int]:
        levels = {"cpu_ns": time.process_time_ns()}
        for read in (self._host, self._quota):
            with suppress(OSError, ValueError, IndexError):
                levels |= read()
        return levels

    def _host(self) -> dict[str, int]:
        # "cpu  user nice system idle iowait irq softirq steal guest guest_nice"; user holds guest.
        ticks = [int(field) for field in _line("/proc/stat", _STAT_BYTES).split()[1:9]]
        steal = ticks[7]
        return {
            "host_busy_ns": (sum(ticks) - ticks[3] - ticks[4] - steal) * _TICK_NS,
            "steal_ns": steal * _TICK_NS,
        }

    def _quota(self) -> dict[str, int]:
        """Return the time held back by the quota of the cgroup, or of the one above that has it."""
        if self._quota_paths is None:
            self._quota_paths = tuple(_quota_files())
        found = []
        for path in self._quota_paths:
            with suppress(OSError):
                for line in _text(path, _STAT_BYTES).splitlines():
                    word, _, amount = line.partition(b" ")
                    if word in _NS_PER_UNIT:
                        found.append(int(amount) * _NS_PER_UNIT[word])
        return {"quota_ns": sum(found)} if found else {}

    def _waits_ns(self) -> int | None:
        """Return what busy threads have waited since the last reading; None where not counted.

        A thread that hardly computes delays no step, however long it waits for its turn.
        """
        if self._num_read % _RESCAN == 0:
            self._scan()
        now: dict[str, tuple[int, int]] = {}
        grown: list[tuple[int, int]] = []
        for thread in self._threads:
            times_ns = _thread_times_ns(thread)
            if times_ns is None:
                continue
            now[thread] = times_ns
            before = self._threads_ns.get(thread)
            if before is not None:
                grown.append((times_ns[0] - before[0], times_ns[1] - before[1]))
        self._threads_ns = now
        if not now:
            return None
        least_ns = _BUSY * max((ran_ns for ran_ns, _ in grown), default=0)
        return sum(waited_ns for ran_ns, waited_ns in grown if ran_ns >= least_ns)

    def _scan(self) -> None:
        """Choose the threads to read."""
        ran_ns = {
            thread: times_ns[0]
            for thread in _thread_ids()
            if (times_ns := _thread_times_ns(thread)) is not None
        }
        before = self._scanned_ns
        self._threads = nlargest(
            MOST_THREADS, ran_ns, key=lambda thread: ran_ns[thread] - before.get(thread, 0)
        )
        self._scanned_ns = ran_ns


def _thread_ids() -> list[str]:
    try:
        return os.listdir("/proc/self/task")
    except OSError:
        return []


def _thread_times_ns(thread: str) -> tuple[int, int] | None:
    """Return how long a thread was on a CPU, and waited for one; None where it has ended."""
    try:
        times = _text(f"/proc/self/task/{thread}/schedstat", _LINE_BYTES).split()
        return int(times[0]), int(times[1])
    except (OSError, ValueError, IndexError):
        return None


def _quota_files() -> list[str]:
    """Return cpu.stat of this process's cgroup, and of those above it that may set a quota."""
    try:
        lines = _MEMBERSHIP.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    roots: list[tuple[Path, str]] = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            roots.append((_CGROUPS, path))
        elif "cpu" in controllers.split(","):
            roots += [(_CGROUPS / controllers, path), (_CGROUPS / "cpu", path)]
    found: dict[tuple[int, int], str] = {}
    """Keyed by the file itself: on version 1 "cpu" is a link to "cpu,cpuacct"."""
    for root, path in roots:
        # Seen from another namespace the path leads above the root, which shows its own there.
        parts = [part for part in path.split("/") if part and part != ".."]
        for depth in range(len(parts), -1, -1):
            file = str(root.joinpath(*parts[:depth], "cpu.stat"))
            with suppress(OSError):
                status = os.stat(file)
                found.setdefault((status.st_dev, status.st_ino), file)
    return [*found.values()]


def _line(path: str, num_bytes: int) -> bytes:
    return _text(path, num_bytes).split(b"\n", 1)[0]


def _text(path: str, num_bytes: int) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, num_bytes)
    finally:
        os.close(descriptor)
