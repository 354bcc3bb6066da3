"""Coverage: finished requests that were observed, over those that the engine reports.

A separate thread reads the engine's own metrics page, so that a hanging page blocks nothing else.
Both counts cover the same five minutes; below fifty requests the ratio is unknown.

A page belongs to the engine whose ID it is configured for. The page of `*` belongs to the only
engine present without a page of its own: a pod's engine ID is not known in advance. With several
such engines the page is ignored.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping

from inferscope.errors import InferScopeError
from inferscope.metrics_page import dialect_of, fetch, page_url, read
from inferscope_prometheus.settings import ANY_ENGINE

_logger = logging.getLogger(__name__)

EVERY_S = 15.0
_KEPT = 21
_FEWEST = 50
_MOST_NAMED = 3
_BEHIND_S = 3.0
"""Maximum seconds from a request's end to its count here: late records and snapshots delay it."""


class Covered:
    """Two counts of one engine's requests over the last minutes."""

    def __init__(self) -> None:
        self._counts: deque[tuple[float, int]] = deque(maxlen=_KEPT)

    def add(self, theirs: float, ours: int) -> None:
        """Add both counts; a decrease restarts both."""
        if self._counts and (theirs < self._counts[-1][0] or ours < self._counts[-1][1]):
            self._counts.clear()
        self._counts.append((theirs, ours))

    def forget(self) -> None:
        """Restart: the page could not be read."""
        self._counts.clear()

    @property
    def ratio(self) -> float | None:
        """Return our count over the engine's; None below the minimum."""
        if not self._counts:
            return None
        theirs = self._counts[-1][0] - self._counts[0][0]
        return (self._counts[-1][1] - self._counts[0][1]) / theirs if theirs >= _FEWEST else None


class Coverage:
    """Reader of engines' own request counts."""

    def __init__(
        self,
        urls: Mapping[str, str],
        *,
        finished_of: Callable[[str], float | None] | None = None,
        every_s: float = EVERY_S,
        behind_s: float = _BEHIND_S,
    ) -> None:
        """Start the reader thread.

        Args:
            urls: metrics pages by engine ID, or by `*`.
            finished_of: reads a page.
            every_s: interval between two reads.
            behind_s: maximum lag of our counts behind the engines'.
        """
        self._urls = {engine_id: page_url(url) for engine_id, url in urls.items()}
        self._any_url = self._urls.pop(ANY_ENGINE, None)
        # Both are replaced as a whole by the snapshot thread and read by the reader thread.
        self._ours: Mapping[str, int] = {}
        self._others: Collection[str] = ()
        """Engines present that have no page of their own."""
        self._num_unclear = 0
        """Consecutive rounds with several such engines."""
        self._is_logged = False
        self._finished_of = finished_of or own_count
        self._every_s, self._behind_s = every_s, behind_s
        self._covered: Mapping[str, Covered] = {}
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="coverage", daemon=True)
        self._thread.start()

    def update(self, ours: Mapping[str, int], there: Collection[str]) -> None:
        """Take the number of finished requests by engine, and the engines present."""
        self._ours = ours
        self._others = [engine_id for engine_id in there if engine_id not in self._urls]

    def ratio(self, engine_id: str) -> float | None:
        """Return the observed share of an engine's requests; None if unknown."""
        covered = self._covered.get(engine_id)
        return None if covered is None else covered.ratio

    def close(self) -> None:
        """Stop the reader thread."""
        self._is_over.set()

    def _run(self) -> None:
        while not self._is_over.is_set():
            theirs = {engine_id: self._finished_of(url) for engine_id, url in self._pages().items()}
            if self._is_over.wait(self._behind_s):
                return
            # A page that now belongs to another engine has no information about the previous one.
            self._covered = {name: self._covered.get(name) or Covered() for name in theirs}
            for engine_id, num in theirs.items():
                ours = self._ours.get(engine_id)
                if num is None or ours is None:
                    self._covered[engine_id].forget()
                else:
                    self._covered[engine_id].add(num, ours)
            self._is_over.wait(max(0.0, self._every_s - self._behind_s))

    def _pages(self) -> Mapping[str, str]:
        """Return the pages to read now, by engine."""
        others = self._others
        if self._any_url is None:
            return self._urls
        if len(others) == 1:
            self._num_unclear = 0
            return {**self._urls, next(iter(others)): self._any_url}
        # Twice in a row: a restarted engine may overlap its predecessor.
        self._num_unclear = self._num_unclear + 1 if others else 0
        if self._num_unclear > 1 and not self._is_logged:
            self._is_logged = True
            _logger.warning(
                "exporters.prometheus: engine_metrics has '%s', the page of a single engine, but "
                "there are %d (%s): the page is ignored. Use ENGINE_ID: http://HOST:PORT",
                ANY_ENGINE,
                len(others),
                ", ".join(sorted(others)[:_MOST_NAMED]),
            )
        return self._urls


def own_count(url: str) -> float | None:
    """Return the finished requests that an engine's page reports; None if it reports none."""
    try:
        page = fetch(url)
        return read(page, dialect_of(page)).counters.get("finished")
    except InferScopeError:
        return None
