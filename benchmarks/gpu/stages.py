"""Where the sampler's processor time goes, source by source and call by call; run by part (a).

Each source is read alone, in this process, at its own period. Every call into NVIDIA's libraries is
timed by the thread's clock: what is left of the thread's time is Python's, and what is left of the
process's is that of threads which the libraries started. PM sampling runs at its default, with a
small buffer in the device, with an image for a fifth of the time, and with short windows: a cost
that follows one of them shows.

python stages.py SECONDS
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from inferscope.probe.clock import SystemClock
from inferscope.sampler import nvml as nvml_source
from inferscope.sampler.claims import NoClaims
from inferscope.sampler.cupti import session
from inferscope.sampler.cupti.image import CounterDataImage
from inferscope.sampler.cupti.library import Cupti
from inferscope.sampler.cupti.pm import CuptiPmSource
from inferscope.sampler.cupti.search import usable
from inferscope.sampler.gpm import GpmSource
from inferscope.sampler.nvml_devices import open_nvml
from inferscope.sampler.source import Source, Unavailable

_PERIOD_NS = 100_000_000
_WARM_READS = 2
PM_CASES = {
    "pm 500 µs": {},
    "pm 500 µs, buffer of 8 MiB": {"buffer": 8 << 20},
    "pm 500 µs, image of 0.4 s": {"image_ns": 400_000_000},
    "pm 100 µs": {"interval_ns": 100_000},
}


class Spent:
    """Time spent in calls, by the name of the function."""

    def __init__(self) -> None:
        self.calls: defaultdict[str, int] = defaultdict(int)
        self.cpu_ns: defaultdict[str, int] = defaultdict(int)
        self.wall_ns: defaultdict[str, int] = defaultdict(int)

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that counts its calls and their time."""

        def call(*given: Any, **named: Any) -> Any:
            wall_ns, cpu_ns = time.perf_counter_ns(), time.thread_time_ns()
            try:
                return function(*given, **named)
            finally:
                self.cpu_ns[name] += time.thread_time_ns() - cpu_ns
                self.wall_ns[name] += time.perf_counter_ns() - wall_ns
                self.calls[name] += 1

        return call

    def clear(self) -> None:
        """Forget all calls so far."""
        for counts in (self.calls, self.cpu_ns, self.wall_ns):
            counts.clear()


class TimedLibrary:
    """A library or module whose functions are timed."""

    def __init__(self, library: Any, prefix: str, spent: Spent) -> None:
        self._library, self._prefix, self._spent = library, prefix, spent

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._library, name)
        is_function = name.startswith(self._prefix) and callable(found)
        return self._spent.timed(name, found) if is_function else found


def timed_cupti(cupti: Cupti, spent: Spent) -> Cupti:
    """Return a library whose calls are timed."""
    library: Any = Cupti(cupti.path)
    call, repeated = library.call, library.repeated
    library.call = lambda function, *given, **named: spent.timed(function, call)(
        function, *given, **named
    )
    library.repeated = lambda function, params: spent.timed(function, repeated(function, params))
    found: Cupti = library
    return found


def pm_source(
    cupti: Cupti, *, interval_ns: int = 500_000, buffer: int = 0, image_ns: int = 0
) -> CuptiPmSource:
    """Return PM sampling with sizes other than its own; 0 keeps them."""
    if buffer:
        session.hardware_buffer_bytes = lambda interval_ns: buffer
    if image_ns:
        session.most_samples = lambda interval_ns: image_ns // interval_ns
    return CuptiPmSource(
        NoClaims(),
        clock=SystemClock(),
        log_line=lambda line: None,
        period_ns=_PERIOD_NS,
        interval_ns=interval_ns,
        load=lambda: cupti,
    )


def read_for(source: Source, seconds: float, spent: Spent) -> dict[str, Any]:
    """Read a source at its period; return the time by function, of Python and of other threads."""
    num_windows = 0
    with closing(source):
        source.open(time.monotonic_ns())
        for _ in range(_WARM_READS):
            time.sleep(source.period_ns / 1e9)
            source.read(time.monotonic_ns())
        spent.clear()
        began_ns, process_ns, thread_ns = (
            time.monotonic_ns(), time.process_time_ns(), time.thread_time_ns()
        )  # fmt: skip
        num_reads, due_ns = 0, began_ns
        while time.monotonic_ns() - began_ns < seconds * 1e9:
            due_ns += source.period_ns
            time.sleep(max(0, due_ns - time.monotonic_ns()) / 1e9)
            found = source.read(time.monotonic_ns())
            num_windows += sum(len(one.starts_ns) // 8 for one in found)
            num_reads += 1
        own_ns = time.thread_time_ns() - thread_ns
        all_ns = time.process_time_ns() - process_ns
        took_ns = time.monotonic_ns() - began_ns
        row: dict[str, Any] = {
            "num_reads": num_reads,
            "num_windows": num_windows,
            "cpu_share": all_ns / took_ns,
            "python_share": (own_ns - sum(spent.cpu_ns.values())) / took_ns,
            "other_threads_share": (all_ns - own_ns) / took_ns,
            "calls": {
                name: {
                    "num": spent.calls[name],
                    "cpu_us": ns / 1e3 / spent.calls[name],
                    "wall_us": spent.wall_ns[name] / 1e3 / spent.calls[name],
                    "cpu_share": ns / took_ns,
                }
                for name, ns in sorted(spent.cpu_ns.items(), key=lambda item: -item[1])
            },
        }
        if isinstance(source, CuptiPmSource):
            (one, *_) = source._sessions
            row["image_bytes"] = one._image.size
    return row


def main(seconds: float) -> dict[str, Any]:
    """Read every source by itself; return a row for each, with the reason where there is none."""
    spent, rows = Spent(), dict[str, Any]()
    blank = CounterDataImage.blank
    CounterDataImage.blank = spent.timed("blank", blank)  # type: ignore[method-assign]
    nvml_source.open_nvml = lambda: TimedLibrary(open_nvml(), "nvml", spent)  # type: ignore[assignment, return-value]
    own = session.hardware_buffer_bytes, session.most_samples
    with tempfile.TemporaryDirectory() as folder:
        sources: dict[str, Callable[[], Source]] = {
            "nvml": lambda: nvml_source.NvmlSource(Path(folder), NoClaims(), period_ns=_PERIOD_NS),
            "gpm": lambda: GpmSource(
                NoClaims(), clock=SystemClock(), period_ns=_PERIOD_NS, load=nvml_source.open_nvml
            ),
            **{
                name: lambda case=case: pm_source(timed_cupti(usable(), spent), **case)
                for name, case in PM_CASES.items()
            },
        }
        for name, make in sources.items():
            try:
                rows[name] = read_for(make(), seconds, spent)
            except Unavailable as reason:
                rows[name] = {"reason": str(reason)}
            session.hardware_buffer_bytes, session.most_samples = own
    return rows


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(float(sys.argv[1]))) + "\n")
