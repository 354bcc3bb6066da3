"""Values of a page in our names, and differences between two pages of one server."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal, TypeAlias

import msgspec

from inferscope.foreign import printable
from inferscope.metrics_page.dialects import Dialect, Name
from inferscope.metrics_page.fetching import MetricsPage, PageSample

_SHARES = ("kv_share",)
"""Gauges averaged over replicas; all others are summed."""
_LARGEST = 1e15
"""Maximum of a plausible count or time: a million tokens a second for thirty years."""
_MOST_MODELS = 8

_Where: TypeAlias = Literal["below", "within", "beyond"]
"""Position of a quantile: in the first bucket, between two bounds, beyond the last bound."""


class PageHistogram(msgspec.Struct, frozen=True):
    """Cumulative counts up to each bound in seconds, the last one infinite."""

    bounds_s: tuple[float, ...]
    counts: tuple[float, ...]
    sum_s: float

    @property
    def num(self) -> float:
        """Return the number of observations."""
        return self.counts[-1] if self.counts else 0.0


class PageReading(msgspec.Struct, frozen=True):
    """Values of a page; unavailable ones are absent."""

    server: str
    models: tuple[str, ...]
    read_ns: int
    real_ns: int
    gauges: dict[str, float]
    counters: dict[str, float]
    histograms: dict[str, PageHistogram]
    since_ns: int = 0
    """Monotonic time of the first reading since the server's start."""


class PageTotals(msgspec.Struct, frozen=True):
    """What a page counted over a time, and the gauges that were read in it."""

    url: str
    """URL to display, without credentials."""
    server: str
    models: tuple[str, ...]
    window_ns: int | None
    """Time that the totals cover; None: since the server's start."""
    gauges: tuple[dict[str, float], ...]
    """Gauges of each reading, the newest last."""
    counters: dict[str, float]
    histograms: dict[str, PageHistogram]


class BucketQuantiles(msgspec.Struct, frozen=True):
    """Quantiles of a duration within a histogram's buckets.

    A quantile is interpolated within its bucket. In the first and in the last bucket, which have
    one known bound, it is that bound.
    """

    num: int
    """Number of observations."""
    mean_ns: int
    """Exact mean, from the histogram's sum."""
    p50_ns: int
    """Median."""
    p90_ns: int
    """90th percentile."""
    p99_ns: int
    """99th percentile."""
    beyond: tuple[str, ...] = ()
    """Quantiles beyond the last bound."""
    below: tuple[str, ...] = ()
    """Quantiles in the first bucket: only known to be below its bound."""


def read(page: MetricsPage, dialect: Dialect) -> PageReading:
    """Return the values of a page."""
    by_name: dict[str, list[PageSample]] = {}
    for sample in page.samples:
        by_name.setdefault(sample.name, []).append(sample)
    label = dialect.model_label
    models = list(
        dict.fromkeys(
            printable(sample.labels[label]) for sample in page.samples if sample.labels.get(label)
        )
    )
    gauges: dict[str, float] = {}
    for word, names in dialect.gauges.items():
        numbers = _series(by_name, names)
        if numbers:
            total = sum(numbers)
            gauges[word] = total / len(numbers) if word in _SHARES else total
    counters: dict[str, float] = {}
    for word, names in dialect.counters.items():
        numbers = _series(by_name, names)
        if numbers:
            counters[word] = sum(numbers)
    histograms = {
        word: histogram
        for word, names in dialect.histograms.items()
        if (histogram := _histogram(by_name, names)) is not None
    }
    return PageReading(
        dialect.server,
        tuple(models[:_MOST_MODELS]),
        page.read_ns,
        page.real_ns,
        gauges,
        counters,
        histograms,
    )


def has_restarted(before: PageReading, after: PageReading) -> bool:
    """Return whether a total has fallen: the server restarted, or it is another one."""
    totals = (before.counters, after.counters)
    nums = tuple({word: h.num for word, h in each.histograms.items()} for each in (before, after))
    return any(
        now.get(word, 0.0) < total for then, now in (totals, nums) for word, total in then.items()
    )


def between(before: PageHistogram | None, after: PageHistogram) -> PageHistogram:
    """Return the observations between two pages."""
    if before is None or before.bounds_s != after.bounds_s:
        return after
    counts = tuple(b - a for a, b in zip(before.counts, after.counts, strict=True))
    return PageHistogram(after.bounds_s, counts, after.sum_s - before.sum_s)


