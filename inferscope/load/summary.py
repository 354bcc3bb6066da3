"""Summary of a load: counts, rates, failures, and the generator's own lateness.

Latencies are those of finished requests, from their sending. Sending time minus scheduled time is
the generator's lateness, reported separately because it is not the server's.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from inferscope.load.open_loop import ClientTimes
from inferscope.log_histogram import LogHistogram

LATE_P99_MS = 5.0
"""Lateness in ms beyond which the load deviates from its plan."""
SEEN_BEFORE_SHARE = 0.5
"""Minimum cached share; a chat template alone is at most a third of the shortest prompts."""
_MOST_REPEATED_SHARE = 0.5


class LatencyQuantiles(msgspec.Struct, frozen=True):
    """Percentiles of a duration; None without measurements."""

    num: int
    """Number of durations."""
    p50_ns: int | None = None
    """Median."""
    p95_ns: int | None = None
    """95th percentile."""
    p99_ns: int | None = None
    """99th percentile."""
    max_ns: int | None = None
    """Longest duration."""


class LoadSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of a load."""

    scheduled: int
    """Number of requests that were due: the sum of finished, failed, refused and abandoned."""
    sent: int
    """Number of requests that were sent."""
    finished: int
    """Number of requests that finished."""
    failed: dict[str, int]
    """Number of failed requests by error, the most frequent error first."""
    examples: dict[str, str]
    """First detail of each error."""
    refused: int
    """Number of requests not sent because too many connections were open."""
    abandoned: int
    """Number of requests under way when the load was stopped."""
    span_ns: int
    """Time from the first request's scheduled time to the last end."""
    requests_s: float
    """Finished requests per second of the span."""
    prompt_tokens: int | None
    """Prompt tokens of finished requests by the server's usage; None where it sent none."""
    cached_tokens: int | None
    """Prompt tokens that the server took from its prefix cache; None where it reports none."""
    cached_share: float | None
    """Cached share of the prompt tokens; None where the server does not report both."""
    seen_before_share: float | None
    """Share of the prompt tokens sent once in this load that the server had cached before. None
    where the server reports no cached tokens, or more than half of each prompt repeats."""
    was_seen_before: bool
    """Whether that share exceeds one half: TTFT is then that of prompts answered before."""
    output_tokens: int
    """Output tokens of finished requests by the server's usage, else counted as events."""
    output_tok_s: float
    """Output tokens per second of the span."""
    is_output_counted: bool
    """Whether events were counted because a usage was missing."""
    ttft: LatencyQuantiles
    """Time from sending to the first token."""
    tbt: LatencyQuantiles
    """Gaps between tokens."""
    e2e: LatencyQuantiles
    """Time from sending to the last token."""
    late: LatencyQuantiles
    """Time from the scheduled moment to sending, over all requests."""
    fell_behind: bool
    """Whether the p99 of `late` exceeds 5 ms: the load was not quite the one asked for."""


class LoadStats:
    """Statistics of requests as they end.

    Attributes:
        num_finished: finished requests.
        ttft: TTFT of those.
        late: sent minus scheduled, of all requests sent.
    """

    def __init__(self) -> None:
        """Start empty."""
        self.num_finished = 0
        self.ttft, self.late = LogHistogram(), LogHistogram()
        self._tbt, self._e2e = LogHistogram(), LogHistogram()
        self._failed: Counter[str] = Counter()
        self._examples: dict[str, str] = {}
        self._refused = self._abandoned = 0
        self._first_ns: int | None = None
        self._last_ns = 0
        self._prompt_tokens: int | None = None
        self._cached_tokens: int | None = None
        self._cacheable_tokens = 0
        self._new_tokens = self._known_tokens = 0.0
        self._output_tokens = 0
        self._is_output_counted = False

    @property
    def num_failed(self) -> int:
        """Return the number of failed requests."""
        return self._failed.total()

    def add(self, times: ClientTimes) -> None:
        """Count an ended request."""
        self._first_ns = min(self._first_ns or times.scheduled_ns, times.scheduled_ns)
        self._last_ns = max(self._last_ns, times.ended_ns or times.sent_ns)
        self.late.add(max(0, times.sent_ns - times.scheduled_ns))
        if times.outcome == "refused":
            self._refused += 1
        elif times.outcome == "abandoned":
            self._abandoned += 1
        elif times.outcome == "error":
            self._failed[times.error] += 1
            self._examples.setdefault(times.error, times.detail)
        else:
            self._add_finished(times)

    def _add_finished(self, times: ClientTimes) -> None:
        self.num_finished += 1
        if times.first_token_ns is not None and times.last_token_ns is not None:
            self.ttft.add(times.first_token_ns - times.sent_ns)
            self._e2e.add(times.last_token_ns - times.sent_ns)
        for gap_ns in times.tbt_ns:
            self._tbt.add(gap_ns)
        if times.prompt_tokens is not None:
            self._prompt_tokens = (self._prompt_tokens or 0) + times.prompt_tokens
        if times.cached_tokens is not None:
            self._cached_tokens = (self._cached_tokens or 0) + times.cached_tokens
            self._add_cached(times.prompt_tokens or 0, times.cached_tokens, times.repeated_share)
        self._is_output_counted |= times.output_tokens is None
        self._output_tokens += times.tokens if times.output_tokens is None else times.output_tokens

    def _add_cached(self, prompt: int, cached: int, repeated_share: float | None) -> None:
        self._cacheable_tokens += prompt
        # Characters are not tokens: for a mostly repeated prompt the rest is not known well.
        if repeated_share is not None and repeated_share <= _MOST_REPEATED_SHARE:
            self._new_tokens += prompt * (1 - repeated_share)
            self._known_tokens += cached - prompt * repeated_share

    def summary(self) -> LoadSummary:
        """Return the summary."""
        span_ns = max(0, self._last_ns - (self._first_ns or self._last_ns))
        late = _quantiles(self.late)
        seen_before = _share(max(0.0, self._known_tokens), self._new_tokens)
        return LoadSummary(
            scheduled=self.late.num,
            sent=self.late.num - self._refused,
            finished=self.num_finished,
            failed=dict(self._failed.most_common()),
            examples=self._examples,
            refused=self._refused,
            abandoned=self._abandoned,
            span_ns=span_ns,
            requests_s=_per_second(self.num_finished, span_ns),
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            cached_share=_share(self._cached_tokens or 0, self._cacheable_tokens),
            seen_before_share=seen_before,
            was_seen_before=(seen_before or 0.0) > SEEN_BEFORE_SHARE,
            output_tokens=self._output_tokens,
            output_tok_s=_per_second(self._output_tokens, span_ns),
            is_output_counted=self._is_output_counted,
            ttft=_quantiles(self.ttft),
            tbt=_quantiles(self._tbt),
            e2e=_quantiles(self._e2e),
            late=late,
            fell_behind=(late.p99_ns or 0) > LATE_P99_MS * 1e6,
        )


def _quantiles(durations: LogHistogram) -> LatencyQuantiles:
    longest_ns = durations.longest_ns if durations.num else None
    return LatencyQuantiles(durations.num, *durations.percentiles_ns(), longest_ns)


def _share(part: float, whole: float) -> float | None:
    return round(part / whole, 3) if whole > 0 else None


def _per_second(num: int, span_ns: int) -> float:
    return round(num * 1e9 / span_ns, 3) if span_ns > 0 else 0.0
