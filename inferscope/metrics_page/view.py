"""What is shown of a page: gauges of now, rates and quantiles of a window; no ledger."""

from __future__ import annotations

from collections import deque

import msgspec

from inferscope.metrics_page.dialects import Dialect, dialect_of
from inferscope.metrics_page.fetch import fetch
from inferscope.metrics_page.reading import (
    Quantiles,
    Reading,
    between,
    has_restarted,
    quantiles,
    read,
)

SOURCE = "metrics page"
_MOST_READINGS = 3600


class PageView(msgspec.Struct, frozen=True):
    """A server as its page shows it. Unknown is None.

    Attributes:
        source: where this comes from, always `SOURCE`.
        url: of the page.
        server: whose it is.
        real_ns: when it was read.
        window_ns: what rates are over; 0 after the first look, when there are none.
        latency_window_ns: what quantiles are over; None: since the server began.
        cached_share: prompt tokens found in the prefix cache.
        ledger: always None: a page does not say where a request's time went.
    """

    source: str
    url: str
    server: str
    models: tuple[str, ...]
    real_ns: int
    window_ns: int
    latency_window_ns: int | None
    num_running: float | None
    num_waiting: float | None
    kv_share: float | None
    cached_share: float | None
    requests_s: float | None
    prompt_tok_s: float | None
    generated_tok_s: float | None
    preemptions_s: float | None
    ttft: Quantiles | None
    tbt: Quantiles | None
    e2e: Quantiles | None
    queue: Quantiles | None
    ledger: None = None


class PageSource:
    """Reads a server's page again and again, and keeps what it said for a while."""

    def __init__(self, url: str) -> None:
        """Take the address; the first `view` reads."""
        self.url = url
        self._dialect: Dialect | None = None
        self._readings: deque[Reading] = deque(maxlen=_MOST_READINGS)

    def view(self, window_ns: int) -> PageView:
        """Read the page and return what it says of the last `window_ns`.

        Raises:
            NotFound: it cannot be read, or is no known server's.
        """
        page = fetch(self.url)
        if self._dialect is None:
            self._dialect = dialect_of(page)
        now = read(page, self._dialect)
        if self._readings and has_restarted(self._readings[-1], now):
            self._readings.clear()
        self._readings.append(now)
        return look(page.url, self._dialect, self._readings, window_ns)

    def close(self) -> None:
        """Forget what was read."""
        self._readings.clear()


def look(url: str, dialect: Dialect, readings: deque[Reading], window_ns: int) -> PageView:
    """Make a view of readings, the newest last: over the window, or as far back as they go."""
    now = readings[-1]
    then = next(each for each in readings if each.read_ns >= now.read_ns - window_ns)
    elapsed_ns = now.read_ns - then.read_ns
    rates = {
        word: 1e9 * (total - then.counters[word]) / elapsed_ns
        for word, total in now.counters.items()
        if elapsed_ns > 0 and word in then.counters
    }
    gauges = now.gauges
    spread: dict[str, Quantiles | None] = {}
    for word in ("ttft", "tbt", "e2e", "queue"):
        histogram = now.histograms.get(word)
        before = then.histograms.get(word) if elapsed_ns > 0 else None
        spread[word] = None if histogram is None else quantiles(between(before, histogram))
    cached = rates if elapsed_ns > 0 else now.counters
    return PageView(
        SOURCE,
        url,
        now.server,
        now.models,
        now.real_ns,
        elapsed_ns,
        elapsed_ns if elapsed_ns > 0 else None,
        gauges.get("running"),
        gauges.get("waiting"),
        None if (kv_share := gauges.get("kv_share")) is None else min(1.0, kv_share),
        _cached_share(cached, dialect),
        rates.get("finished"),
        rates.get("prompt_tokens"),
        rates.get("generated_tokens"),
        rates.get("preemptions"),
        spread["ttft"],
        spread["tbt"],
        spread["e2e"],
        spread["queue"],
    )


def _cached_share(totals: dict[str, float], dialect: Dialect) -> float | None:
    cached, prompts = totals.get("cached_tokens"), totals.get("prompt_tokens")
    if cached is None or prompts is None:
        return None
    whole = prompts if dialect.includes_cached else prompts + cached
    return min(1.0, cached / whole) if whole > 0 else None
