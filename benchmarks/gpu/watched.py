"""The real sampler, beside this process: started, read back from its ring, and ended.

A process of its own, as in production: CUPTI does not meet what the engine has loaded, and what it
costs is what users pay.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from part import Unmet, need_counters
from process_clock import process_cpu_ns

from inferscope.records import COLUMNS, CounterSample, Record, decode
from inferscope.ring.discovery import sampler_rings
from inferscope.ring.reader import Frame, RingReader
from inferscope.sampler.cupti.library import LIBRARY_VARIABLE, NOT_PERMITTED

_START_S = 30.0
_SETTLE_S = 0.5
_DECODE_S = 0.4
"""Seconds until the last windows are decoded and written: every 200 ms."""
_END_S = 3.0
LEAST_COVER, LEAST_MEAN_COVER = 0.99, 0.9
_FULL, _SOME = 0.5, 0.05
"""Shares of the highest rate that mark a window fully or partly within a load."""
_WITHOUT_ROOT = """
import os, sys
from contextlib import suppress
from pathlib import Path
from inferscope.cli import sampler
from inferscope.cli.main import main
from inferscope.sampler.sampler import Settings, preload
from inferscope.probe.clock import SystemClock

user, folder, counters = int(sys.argv[1]), Path(sys.argv[2]), tuple(sys.argv[3].split(","))
preload(Settings(folder, sources=counters), clock=SystemClock())
with suppress(SystemExit):
    main(["sampler", "--help"])  # what parsing needs is loaded
os.setgroups([])
os.setresgid(user, user, user)
os.setresuid(user, user, user)
sys.exit(main(sys.argv[4:]))
"""
"""Becomes another user with everything loaded, as the sampler does: what root has installed for
itself that user may not read."""
_WITH_ADMIN = """
import ctypes, sys
from inferscope.cli.main import main
from inferscope.sampler.privilege import _CAP_SYS_ADMIN, _limit

_limit(ctypes.CDLL(None, use_errno=True), _CAP_SYS_ADMIN)
sys.exit(main(sys.argv[1:]))
"""
"""Gives up CAP_PERFMON first, so that the sampler keeps CAP_SYS_ADMIN in its place."""
_CUPTI_REFUSED = re.compile(rf"{re.escape(NOT_PERMITTED)}|cupti[A-Z]\w+ failed")
_HUNG = "no answer for"
"""Beginning of the sampler's report of a slow call, which may still return."""
Floats = NDArray[np.float64]
Kind = TypeVar("Kind", bound=Record)