def beyond(histogram: PageHistogram, limit_s: float) -> tuple[float, float]:
    """Return how many observations are surely above a limit, and their seconds above it at least.

    An observation is only known to be above the lower bound of its bucket.
    """
    num = over_s = 0.0
    bounds = zip(histogram.bounds_s, histogram.bounds_s[1:], strict=False)
    for idx, (lower_s, _) in enumerate(bounds):
        if lower_s >= limit_s:
            inside = histogram.counts[idx + 1] - histogram.counts[idx]
            num += inside
            over_s += inside * (lower_s - limit_s)
    return num, over_s


def quantiles(histogram: PageHistogram) -> BucketQuantiles | None:
    """Return a histogram's quantiles as PromQL's `histogram_quantile` does; None if it is empty.

    PromQL also interpolates in the first bucket, from 0: a queue with waits of 60 µs in a first
    bucket of 300 ms would have a p50 of 150 ms. Here it is that bucket's bound, marked as such.
    """
    if round(histogram.num) < 1:  # a page may state 5e-324 observations: no mean is finite then
        return None
    found = {f"p{round(100 * q)}": _quantile(histogram, q) for q in (0.5, 0.9, 0.99)}
    return BucketQuantiles(
        num=round(histogram.num),
        mean_ns=round(1e9 * histogram.sum_s / histogram.num),
        p50_ns=round(1e9 * found["p50"][0]),
        p90_ns=round(1e9 * found["p90"][0]),
        p99_ns=round(1e9 * found["p99"][0]),
        beyond=tuple(name for name, (_, where) in found.items() if where == "beyond"),
        below=tuple(name for name, (_, where) in found.items() if where == "below"),
    )


def _quantile(histogram: PageHistogram, q: float) -> tuple[float, _Where]:
    rank = q * histogram.num
    lower_s, below = None, 0.0
    for bound_s, count in zip(histogram.bounds_s, histogram.counts, strict=True):
        if math.isinf(bound_s):
            break
        if count >= rank and count > below:
            if lower_s is None:
                return bound_s, "below"
            into_s = (bound_s - lower_s) * (rank - below) / (count - below)
            return min(lower_s + into_s, bound_s), "within"  # rounding may exceed the bound
        lower_s, below = bound_s, count
    return lower_s or 0.0, "beyond"


def _series(by_name: dict[str, list[PageSample]], names: Iterable[Name]) -> list[float]:
    """Return the values of the first name that the page has."""
    for name in names:
        wanted, unwanted = name.labels, name.but
        numbers = [
            sample.number
            for sample in by_name.get(name.name, ())
            if all(sample.labels.get(key) == value for key, value in wanted)
            and not any(sample.labels.get(key) == value for key, value in unwanted)
            and _is_usable(sample.number)
        ]
        if numbers:
            return numbers
    return []


def _is_usable(number: float) -> bool:
    """Return whether a number can be a count, a share or a sum of seconds."""
    return 0.0 <= number <= _LARGEST  # which NaN is not


def _bound_s(text: str) -> float:
    """Return a bucket's bound; NaN if it is invalid."""
    try:
        bound_s = float(text)
    except ValueError:
        return math.nan
    return bound_s if bound_s == math.inf or _is_usable(bound_s) else math.nan


def _histogram(by_name: dict[str, list[PageSample]], names: Iterable[Name]) -> PageHistogram | None:
    """Return the sum of the first histogram that the page has, if all its numbers are usable."""
    for name in names:
        by_bound: dict[float, float] = {}
        buckets = by_name.get(f"{name.name}_bucket", ())
        for sample in buckets:
            bound_s = _bound_s(sample.labels.get("le", ""))
            if not math.isnan(bound_s):
                by_bound[bound_s] = by_bound.get(bound_s, 0.0) + sample.number
        if by_bound:
            bounds = tuple(sorted(by_bound))
            sums = by_name.get(f"{name.name}_sum", ())
            if not all(_is_usable(sample.number) for sample in (*buckets, *sums)):
                return None
            return PageHistogram(
                bounds,
                tuple(by_bound[bound] for bound in bounds),
                sum(sample.number for sample in sums),
            )
    return None
