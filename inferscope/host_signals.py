"""Signal handlers of the host process, whose exceptions must reach the host from any code.

A handler runs between two instructions of the main thread, so its exception (an alarm's
TimeoutError, for example) appears in the middle of the probe's code. There every matching `except`
clause would mistake it for a fault of the probe, a file or an argument. The probe therefore opens
on a thread of its own, where no handler runs.

The kernel delivers a process's signal to any thread that does not block it. A host may block
signals in its own threads after it opened the probe: to wait for them (`signal.sigwait`, a
signalfd) or for a critical section. So the probe's threads block them too, from their start.
"""

from __future__ import annotations

# Built into the interpreter; its wrapper `signal` creates an enum member per number at each call.
import _signal  # type: ignore[import-not-found]
import _thread
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_FAULTS = {
    _signal.SIGSEGV,
    _signal.SIGBUS,
    _signal.SIGFPE,
    _signal.SIGILL,
    _signal.SIGTRAP,
    _signal.SIGABRT,
    _signal.SIGSYS,
}
_VARIABLE_ARGUMENTS = 0x04
"""Value of `inspect.CO_VARARGS`, without that module's 17 ms at import."""


def pass_on(error: Exception) -> None:
    """Raise an exception again if a signal handler raised it.

    Only a handler receives, as an argument, the frame that its exception then passes through. A
    debugger's trace function does too, and its exceptions belong to the host as well. The list of
    installed handlers does not decide it: a handler may be removed before it raises.

    Called only where an exception was caught, never in a call that succeeds.

    Raises:
        Exception: the same one.
    """
    passed: list[FrameType] = []
    trace = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        if passed and any(
            type(given) is FrameType and given in passed for given in _arguments(frame)
        ):
            raise error
        passed.append(frame)
        trace = trace.tb_next


def _arguments(frame: FrameType) -> Iterator[object]:
    code, values = frame.f_code, frame.f_locals
    num_named = code.co_argcount + code.co_kwonlyargcount
    for name in code.co_varnames[: code.co_argcount]:
        yield values.get(name)
    if code.co_flags & _VARIABLE_ARGUMENTS:
        rest = values.get(code.co_varnames[num_named])
        yield from rest if type(rest) is tuple else ()


def start_thread(run: Callable[..., object], *arguments: object) -> None:
    """Start a thread that blocks all signals except faults; threads it starts inherit that.

    The calling thread blocks them meanwhile, so that the new thread never runs without the mask: it
    may get its first time slice long after the host blocks a signal and waits for it.

    A fault, such as SIGSEGV, is delivered to the thread that caused it. If that thread blocks it,
    the kernel ends the process without calling the host's handler.

    `threading.Thread` is not used: a signal handler that interrupts its `start` causes a KeyError.

    Raises:
        RuntimeError: the system cannot create another thread.
    """
    # Read before the change: a handler may raise within any call, and the mask must be restored.
    blocked = _signal.pthread_sigmask(_signal.SIG_BLOCK, ())
    try:
        _signal.pthread_sigmask(_signal.SIG_BLOCK, _signal.valid_signals() - _FAULTS)
        _thread.start_new_thread(run, arguments)
    finally:
        _signal.pthread_sigmask(_signal.SIG_SETMASK, blocked)


@contextmanager
def suppressed(*kinds: type[Exception]) -> Iterator[None]:
    """Suppress exceptions as `contextlib.suppress` does, except those of a signal handler."""
    try:
        yield
    except kinds as error:
        pass_on(error)
