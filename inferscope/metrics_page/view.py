"""View of a page: current gauges, rates and quantiles of a window; no ledger."""

from __future__ import annotations

from collections import deque

from inferscope.json_document import Document
from inferscope.metrics_page.dialects import Dialect, dialect_of
from inferscope.metrics_page.fetching import fetch
from inferscope.metrics_page.reading import (
    BucketQuantiles,
    PageReading,
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
    """Source that polls a server's page and keeps its recent values."""

    def __init__(self, url: str) -> None:
        """Keep the address; the first `view` fetches."""
        self.url = url
        self._dialect: Dialect | None = None
        self._readings: deque[PageReading] = deque(maxlen=_MOST_READINGS)

    def view(self, window_ns: int) -> PageView:
        """Fetch the page and return its view over the last `window_ns`.

        Raises:
            NotFound: it cannot be fetched, or is not a known server's.
        """
        page = fetch(self.url)
        if self._dialect is None:
            self._dialect = dialect_of(page)
        now = read(page, self._dialect)
        if self._readings and has_restarted(self._readings[-1], now):
            self._readings.clear()
        self._readings.append(now)
        return make_view(page.url, self._dialect, self._readings, window_ns)

    def close(self) -> None:
        """Drop the stored values."""
        self._readings.clear()


def make_view(url: str, dialect: Dialect, readings: deque[PageReading], window_ns: int) -> PageView:
    """Return a view of readings, the newest last: over the window, or as far back as they go."""
    now = readings[-1]
    then = next(each for each in readings if each.read_ns >= now.read_ns - window_ns)
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
