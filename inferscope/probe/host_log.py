"""Messages of the probe in the log of its host.

`logging` is loaded only with the first message: it is a tenth of what importing the probe costs,
and a probe that works logs nothing.
"""

from __future__ import annotations

import os
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

from inferscope.host_signals import start_thread, suppressed

if TYPE_CHECKING:
    import logging

_MOST_MESSAGES = 16
_ROOM_AGAIN_S = 0.5
_messages: deque[str] = deque(maxlen=_MOST_MESSAGES)
"""Lines that wait for room in the log; of more the oldest are dropped."""
_speaking_pid = 0
"""The process whose thread writes them, 0 for none."""


def warn(message: str, *values: object) -> None:
    """Write a line that the host's owner should read into the host's log, without blocking.

    While standard output or error is a full pipe, a thread of its own waits for room. A filter or
    handler of that log that raises costs the line alone: what is logged here may be called from
    within a call of the host.
    """
    with suppressed(Exception):
        if not _messages and not would_block():
            _log(message, *values)
            return
        _messages.append(message % values if values else message)
        _start_writer()


def _start_writer() -> None:
    global _speaking_pid
    if _speaking_pid == os.getpid():
        return
    _speaking_pid = os.getpid()
    try:
        start_thread(_write_pending)
    except BaseException as error:  # of a signal handler, too: the next line begins a thread
        _speaking_pid = 0
        if not isinstance(error, RuntimeError):  # the system gives no more threads
            raise


def _write_pending() -> None:
    global _speaking_pid
    while True:
        while _messages:
            is_blocked = False
            with suppress(Exception):  # of a handler of that log
                is_blocked = would_block()
            if is_blocked:
                time.sleep(_ROOM_AGAIN_S)
                continue
            with suppress(Exception):
                _log("%s", _messages.popleft())
        _speaking_pid = 0
        if not _messages:  # else a line was added before that, and began no thread
            return
        _speaking_pid = os.getpid()


def _log(message: str, *values: object) -> None:
    import logging

    logger = logging.getLogger("inferscope")
    if logger.level == logging.NOTSET and not logger.isEnabledFor(logging.WARNING):
        # Some library has set the root's level to its own taste (one that vLLM imports does): that
        # was not meant for us. Who wants us silent sets our level.
        logger.setLevel(logging.WARNING)
    logger.warning("inferscope: " + message, *values)


def would_block() -> bool:
    """Return whether a handler of the host's log may write to a pipe or a terminal that is full.

    A handler without a stream of its own (loguru's, rich's) may write to standard output or error.
    A thread that waits for one holds the handler's lock, which `logging.shutdown` takes at exit.
    Where eventlet has removed `select.poll` the answer is no: a line then waits as the host's do.
    """
    import logging
    import select

    logger: logging.Logger | None = logging.getLogger("inferscope")
    handlers: list[logging.Handler] = []
    while logger is not None:
        handlers += logger.handlers
        logger = logger.parent if logger.propagate else None
    if not handlers and logging.lastResort is not None:
        handlers.append(logging.lastResort)
    if not hasattr(select, "poll"):
        return False
    poll = select.poll()
    descriptors = {each for handler in handlers for each in _descriptors_of(handler)}
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLOUT)
    return len(poll.poll(0)) < len(descriptors)


def _descriptors_of(handler: logging.Handler) -> tuple[int, ...]:
    """Return the files that a handler may write to."""
    with suppress(Exception):  # it has no stream, or a closed one
        descriptor = int(handler.stream.fileno())  # type: ignore[attr-defined]
        if descriptor >= 0:
            return (descriptor,)
    return 1, 2


def _forget_messages() -> None:
    """Leave the parent's lines to the parent."""
    global _speaking_pid
    _speaking_pid = 0
    _messages.clear()


os.register_at_fork(after_in_child=_forget_messages)


def note(message: str, *values: object) -> None:
    """Log a line at level DEBUG, with the exception being handled, if any."""
    import logging
    import sys

    logger, has_error = logging.getLogger("inferscope"), sys.exc_info()[0] is not None
    with suppressed(Exception):  # of a filter or handler of that log
        if logger.isEnabledFor(logging.DEBUG) and not would_block():
            logger.debug("inferscope: " + message, *values, exc_info=has_error)
