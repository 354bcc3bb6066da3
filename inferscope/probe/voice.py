"""What the probe has to say, into the log of its host.

`logging` is loaded only when something is said: it is a tenth of what importing the probe costs,
and a probe that works has nothing to say.
"""

from __future__ import annotations


def warn(message: str, *values: object) -> None:
    """Say something that the host's owner should know."""
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
    poll, descriptors = select.poll(), {1, 2}
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLOUT)
    for handler in handlers:
        try:
            descriptor = handler.stream.fileno()  # type: ignore[attr-defined]
            poll.register(descriptor, select.POLLOUT)
        except Exception:  # it has no stream, or a closed one
            continue
        descriptors.add(descriptor)
    return len(poll.poll(0)) < len(descriptors)


def note(message: str, *values: object) -> None:
    """Say something for whoever looks closely, with the exception being handled, if any."""
    import logging
    import sys

    has_error = sys.exc_info()[0] is not None
    logging.getLogger("inferscope").debug("inferscope: " + message, *values, exc_info=has_error)
