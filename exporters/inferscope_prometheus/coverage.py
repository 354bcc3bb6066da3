"""How much we see: the requests we saw finish, over those that the engine itself says it finished.

An engine's own page is read on a thread of its own, so that one that hangs holds up nobody. Both
counts are taken over the same five minutes; below fifty requests in them, nobody knows.

A page is of the engine whose id is named. That of `*` is of the only engine that is there and has
none of its own: nobody can write down an id that is a pod's. Of several nobody can tell which it
is, so it is none's.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping

from inferscope.errors import InferScopeError
from inferscope.metrics_page.dialects import dialect_of
from inferscope.metrics_page.fetch import fetch, page_url
from inferscope.metrics_page.reading import read
from inferscope_prometheus.settings import ANY_ENGINE

_logger = logging.getLogger(__name__)

EVERY_S = 15.0
_KEPT = 21
_FEWEST = 50
_MOST_NAMED = 3
_BEHIND_S = 3.0
"""From a request's end to our counting it: the fold waits for what comes late, a look for another.
"""


class Covered:
    """Two counts of one engine's requests, over the last minutes."""

    def __init__(self) -> None:
        self._counts: deque[tuple[float, int]] = deque(maxlen=_KEPT)

    def add(self, theirs: float, ours: int) -> None:
        """Take both counts; one that is lower than before began anew, and so do we."""
        if self._counts and (theirs < self._counts[-1][0] or ours < self._counts[-1][1]):
            self._counts.clear()
        self._counts.append((theirs, ours))

    def forget(self) -> None:
        """Begin anew: the page could not be read."""
        self._counts.clear()

    @property
    def ratio(self) -> float | None:
        """Return ours over theirs, None while there are too few."""
        if not self._counts:
            return None
        theirs = self._counts[-1][0] - self._counts[0][0]
        return (self._counts[-1][1] - self._counts[0][1]) / theirs if theirs >= _FEWEST else None


class Coverage:
    """Asks engines for their counts."""

    def __init__(
        self,
        urls: Mapping[str, str],
        *,
        finished_of: Callable[[str], float | None] | None = None,
        every_s: float = EVERY_S,
        behind_s: float = _BEHIND_S,
    ) -> None:
        """Start to ask.

        Args:
            urls: of the engines' pages, by engine, or by `*`.
            finished_of: reads a page.
            every_s: between two questions.
            behind_s: how far our counts may be behind the engines'.
        """
        self._urls = {engine_id: page_url(url) for engine_id, url in urls.items()}
        self._any_url = self._urls.pop(ANY_ENGINE, None)
        # Both are replaced as a whole by the thread that looks, and read by the one that asks.
        self._ours: Mapping[str, int] = {}
        self._others: Collection[str] = ()
        """Engines that are there and have no page of their own."""
        self._num_unclear = 0
        """Rounds in a row in which there were several."""
        self._is_said = False
        self._finished_of = finished_of or own_count
        self._every_s, self._behind_s = every_s, behind_s
        self._covered: Mapping[str, Covered] = {}
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="coverage", daemon=True)
        self._thread.start()

    def look(self, ours: Mapping[str, int], there: Collection[str]) -> None:
        """Take how many requests were seen to finish, by engine, and which engines are there."""
        self._ours = ours
        self._others = [engine_id for engine_id in there if engine_id not in self._urls]

    def ratio(self, engine_id: str) -> float | None:
        """Return what part of an engine's requests is seen, None where that is not known."""
        covered = self._covered.get(engine_id)
        return None if covered is None else covered.ratio

    def close(self) -> None:
        """Ask no more."""
        self._is_over.set()

    def _run(self) -> None:
        while not self._is_over.is_set():
            theirs = {engine_id: self._finished_of(url) for engine_id, url in self._pages().items()}
            if self._is_over.wait(self._behind_s):
                return
            # A page that is another engine's now tells nothing of the one before.
            self._covered = {name: self._covered.get(name) or Covered() for name in theirs}
            for engine_id, num in theirs.items():
                ours = self._ours.get(engine_id)
                if num is None or ours is None:
                    self._covered[engine_id].forget()
                else:
                    self._covered[engine_id].add(num, ours)
            self._is_over.wait(max(0.0, self._every_s - self._behind_s))

    def _pages(self) -> Mapping[str, str]:
        """Return whose pages are to be asked for now."""
        others = self._others
        if self._any_url is None:
            return self._urls
        if len(others) == 1:
            self._num_unclear = 0
            return {**self._urls, next(iter(others)): self._any_url}
        # Twice in a row: an engine that is started again may be there beside its former self.
        self._num_unclear = self._num_unclear + 1 if others else 0
        if self._num_unclear > 1 and not self._is_said:
            self._is_said = True
            _logger.warning(
                "exporters.prometheus: engine_metrics has '%s', the page of a single engine, and "
                "there are %d (%s): it is none's. Name them: ENGINE_ID: http://HOST:PORT",
                ANY_ENGINE,
                len(others),
                ", ".join(sorted(others)[:_MOST_NAMED]),
            )
        return self._urls


def own_count(url: str) -> float | None:
    """Return how many requests an engine's page says it finished; None where it does not."""
    try:
        page = fetch(url)
        return read(page, dialect_of(page)).counters.get("finished")
    except InferScopeError:
        return None
