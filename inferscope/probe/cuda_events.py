"""Timing events of one CUDA device, by way of torch, which the observed process has loaded already.

An event query is a call that a graph capture forbids: one of another thread, while a capture in
CUDA's default mode is under way anywhere in the process, makes that capture fail (PyTorch
#104487). A thread in the mode "thread-local" is exempt: captures of other threads are ignored. So a
thread that is not the engine's queries in that mode, as PyTorch's NCCL watchdog does, or not at all
(https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__STREAM.html,
`cuThreadExchangeStreamCaptureMode`). The driver's function is called and not the runtime's: it is
in one library for all versions of CUDA, and the driver makes no context that was not asked for.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

_THREAD_LOCAL = 1
"""`CU_STREAM_CAPTURE_MODE_THREAD_LOCAL`."""

Exchange = Callable[[int], int | None]
"""Set the calling thread's capture mode; return the former one, None where that failed."""


class TorchEvents:
    """Events on the current stream of one device, whichever device is the current one."""

    def __init__(
        self, device: Any = None, *, cuda: Any = None, exchange: Exchange | None = None
    ) -> None:
        """Take the device to time.

        Args:
            device: a `torch.device` or its index; the current one at the first event, if neither.
            cuda: the module `torch.cuda`, or what behaves like it.
            exchange: sets a thread's capture mode.
        """
        if cuda is None:
            from torch import cuda
        self._cuda = cuda
        self._exchange = exchange
        index = device if isinstance(device, int) else getattr(device, "index", None)
        self._device: int | None = index
        self._aside: Any = None
        # What `current_stream` asks first; then it makes a new object, six calls further.
        core = getattr(getattr(cuda, "torch", None), "_C", None)
        self._stream_key: Callable[[int], Any] | None = getattr(
            core, "_cuda_getCurrentStream", None
        )
        self._key: Any = None
        self._stream: Any = None

    def new(self) -> Any:
        """Make a timing event."""
        return self._cuda.Event(enable_timing=True)

    def record(self, event: Any) -> None:
        """Record on the device's current stream.

        Three times in a step, before its dispatch: so torch makes an object for the stream only
        when another stream has become the current one.
        """
        index, key_of = self._device, self._stream_key
        if index is None:
            index = self._index()
        if key_of is None:
            event.record(self._cuda.current_stream(index))
            return
        key = key_of(index)
        if key != self._key:
            self._stream = self._cuda.current_stream(index)
            self._key = key
        event.record(self._stream)

    def record_aside(self, event: Any) -> None:
        """Record on a side stream of the device, made on first use."""
        if self._aside is None:
            self._aside = self._cuda.Stream(device=self._index())
        event.record(self._aside)

    def is_done(self, event: Any) -> bool:
        """Query, on the event's device; never synchronises.

        A query on a device without a context makes one there, of some hundreds of megabytes: a
        model on `cuda:1` does not make that the current device of its thread.
        """
        if self._cuda.current_device() == self._index():
            return bool(event.query())
        with self._cuda.device(self._index()):
            return bool(event.query())

    def elapsed_ms(self, start: Any, end: Any) -> float:
        """Return milliseconds between two passed events, which it queries as well."""
        if self._cuda.current_device() == self._index():
            return float(start.elapsed_time(end))
        with self._cuda.device(self._index()):
            return float(start.elapsed_time(end))

    def is_capturing(self) -> bool:
        """Return whether the calling thread's current stream is being captured."""
        return bool(self._cuda.is_current_stream_capturing())

    @contextmanager
    def aside(self) -> Iterator[bool]:
        """Ignore other threads' captures on this one; yield whether that succeeded."""
        with self._cuda.device(self._index()):
            exchange = self._exchange or _driver_exchange()
            former = None if exchange is None else exchange(_THREAD_LOCAL)
            try:
                yield former is not None
            finally:
                if exchange is not None and former is not None:
                    exchange(former)

    def reset(self) -> None:
        """Forget the streams."""
        self._aside = self._key = self._stream = None

    def _index(self) -> int:
        if self._device is None:
            self._device = int(self._cuda.current_device())
        return self._device


@cache
def _driver_exchange() -> Exchange | None:
    """Return the driver's exchange of capture modes; None where there is none (ROCm, old CUDA)."""
    try:
        function = ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):
        return None
    return exchange_by(function)


def exchange_by(function: Any) -> Exchange:
    """Make an exchange of `CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *)`."""
    function.argtypes, function.restype = [ctypes.POINTER(ctypes.c_int)], ctypes.c_int

    def exchange(mode: int) -> int | None:
        held = ctypes.c_int(mode)
        return held.value if function(ctypes.byref(held)) == 0 else None

    return exchange
