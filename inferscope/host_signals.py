"""The host's signal handlers: an exception of theirs belongs to the host, wherever it is raised.

A handler runs between two instructions of whatever the main thread executes, so its exception (a
TimeoutError of an alarm, say) appears in the middle of the probe's code, where every `except`
clause that fits would take it for a fault of the probe, of a file or of an argument. What a probe
does as it opens is done on a thread of its own, where no handler runs.

The kernel delivers a signal of the process to any thread that does not block it. A host may block
signals in its own threads after it has opened the probe: to wait for them (`signal.sigwait`, a
signalfd) or for a critical section. So the probe's threads block them as well, from their start.
"""

from __future__ import annotations

# Part of the interpreter; `signal` around it makes an enumeration of each number, at each call.
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
"""`inspect.CO_VARARGS`, without that module's 17 ms at import."""


def pass_on(error: Exception) -> None:
    """Raise an exception again if a signal handler has raised it.

    A handler is the one function that receives, as an argument, the frame that its exception then
    passes through; so is a debugger's trace function, whose exceptions are the host's as well.
    The list of installed handlers does not decide it: one may be removed before it raises.

    Called where an exception was caught, never on the way of a call that succeeds.

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
    """Start a thread in which all signals but faults are blocked, and in those that it starts.

    The calling thread blocks them meanwhile, so that the new one never runs without: it may be
    given its first time slice long after the host has blocked a signal and waits for it.

    A fault, such as SIGSEGV, is delivered to the thread that caused it: where that blocks it, the
    kernel ends the process without calling the host's handler.

    No `threading.Thread`: its `start` raises a KeyError where a signal handler interrupts it.

    Raises:
        RuntimeError: the system gives no more threads.
    """
    # Read apart from the change: a handler may raise within any call, and the mask must come back.
    blocked = _signal.pthread_sigmask(_signal.SIG_BLOCK, ())
    try:
        _signal.pthread_sigmask(_signal.SIG_BLOCK, _signal.valid_signals() - _FAULTS)
        _thread.start_new_thread(run, arguments)
    finally:
        _signal.pthread_sigmask(_signal.SIG_SETMASK, blocked)


@contextmanager
def suppressed(*kinds: type[Exception]) -> Iterator[None]:
    """Suppress exceptions as `contextlib.suppress` does, but not those of a signal handler."""
    try:
        yield
    except kinds as error:
        pass_on(error)