class Sampler:
    """A sampler process, for as long as the context is open.

    Attributes:
        samples: of all sources, as last read: once it has settled, by `refresh`, at its end.
        lines: its output, once it has ended.
        cpu_share: of one core, from when it had settled until it was ended; None if it was not
            there any more.
        newest_age_ns: time from the end of the newest PM window to the last `refresh`; None without
            windows. Outside 0 to about 0.5 s, CUPTI's stamps are not those of the wall clock.
    """

    refused_with_perfmon: ClassVar[str] = ""
    """Why CUPTI refused this process's first PM session with CAP_PERFMON only; later samplers keep
    CAP_SYS_ADMIN in its place. Empty if it refused none."""

    def __init__(
        self,
        counters: str,
        *,
        pm_interval_us: int = 500,
        pm_despite: Sequence[str] = (),
        user: int | None = None,
    ) -> None:
        """Prepare.

        Args:
            counters: the sources.
            pm_interval_us: the windows of PM sampling.
            pm_despite: programs beside which it samples all the same (`Setting`).
            user: to run as, for root; None: as this process does.

        Raises:
            Unmet: PM sampling is one of them, and the kernel hides the counters.
        """
        if "pm" in counters.split(","):
            need_counters()
        self._counters = counters
        self._interval = f"{pm_interval_us}us"
        self._despite = [word for name in pm_despite for word in ("--pm-despite", name)]
        self._user = user
        self._folder = tempfile.TemporaryDirectory()
        self.samples: list[CounterSample] = []
        self.lines: list[str] = []
        self.cpu_share: float | None = None
        self.newest_age_ns: int | None = None
        self._settled: tuple[int, int] | None = None

    def __enter__(self) -> Sampler:
        self._begin()
        refusal = self._refusal()
        if refusal and not Sampler.refused_with_perfmon and self._user is None:
            self._stop()
            Sampler.refused_with_perfmon = refusal
            self._begin()
        self._settled = time.monotonic_ns(), process_cpu_ns(self._process.pid)
        return self

    def _begin(self) -> None:
        """Start the process, and wait until its sources have reported."""
        folder = Path(self._folder.name)
        self._rings = rings = folder / ("as-admin" if Sampler.refused_with_perfmon else "rings")
        words = [
            "sampler", "--counters", self._counters, "--pm-interval", self._interval,
            "--dir", str(rings), *self._despite,
        ]  # fmt: skip
        begin = ["-m", "inferscope"]
        if self._user is not None:
            os.chown(folder, self._user, self._user)
            begin = ["-c", _WITHOUT_ROOT, str(self._user), str(rings), self._counters]
        elif Sampler.refused_with_perfmon:
            begin = ["-c", _WITH_ADMIN]
        self._words = (folder / "words").open("ab")
        self._process = subprocess.Popen(
            [sys.executable, *begin, *words],
            stderr=self._words,
            stdout=subprocess.DEVNULL,
            env={**os.environ, "INFERSCOPE_DIR": str(rings)},
        )
        try:
            self._wait_for_words()
        except BaseException:
            self._end()
            raise

    def _refusal(self) -> str:
        """Return CUPTI's reason why root has no PM session; empty if there is one, or no CUPTI."""
        if os.geteuid() != 0 or any(one.source == "pm" and one.values for one in self.samples):
            return ""
        reasons = (one.reason for one in self.samples if one.source == "pm")
        return next((reason for reason in reasons if _CUPTI_REFUSED.search(reason)), "")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.refresh()
            if self._settled is not None and self._process.poll() is None:
                since_ns, before_ns = self._settled
                spent_ns = process_cpu_ns(self._process.pid) - before_ns
                self.cpu_share = spent_ns / (time.monotonic_ns() - since_ns)
        finally:
            self._end()

    def refresh(self) -> None:
        """Read all samples so far, including windows still to be decoded."""
        time.sleep(_DECODE_S)
        self.samples = self._read()
        ends_ns = [one.end_ns for one in self.samples if one.source == "pm" and one.values]
        self.newest_age_ns = time.monotonic_ns() - max(ends_ns) if ends_ns else None

    def of(self, source: str) -> list[CounterSample]:
        """Return a source's samples, without its news.

        Raises:
            Unmet: it had none, with its reason.
        """
        found = [one for one in self.samples if one.source == source and one.values]
        if not found:
            reasons = [one.reason for one in self.samples if one.source == source and one.reason]
            before = self.refused_with_perfmon if source == "pm" else ""
            raise Unmet(
                f"{source}: {reasons[0] if reasons else 'no samples'}"
                + (f" With CAP_PERFMON only: {before}" if before else "")
            )
        return found

    def facts(self, source: str) -> dict[str, str]:
        """Return the facts that a source reported of its device on opening."""
        return next((one.facts for one in self.samples if one.source == source and one.facts), {})

    def _wait_for_words(self) -> None:
        """Wait until every source has reported a number, or why it has none.

        Raises:
            Unmet: it ended, or they did not.
        """
        until_s = time.monotonic() + _START_S
        while not self._has_reported():
            if self._process.poll() is not None or time.monotonic() > until_s:
                words = Path(self._folder.name, "words").read_text("utf-8", "replace")
                raise Unmet(f"the sampler did not start: {' '.join(words.split())[-300:]}")
            time.sleep(0.1)
        time.sleep(_SETTLE_S)
        self.samples = self._read()
        library = self.facts("pm").get("cupti", "").partition(" ")[2]
        if library:  # the next sampler need not try all of them
            os.environ.setdefault(LIBRARY_VARIABLE, library)

    def _has_reported(self) -> bool:
        reporting = {
            one.source
            for one in self._read()
            if one.values or (one.reason and not one.reason.startswith(_HUNG))
        }
        return reporting >= set(self._counters.split(","))

    def _read(self) -> list[CounterSample]:
        rings = sampler_rings(self._rings)
        return [sample for path in rings for sample in ring_records(path, CounterSample)]

    def _stop(self) -> None:
        """Stop the process, for what it holds of a device the next one could not have."""
        self._process.terminate()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._words.close()

    def _end(self) -> None:
        """Stop the process and take over what it wrote."""
        self._stop()
        words = Path(self._folder.name, "words").read_text(encoding="utf-8", errors="replace")
        self.lines = words.splitlines()
        with suppress(OSError):  # of a user of its own
            self._folder.cleanup()


class Edges(NamedTuple):
    """When a load began and ended, in ns of our clock."""

    start_ns: float
    end_ns: float


