"""Search for stop strings across tokens.

Text that could begin a stop string is held back until the next text decides.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopSearch:
    """Search for stop strings in a growing text.

    Attributes:
        is_found: whether a stop string was found; the text ends before it.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Set the stop strings, none of them empty."""
        assert all(stops), "an empty stop string would stop everything"
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self.is_found = False

    def push(self, text: str) -> str:
        """Add text and return the text that cannot belong to a stop string."""
        if self.is_found:
            return ""
        text = self._held + text
        at = min((found for stop in self._stops if (found := text.find(stop)) >= 0), default=-1)
        if at >= 0:
            self.is_found, self._held = True, ""
            return text[:at]
        keep = self._num_open(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """Return the text held back; call it at the end of the text."""
        held, self._held = self._held, ""
        return held

    def _num_open(self, text: str) -> int:
        """Return the length of the longest suffix that is a prefix of a stop string."""
        for num in range(min(len(text), self._longest - 1), 0, -1):
            end = text[len(text) - num :]
            if any(stop.startswith(end) for stop in self._stops):
                return num
        return 0
