"""A strict stand-in for `torch.cuda`: devices, contexts, streams, events and graph captures.

It refuses what CUDA refuses, from whichever thread: an event of one device on a stream of another,
anything of a lost context, and a query while a graph is being captured, which makes that capture
fail as well. A call of a thread on whose device there is no context makes one, as CUDA does.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from tests.probe.fakes import FakeClock

GLOBAL, THREAD_LOCAL = 0, 1
US = 1000


class Capture:
    """A graph capture in progress, in CUDA's default mode."""

    def __init__(self, device: int) -> None:
        self.device = device
        self.thread = threading.get_ident()
        self.is_broken = False


class Stream:
    def __init__(self, cuda: StrictCuda, device: int, *, lag_ns: int = 0) -> None:
        self.cuda, self.device, self.lag_ns = cuda, device, lag_ns
        self.context = cuda.touch(device)


class Event:
    def __init__(self, cuda: StrictCuda, *, enable_timing: bool) -> None:
        if cuda.constructor_error is not None:
            raise cuda.constructor_error
        assert enable_timing
        cuda.num_made += 1
        self.cuda = cuda
        self.context: Any = None
        self.at_ns = 0

    def record(self, stream: Stream) -> None:
        cuda = self.cuda
        cuda.check(stream.context)
        if self.context is not None and self.context is not stream.context:
            raise RuntimeError("Event device does not match recording stream's device.")
        if cuda.is_current_stream_capturing():
            cuda.misuses.append("an event of ours within a captured graph")
        self.context = stream.context
        self.at_ns = cuda.clock.now_ns + stream.lag_ns
        cuda.recorded.append(stream.device)

    def query(self) -> bool:
        self.cuda.ask(self.context)
        self.cuda.clock.now_ns += 500
        return self.cuda.clock.now_ns >= self.at_ns

    def elapsed_time(self, end: Event) -> float:
        self.cuda.ask(self.context)
        self.cuda.ask(end.context)
        if self.context is not end.context:
            raise RuntimeError("CUDA error: invalid resource handle")
        exact_ms = (end.at_ns - self.at_ns) / 1e6
        return float(struct.unpack("f", struct.pack("f", exact_ms))[0])


class _OnThread(threading.local):
    device = 0
    mode = GLOBAL


class StrictCuda:
    """The functions of `torch.cuda` that `TorchEvents` calls.

    Attributes:
        contexts: of the devices that have one.
        recorded: the device of each event recorded.
        lag_ns: between a call and the device's reaching it, on compute streams.
        constructor_error: what making an event raises.
        misuses: what CUDA would let pass and we must not do.
    """

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.contexts: dict[int, object] = {}
        self.captures: list[Capture] = []
        self.recorded: list[int] = []
        self.lag_ns = 0
        self.misuses: list[str] = []
        self.num_made = 0
        self.num_asked = 0
        self.constructor_error: BaseException | None = None
        self._on = _OnThread()
        self._queued: dict[int, Stream] = {}

    # --- as torch.cuda ------------------------------------------------------------------------

    def Event(self, *, enable_timing: bool) -> Event:
        return Event(self, enable_timing=enable_timing)

    def Stream(self, *, device: int) -> Stream:
        return Stream(self, device, lag_ns=2 * US)

    def current_device(self) -> int:
        return self._on.device

    def current_stream(self, device: int) -> Stream:
        stream = self._queued.get(device)
        if stream is None or stream.context is not self.contexts.get(device):
            stream = self._queued[device] = Stream(self, device)
        stream.lag_ns = self.lag_ns
        return stream

    @contextmanager
    def device(self, device: int) -> Iterator[None]:
        former, self._on.device = self._on.device, device
        try:
            yield
        finally:
            self._on.device = former

    def is_current_stream_capturing(self) -> bool:
        return any(each.thread == threading.get_ident() for each in self.captures)

    # --- the driver ---------------------------------------------------------------------------

    def exchange(self, mode: int) -> int | None:
        former, self._on.mode = self._on.mode, mode
        return former

    def touch(self, device: int) -> object:
        return self.contexts.setdefault(device, SimpleNamespace(is_lost=False))

    def check(self, context: Any) -> None:
        assert context is not None, "an event that was never recorded"
        if context.is_lost:
            raise RuntimeError("CUDA error: context is destroyed")

    def ask(self, context: Any) -> None:
        """Do what a query does, before its answer."""
        self.num_asked += 1
        me = threading.get_ident()
        forbidden = [each for each in self.captures if each.thread == me or self._on.mode == GLOBAL]
        for each in forbidden:
            each.is_broken = True
        if forbidden:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        self.touch(self._on.device)
        self.check(context)

    # --- what tests do ------------------------------------------------------------------------

    def set_device(self, device: int) -> None:
        self._on.device = device

    def lose_context(self, device: int) -> None:
        """Destroy a device's context; the next call makes another."""
        context: Any = self.contexts.pop(device)
        context.is_lost = True

    @contextmanager
    def capture(self, device: int = 0) -> Iterator[Capture]:
        """Capture a graph on this thread; fail at the end if it was made to."""
        capture = Capture(device)
        self.captures.append(capture)
        try:
            yield capture
        finally:
            self.captures.remove(capture)
        assert not capture.is_broken, "the host's capture was made to fail"
