"""The part of a request's time that a latency metric covers, by cause.

Every metric is a stretch of the request's life, so the ledger divides it. Only time between tokens
is several stretches; of those the ledger knows the sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol

import msgspec
import numpy as np

from inferscope.attribution.ledger import scaled

Metric = Literal["ttft", "tbt", "tpot", "e2e", "delivered"]
"""Up to the first token; each gap between tokens; their mean by token; up to the last token; up to
the last byte."""
METRICS: tuple[Metric, ...] = ("ttft", "tbt", "tpot", "e2e", "delivered")


class LedgerView(Protocol):
    """Finished request with its ledger, such as `collector.finals.FinalRequest`."""

    @property
    def prompt_tokens(self) -> int | None:
        """Return the length of the prompt in tokens."""

    @property
    def output_tokens(self) -> int:
        """Return the number of generated tokens."""

    @property
    def arrived_ns(self) -> int:
        """Return the time of arrival."""

    @property
    def first_token_ns(self) -> int | None:
        """Return the time of the first token."""

    @property
    def last_token_ns(self) -> int | None:
        """Return the time of the last token."""

    @property
    def delivered_ns(self) -> int:
        """Return the end of delivery."""

    @property
    def finish(self) -> str:
        """Return the finish reason."""

    @property
    def joined_late(self) -> bool:
        """Return whether its ledger has gaps."""

    @property
    def is_in_one_piece(self) -> bool:
        """Return whether all its tokens came at once, with the body."""

    @property
    def ledger_ns(self) -> dict[str, int]:
        """Return the causes of its whole time; they sum to it."""

    @property
    def ttft_ledger_ns(self) -> dict[str, int]:
        """Return the causes of its time to first token; they sum to it."""

    @property
    def tbt_ns(self) -> list[int]:
        """Return the gaps between its emission events."""

    @property
    def num_gaps(self) -> int:
        """Return the number of gaps."""

    @property
    def longest_gap_ns(self) -> int:
        """Return the longest gap in nanoseconds, 0 without gaps."""


class MetricBreakdown(msgspec.Struct, frozen=True):
    """Time of one request under one metric."""

    whole_ns: int
    num_gaps: int
    by_cause: dict[str, int]


def breakdown(request: LedgerView, metric: Metric) -> MetricBreakdown | None:
    """Return the time that a metric covers, by cause; None if the request lacks the metric."""
    first_ns, last_ns = request.first_token_ns, request.last_token_ns
    arrived_ns, ledger_ns = request.arrived_ns, request.ledger_ns
    life_ns = request.delivered_ns - arrived_ns
    if metric == "delivered":
        return MetricBreakdown(life_ns, 1, ledger_ns)
    if request.is_in_one_piece and metric != "e2e":
        return None
    if first_ns is None or last_ns is None:
        # It is late by its whole time at least. If it joined late, its first token was not seen.
        is_known = metric == "ttft" and last_ns is None and not request.joined_late
        return MetricBreakdown(life_ns, 1, ledger_ns) if is_known else None
    if metric == "ttft":
        return MetricBreakdown(first_ns - arrived_ns, 1, request.ttft_ledger_ns)
    before = request.ttft_ledger_ns
    after = {cause: ns - before.get(cause, 0) for cause, ns in ledger_ns.items()}
    after = _without_tail(after, request.delivered_ns - last_ns)
    if metric == "e2e":
        whole = {cause: before.get(cause, 0) + after.get(cause, 0) for cause in before | after}
        return MetricBreakdown(last_ns - arrived_ns, 1, whole)
    num_gaps = request.num_gaps if metric == "tbt" else request.output_tokens - 1
    if num_gaps < 1:
        return None
    return MetricBreakdown(last_ns - first_ns, num_gaps, after)


def _without_tail(ledger_ns: Mapping[str, int], tail_ns: int) -> dict[str, int]:
    """Return a ledger without the time after the last token: delivery first, then output.

    For an aborted request, up to a step may follow it as well; the ledger does not identify it, so
    the rest is taken from all causes in proportion.
    """
    left = dict(ledger_ns)
    for cause in ("delivery", "output", "engine_lost"):
        cut_ns = min(tail_ns, left.get(cause, 0))
        tail_ns -= cut_ns
        if cut_ns:
            left[cause] -= cut_ns
    if tail_ns and left:
        row = np.array([list(left.values())])
        kept = scaled(row, np.maximum(row.sum(axis=1) - tail_ns, 0))
        left = dict(zip(left, kept[0].tolist(), strict=True))
    return {cause: ns for cause, ns in left.items() if ns}
