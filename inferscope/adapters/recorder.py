"""What hooks in a generating process record with: a probe, and the number of the next step.

A ring has one writing thread, and a timer one step at a time. So each thread that generates while
others do takes a recorder of its own.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from pathlib import Path

from inferscope.adapters.patching import Patches
from inferscope.probe import EngineInfo, Probe, StepTimer

MAX_RECORDERS = 8
"""Threads that may generate at the same time: each has a ring, of 64 MB unless told otherwise."""


class Recorder:
    """Records one thread's steps into a ring of its own."""

    def __init__(self, probe: Probe) -> None:
        self.probe = probe
        self._next_step = 0
        self._seen: set[tuple[str, int]] = set()

    def next_step(self) -> int:
        """Return the number of the step that begins."""
        step = self._next_step
        self._next_step += 1
        return step

    def is_cold(self, mode: str, num_tokens: int) -> bool:
        """Tell whether no step of about this size has run before in this mode."""
        bucket = (mode, num_tokens.bit_length())
        if bucket in self._seen:
            return False
        self._seen.add(bucket)
        return True


class Recorders:
    """The recorders of a process: one for each thread that generates at the same time.

    They are data-parallel ranks to a reader, for each counts its own steps.
    """

    def __init__(self, patches: Patches) -> None:
        """Start with none; a fault in a hook of `patches` switches their probes off."""
        self._patches = patches
        self._lock = threading.Lock()
        self._free: list[Recorder] = []
        self._all: list[Recorder] = []
        # A program that just ends, as most do, has not lost its engine.
        atexit.register(self.close)

    def take(self, describe: Callable[[int], tuple[EngineInfo, StepTimer]]) -> Recorder | None:
        """Return a recorder that nobody uses; None, once said, where there are too many.

        Args:
            describe: given the recorder's rank, says what is observed and how it is timed.
        """
        with self._lock:
            if self._free:
                return self._free.pop()
            rank = len(self._all)
            if rank == MAX_RECORDERS:
                self._patches.unsupported("more threads generating at once; some go unrecorded")
                return None
            info, timer = describe(rank)
            probe = Probe.open(info, rank=rank, timer=timer)
            self._patches.probes.append(probe)
            recorder = Recorder(probe)
            self._all.append(recorder)
            return recorder

    def give_back(self, recorder: Recorder) -> None:
        """Let others use a recorder; the one used longest is taken first."""
        with self._lock:
            self._free.append(recorder)
            self._free.sort(key=self._all.index, reverse=True)

    def open_first(self, describe: Callable[[int], tuple[EngineInfo, StepTimer]]) -> None:
        """Make the first one, for a ring to attach to before the first step; see `take`."""
        if not self._all:
            recorder = self.take(describe)
            if recorder is not None:
                self.give_back(recorder)

    @property
    def path(self) -> Path | None:
        """The first one's ring, None where nothing is recorded."""
        return self._all[0].probe.path if self._all else None

    def close(self) -> None:
        """Close all rings."""
        atexit.unregister(self.close)
        for recorder in self._all:
            recorder.probe.close()
