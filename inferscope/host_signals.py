"""The host's signal handlers: an exception of theirs belongs to the host, wherever it is raised.

A handler runs between two instructions of whatever the main thread executes, so its exception (a
TimeoutError of an alarm, say) appears in the middle of the probe's code, where every `except`
clause that fits would take it for a fault of the probe, of a file or of an argument. What a probe
does as it opens is done on a thread of its own, where no handler runs.

The kernel delivers a signal of the process to any thread that does not block it. A host may block
signals in its own threads after it has opened the probe: to wait for them (`signal.sigwait`, a
signalfd) or for a critical section. So the probe's threads block them as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import get_native_id
from types import FrameType

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


def block_signals(starter: int) -> None:
    """Block all signals in the calling thread, and in those that it starts, except faults.

    Nothing is done in the thread `starter` (its `get_native_id`), which has started the calling
    one: a host that gevent has patched runs greenlets for threads, all in one thread of its own.

    A fault, such as SIGSEGV, is delivered to the thread that caused it: where that blocks it, the
    kernel ends the process without calling the host's handler.
    """
    import signal  # not worth its modules at import

    if get_native_id() == starter:
        return
    faults = {
        signal.SIGSEGV,
        signal.SIGBUS,
        signal.SIGFPE,
        signal.SIGILL,
        signal.SIGTRAP,
        signal.SIGABRT,
        signal.SIGSYS,
    }
    with suppress(OSError):
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - faults)


@contextmanager
def suppressed(*kinds: type[Exception]) -> Iterator[None]:
    """Suppress exceptions as `contextlib.suppress` does, but not those of a signal handler."""
    try:
        yield
    except kinds as error:
        pass_on(error)