class Windows:
    """One word of one source as short windows, where it has such, else as its samples."""

    def __init__(self, samples: list[CounterSample], word: str) -> None:
        columns = [_columns(one, word) for one in samples if word in one.values]
        starts, ends, values = zip(*columns, strict=True) if columns else ([()], [()], [()])
        self.starts: Floats = np.concatenate(starts).astype(np.float64)
        self.ends: Floats = np.concatenate(ends).astype(np.float64)
        self.values: Floats = np.concatenate(values).astype(np.float64)

    def _overlaps(self, start_ns: float, end_ns: float) -> Floats:
        """Return the share of each window within a stretch."""
        inside = np.minimum(self.ends, end_ns) - np.maximum(self.starts, start_ns)
        shares: Floats = np.clip(inside, 0, None) / np.maximum(self.ends - self.starts, 1)
        return shares

    def amount(self, start_ns: float, end_ns: float) -> float | None:
        """Return the sum within a stretch; None where windows cover less than 99 % of it."""
        shares = self._overlaps(start_ns, end_ns)
        covered = float((shares * (self.ends - self.starts)).sum())
        if covered < LEAST_COVER * (end_ns - start_ns):
            return None
        return float((shares * self.values).sum()) * (end_ns - start_ns) / covered

    def mean(self, start_ns: float, end_ns: float) -> float | None:
        """Return the mean over a stretch by time; None where windows cover less than 90 % of it."""
        weights = self._overlaps(start_ns, end_ns) * (self.ends - self.starts)
        covered = float(weights.sum())
        if not covered or covered < LEAST_MEAN_COVER * (end_ns - start_ns):
            return None
        return float((weights * self.values).sum()) / covered

    def edges(self, start_ns: float, end_ns: float) -> Edges | None:
        """Return when an even load within a stretch began and ended, as its windows tell.

        The first and the last are full only in part: the load lay in them for as long as it takes
        to count what they did. None where fewer than three windows saw it.
        """
        inside = np.flatnonzero(self._overlaps(start_ns, end_ns) > 0)
        lengths = self.ends[inside] - self.starts[inside]
        rates = self.values[inside] / np.maximum(lengths, 1)
        if not len(rates) or rates.max() <= 0:
            return None
        full = float(np.median(rates[rates > _FULL * rates.max()]))
        loaded = np.flatnonzero(rates > _SOME * full)
        if len(loaded) < 3:
            return None
        first, last = loaded[0], loaded[-1]
        filled = np.minimum(rates / full, 1) * lengths
        return Edges(
            float(self.ends[inside[first]] - filled[first]),
            float(self.starts[inside[last]] + filled[last]),
        )


class Traffic:
    """What a device read and wrote, by the windows of one source."""

    def __init__(self, samples: list[CounterSample]) -> None:
        self.read, self.written = (
            Windows(samples, f"dram_{way}_bytes") for way in ("read", "write")
        )

    def amount(self, start_ns: float, end_ns: float) -> float | None:
        """Return the bytes moved within a stretch; None where windows are missing."""
        read, written = (windows.amount(start_ns, end_ns) for windows in (self.read, self.written))
        return None if read is None or written is None else read + written


def window_lengths_ns(samples: list[CounterSample]) -> list[int]:
    """Return how long each short window of a source is."""
    found: list[int] = []
    for one in samples:
        starts, ends = (
            np.frombuffer(column, COLUMNS["starts_ns"]) for column in (one.starts_ns, one.ends_ns)
        )
        found += (ends - starts).tolist()
    return found


def _columns(one: CounterSample, word: str) -> tuple[Any, Any, Any]:
    """Return starts, ends and values of a sample's short windows, else of itself."""
    if word not in one.series:
        return (one.start_ns,), (one.end_ns,), (one.values[word],)
    return (
        np.frombuffer(one.starts_ns, COLUMNS["starts_ns"]),
        np.frombuffer(one.ends_ns, COLUMNS["ends_ns"]),
        np.frombuffer(one.series[word], COLUMNS["series"]),
    )


def ring_records(path: Path, kind: type[Kind]) -> list[Kind]:
    """Return a ring's records of one kind."""
    reader, found = RingReader(path), list[Kind]()
    while frames := reader.read():
        for frame in frames:
            if isinstance(frame, Frame) and frame.code == kind.CODE:
                record = decode(frame.code, frame.payload)
                assert isinstance(record, kind)
                found.append(record)
    reader.close()
    return found
