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


def note(message: str, *values: object) -> None:
    """Say something for whoever looks closely, with the exception being handled, if any."""
    import logging
    import sys

    has_error = sys.exc_info()[0] is not None
    logging.getLogger("inferscope").debug("inferscope: " + message, *values, exc_info=has_error)
