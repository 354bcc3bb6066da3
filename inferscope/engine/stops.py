"""Stop strings: found across tokens, never shown.

Text that could be the beginning of a stop string is held back until the next text decides.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopSearch:
    """Looks for stop strings in a text that grows.

    Attributes:
        is_found: one was there; the text has ended before it.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Take the strings, none of which is empty."""
        assert all(stops), "an empty stop string would stop everything"
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self.is_found = False

    def push(self, text: str) -> str:
        """Add text and return what is certain not to belong to a stop string."""
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
        """Return what is held back: no more text comes."""
        held, self._held = self._held, ""
        return held

    def _num_open(self, text: str) -> int:
        """Return the length of the longest end of the text that begins a stop string."""
        for num in range(min(len(text), self._longest - 1), 0, -1):
            end = text[len(text) - num :]
            if any(stop.startswith(end) for stop in self._stops):
                return num
        return 0
