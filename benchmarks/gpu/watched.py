"""The real sampler, beside this process: started, read back from its ring, and ended.

A process of its own, as in production: CUPTI does not meet what the engine has loaded, and what it
costs is what users pay.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from part import Unmet

from inferscope.records import COLUMNS, CounterSample, Record, decode
from inferscope.ring.discovery import sampler_rings
from inferscope.ring.reader import Frame, RingReader

_START_S = 15.0
_SETTLE_S = 0.5
Floats = NDArray[np.float64]
Kind = TypeVar("Kind", bound=Record)


class Sampler:
    """A sampler process, for as long as the context is open."""

    def __init__(self, counters: str, *, pm_interval_us: int = 500) -> None:
        self._counters = counters
        self._interval = f"{pm_interval_us}us"
        self._folder = tempfile.TemporaryDirectory()
        self.lines: list[str] = []
        self.cpu_share: float | None = None
        self._began_s = 0.0

    def __enter__(self) -> Sampler:
        folder = Path(self._folder.name)
        self._words = (folder / "words").open("wb")
        self._cpu_before = _children_cpu_s()
        self._process = subprocess.Popen(
            [
                sys.executable, "-m", "inferscope", "sampler", "--counters", self._counters,
                "--pm-interval", self._interval, "--dir", str(folder / "rings"),
            ],
            stderr=self._words,
            stdout=subprocess.DEVNULL,
            env={**os.environ, "INFERSCOPE_DIR": str(folder / "rings")},
        )  # fmt: skip
        self._began_s = time.monotonic()
        while not self._has_spoken():
            if self._process.poll() is not None or time.monotonic() - self._began_s > _START_S:
                self.__exit__(None, None, None)
                raise Unmet(f"the sampler did not start: {' '.join(self.lines)}")
            time.sleep(0.1)
        time.sleep(_SETTLE_S)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        time.sleep(0.3)  # the last windows are decoded and written
        self.samples = self._read()
        self._process.terminate()
        self._process.wait(10)
        spent_s = _children_cpu_s() - self._cpu_before
        self.cpu_share = spent_s / max(1e-9, time.monotonic() - self._began_s)
        self._words.close()
        words = Path(self._folder.name, "words").read_text(encoding="utf-8", errors="replace")
        self.lines = words.splitlines()
        self._folder.cleanup()

    def of(self, source: str) -> list[CounterSample]:
        """Return a source's samples, without its news.

        Raises:
            Unmet: it had none, with its reason.
        """
        found = [one for one in self.samples if one.source == source and one.values]
        if not found:
            reasons = [one.reason for one in self.samples if one.source == source and one.reason]
            raise Unmet(f"{source}: {reasons[0] if reasons else 'told nothing'}")
        return found

    def facts(self, source: str) -> dict[str, str]:
        """Return what a source said of its device when it opened it."""
        return next((one.facts for one in self.samples if one.source == source and one.facts), {})

    def _has_spoken(self) -> bool:
        """Tell whether every source has told a number, or why it has none."""
        spoken = {one.source for one in self._read() if one.values or one.reason}
        return spoken >= set(self._counters.split(","))

    def _read(self) -> list[CounterSample]:
        rings = sampler_rings(Path(self._folder.name, "rings"))
        return [sample for path in rings for sample in told(path, CounterSample)]


class Windows:
    """One word of one source as short windows, where it has such, else as its samples."""

    def __init__(self, samples: list[CounterSample], word: str) -> None:
        starts, ends, values = [], [], []
        for one in samples:
            if word in one.series:
                starts += np.frombuffer(one.starts_ns, COLUMNS["starts_ns"]).tolist()
                ends += np.frombuffer(one.ends_ns, COLUMNS["ends_ns"]).tolist()
                values += np.frombuffer(one.series[word], COLUMNS["series"]).tolist()
            elif word in one.values:
                starts.append(one.start_ns)
                ends.append(one.end_ns)
                values.append(one.values[word])
        self.starts = np.array(starts, dtype=np.float64)
        self.ends = np.array(ends, dtype=np.float64)
        self.values: Floats = np.array(values, dtype=np.float64)

    def _overlaps(self, start_ns: int, end_ns: int) -> Floats:
        """Return the share of each window within a stretch."""
        inside = np.minimum(self.ends, end_ns) - np.maximum(self.starts, start_ns)
        shares: Floats = np.clip(inside, 0, None) / np.maximum(self.ends - self.starts, 1)
        return shares

    def amount(self, start_ns: int, end_ns: int) -> float | None:
        """Return the sum within a stretch; None where windows cover less than 99 % of it."""
        shares = self._overlaps(start_ns, end_ns)
        covered = float((shares * (self.ends - self.starts)).sum())
        if covered < 0.99 * (end_ns - start_ns):
            return None
        return float((shares * self.values).sum()) * (end_ns - start_ns) / covered

    def mean(self, start_ns: int, end_ns: int) -> float | None:
        """Return the mean over a stretch, by time; None where nothing covers any of it."""
        weights = self._overlaps(start_ns, end_ns) * (self.ends - self.starts)
        return float((weights * self.values).sum() / weights.sum()) if weights.sum() else None


def told(path: Path, kind: type[Kind]) -> list[Kind]:
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


def _children_cpu_s() -> float:
    """Return the processor time of children that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
