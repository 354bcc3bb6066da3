"""The host's signal handlers: an exception of theirs belongs to the host, wherever it is raised.

A handler runs between two instructions of whatever the main thread executes, so its exception (a
TimeoutError of an alarm, say) appears in the middle of the probe's code, where every `except
Exception` would take it for a fault of the probe or of an argument.
"""

from __future__ import annotations

import signal
from functools import partial
from types import CodeType


def pass_on(error: Exception) -> None:
    """Raise an exception again if a signal handler has raised it.

    Called where an exception was caught, never on the way of a call that succeeds.

    Raises:
        Exception: the same one.
    """
    codes = {_code(signal.getsignal(number)) for number in signal.valid_signals()}
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in codes:
            raise error
        trace = trace.tb_next


def _code(handler: object) -> CodeType | None:
    """Return the code of a handler: a function, a method, a `partial` or a callable object."""
    while isinstance(handler, partial):
        handler = handler.func
    if callable(handler) and not hasattr(handler, "__code__") and not hasattr(handler, "__func__"):
        handler = type(handler).__call__
    code = getattr(getattr(handler, "__func__", handler), "__code__", None)
    return code if isinstance(code, CodeType) else None
