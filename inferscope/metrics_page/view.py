"""View of a page: current gauges, rates and quantiles of a window; no ledger."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import msgspec

from inferscope.json_document import Document
from inferscope.metrics_page.dialects import Dialect, dialect_of
from inferscope.metrics_page.fetching import fetch
from inferscope.metrics_page.reading import (
    BucketQuantiles,
    PageReading,
    PageTotals,
    between,
    has_restarted,
    quantiles,
    read,
)

SOURCE = "metrics page"
_MOST_READINGS = 3600


class PageView(Document, frozen=True, kw_only=True):
    """A server as its metrics page shows it. Unknown is None."""

    source: str = SOURCE
    """Source of the document, always `metrics page`."""
    url: str
    """Address of the page."""
    server: str
    """Server software, by the names of its metrics."""
    models: tuple[str, ...]
    """Models that the page names."""
    real_ns: int
    """Wall time of the reading, since the Unix epoch."""
    window_ns: int
    """Time that rates cover; 0 after the first reading, when there are none."""
    latency_window_ns: int | None
    """Time that quantiles cover; None: since the server started."""
    num_running: float | None
    """Requests in the batch now."""
    num_waiting: float | None
    """Requests in the queue now."""
    kv_share: float | None
    """Share of the KV cache in use."""
    cached_share: float | None
    """Share of the prompt tokens that came from the prefix cache."""
    requests_s: float | None
    """Finished requests per second."""
    prompt_tok_s: float | None
    """Prompt tokens per second."""
    generated_tok_s: float | None
    """Output tokens per second."""
    preemptions_s: float | None
    """Preemptions per second."""
    ttft: BucketQuantiles | None
    """Time to first token."""
    tbt: BucketQuantiles | None
    """Gap between tokens."""
    e2e: BucketQuantiles | None
    """Time to the last token."""
    queue: BucketQuantiles | None
    """Queue time."""
    ledger: None = None
    """Always null: a page has no times of single requests."""


class PageSource:
    """Source that polls a server's page and keeps its recent values.

    One thread polls; others may look at what it has read. Readings are numbered from 0 on, and -1
    is the newest.
    """

    def __init__(self, url: str) -> None:
        """Keep the address; the first `view` fetches."""
        self.url = url
        self._dialect: Dialect | None = None
        self._shown_url = ""
        self._kept: tuple[int, tuple[PageReading, ...]] = (0, ())
        """Number of all readings, and those of the last hour: replaced as one."""

    @property
    def num_read(self) -> int:
        """Return the number of all readings, including those that were dropped since."""
        return self._kept[0]

    @property
    def first(self) -> int:
        """Return the number of the oldest reading that is kept."""
        num_read, readings = self._kept
        return num_read - len(readings)

    def poll(self) -> None:
        """Fetch the page and keep its values; the oldest of an hour's are dropped.

        Raises:
            NotFound: it cannot be fetched, or is not a known server's.
        """
        page = fetch(self.url)
        if self._dialect is None:
            self._dialect = dialect_of(page)
        now = read(page, self._dialect)
        since_ns = now.read_ns
        num_read, readings = self._kept
        if readings and not has_restarted(readings[-1], now):
            since_ns = readings[-1].since_ns
        now = msgspec.structs.replace(now, since_ns=since_ns)
        self._shown_url = page.url
        self._kept = (num_read + 1, (*readings[-_MOST_READINGS + 1 :], now))

    def view(self, window_ns: int) -> PageView:
        """Fetch the page and return its view over the last `window_ns`.

        Raises:
            NotFound: it cannot be fetched, or is not a known server's.
        """
        self.poll()
        return self.view_at(-1, window_ns)

    def view_at(self, number: int, window_ns: int) -> PageView:
        """Return the view that a reading ended."""
        assert self._dialect is not None
        readings = self._until(number)
        return make_view(self._shown_url, self._dialect, readings, window_ns)

    def seen(self, number: int) -> Iterator[PageView]:
        """Yield the view of each reading up to one, with rates since the reading before."""
        assert self._dialect is not None
        readings = self._until(number)
        for at, now in enumerate(readings):
            two = readings[max(at - 1, 0) : at + 1]
            since_ns = now.read_ns - two[0].read_ns
            yield make_view(self._shown_url, self._dialect, two, since_ns)

    def trends(self, window_ns: int, number: int = -1) -> dict[str, tuple[float | None, ...]]:
        """Return each gauge, and each counter's rate per second, over the readings of a window.

        A rate is that since the reading before; the first one, and one across a restart, is None.
        """
        readings = _window(self._until(number), window_ns)
        now = readings[-1]
        found: dict[str, tuple[float | None, ...]] = {
            word: tuple(each.gauges.get(word) for each in readings) for word in now.gauges
        }
        for word in now.counters:
            rates = (_rate(word, *two) for two in pairwise(readings))
            found[word] = (None, *rates)
        return found

    def totals(self, window_ns: int | None, number: int = -1) -> PageTotals:
        """Return what the page counted over a window, by default since the server's start.

        Without an earlier reading in the window, the totals are those since the server's start.
        """
        readings = self._until(number)
        now = readings[-1]
        readings = _window(readings, now.read_ns if window_ns is None else window_ns)
        then = readings[0]
        is_whole = window_ns is None or then is now
        counters, histograms = now.counters, now.histograms
        if not is_whole:
            counters = {
                word: total - then.counters[word]
                for word, total in now.counters.items()
                if word in then.counters
            }
            histograms = {
                word: between(then.histograms.get(word), after)
                for word, after in now.histograms.items()
            }
        return PageTotals(
            self._shown_url,
            now.server,
            now.models,
            None if is_whole else now.read_ns - then.read_ns,
            tuple(each.gauges for each in readings),
            counters,
            histograms,
        )

    def close(self) -> None:
        """Drop the stored values."""
        self._kept = (0, ())

    def _until(self, number: int) -> tuple[PageReading, ...]:
        """Return the readings up to one; if it was dropped, up to the oldest."""
        num_read, readings = self._kept
        idx = len(readings) - 1 if number < 0 else number - (num_read - len(readings))
        return readings[: max(idx, 0) + 1]


def _rate(word: str, before: PageReading, after: PageReading) -> float | None:
    then, now = before.counters.get(word), after.counters.get(word)
    elapsed_ns = after.read_ns - before.read_ns
    if then is None or now is None or elapsed_ns <= 0:
        return None
    return 1e9 * (now - then) / elapsed_ns


def _window(readings: Sequence[PageReading], window_ns: int) -> tuple[PageReading, ...]:
    """Return the readings of the window that ends with the last, back to a restart at most."""
    now = readings[-1]
    first_ns = max(now.read_ns - window_ns, now.since_ns)
    return tuple(each for each in readings if each.read_ns >= first_ns)


def make_view(
    url: str, dialect: Dialect, readings: Sequence[PageReading], window_ns: int
) -> PageView:
    """Return a view of readings, the newest last: over the window, or as far back as they go."""
    now = readings[-1]
    then = _window(readings, window_ns)[0]
    elapsed_ns = now.read_ns - then.read_ns
    rates = {
        word: 1e9 * (total - then.counters[word]) / elapsed_ns
        for word, total in now.counters.items()
        if elapsed_ns > 0 and word in then.counters
    }
    gauges = now.gauges
    spread: dict[str, BucketQuantiles | None] = {}
    for word in ("ttft", "tbt", "e2e", "queue"):
        histogram = now.histograms.get(word)
        before = then.histograms.get(word) if elapsed_ns > 0 else None
        spread[word] = None if histogram is None else quantiles(between(before, histogram))
    cached = rates if elapsed_ns > 0 else now.counters
    return PageView(
        url=url,
        server=now.server,
        models=now.models,
        real_ns=now.real_ns,
        window_ns=elapsed_ns,
        latency_window_ns=elapsed_ns if elapsed_ns > 0 else None,
        num_running=gauges.get("running"),
        num_waiting=gauges.get("waiting"),
        kv_share=None if (kv_share := gauges.get("kv_share")) is None else min(1.0, kv_share),
        cached_share=_cached_share(cached, dialect),
        requests_s=rates.get("finished"),
        prompt_tok_s=rates.get("prompt_tokens"),
        generated_tok_s=rates.get("generated_tokens"),
        preemptions_s=rates.get("preemptions"),
        ttft=spread["ttft"],
        tbt=spread["tbt"],
        e2e=spread["e2e"],
        queue=spread["queue"],
    )


def _cached_share(totals: dict[str, float], dialect: Dialect) -> float | None:
    cached, prompts = totals.get("cached_tokens"), totals.get("prompt_tokens")
    if cached is None or prompts is None:
        return None
    whole = prompts if dialect.includes_cached else prompts + cached
    return min(1.0, cached / whole) if whole > 0 else None
