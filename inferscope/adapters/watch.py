"""What adapters of loops in this very process return for a subject that they observe."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


class Watch:
    """An observation, until it is closed.

    Attributes:
        path: the ring, None where nothing is recorded.
    """

    def __init__(self, path: Path | None, stop: Callable[[], None]) -> None:
        """Take the ring, and what ends the observation."""
        self.path = path
        self._stop: Callable[[], None] | None = stop

    def close(self) -> None:
        """Observe the subject no more. Idempotent."""
        stop, self._stop = self._stop, None
        if stop is not None:
            stop()
