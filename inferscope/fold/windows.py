"""Buckets of the last minutes: one for each second, merged for any window.

Buckets are keyed by the second of the fold's clock. They hold plain Python numbers: updating single
cells of an array costs three times as much.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from inferscope.fold.durations import add_durations
from inferscope.fold.retention import ALL, DURATIONS, Retention
from inferscope.fold.snapshots import NO_QUANTILES, Quantiles
from inferscope.log_histogram import LogHistogram
from inferscope.records import BINDINGS

Ints = NDArray[np.int64]

SECOND_NS = 1_000_000_000
_MOST_NOTED = 256

AMOUNTS = (
    "prefill_tokens",
    "decode_tokens",
    "prefill_flops",
    "prefill_flops_ns",
    "prefill_ns",
    "decode_ns",
    "padding_ns",
    "unattributed_ns",
    "idle_no_work_ns",
    "idle_host_gap_ns",
    "steps",
    "mixed_steps",
    "finished",
    "preempted",
    "prompt_tokens",
    "cached_tokens",
    "probe_ns",
    "probe_hidden_ns",
    "plans",
    "waiting_none",
    "waiting_slots",
    "waiting_blocks",
    "waiting_budget",
    "proposed_tokens",
    "accepted_tokens",
)
GAUGES = ("running", "waiting", "blocks_used", "blocks_cached", "blocks_total")
WAITING_BY = {binding: f"waiting_{binding}" for binding in BINDINGS}
"""Amounts by the scheduler's constraint: waiting requests, summed over the plans of a second."""


class _Distribution(LogHistogram):
    """Distribution of the durations of one kind within one second.

    Durations are noted as they arrive, and added to bins many at once.
    """

    __slots__ = ("_noted_ns",)

    def __init__(self) -> None:
        super().__init__()
        self._noted_ns: list[int] = []

    def add(self, duration_ns: int) -> None:
        self._noted_ns.append(duration_ns)
        if len(self._noted_ns) >= _MOST_NOTED:
            self.settle()

    def settle(self) -> None:
        """Add the noted durations to bins; the other attributes exclude them before that."""
        noted_ns, self._noted_ns = self._noted_ns, []
        add_durations(self, np.array(noted_ns, dtype=np.int64))

    def quantile_ns(self, share: float) -> int | None:
        """Return a quantile, the noted durations included."""
        self.settle()
        return super().quantile_ns(share)


class _Unkept(_Distribution):
    """Distribution of a kind without a reader: always empty."""

    __slots__ = ()

    def add(self, duration_ns: int) -> None:
        """Ignore a duration."""


_UNKEPT = _Unkept()


class Bucket:
    """Amounts, gauges and durations of one second."""

    __slots__ = ("amounts", "causes", "durations", "gauges", "kinds", "second")

    def __init__(self, second: int, gauges: dict[str, int], kept: tuple[str, ...]) -> None:
        self.second = second
        self.durations = {name: _Distribution() if name in kept else _UNKEPT for name in DURATIONS}
        self.amounts = dict.fromkeys(AMOUNTS, 0)
        self.gauges = dict(gauges)
        self.causes: Ints | None = None
        self.kinds: Ints | None = None
        """Sums of steps by kind, [kinds, sums]; None without a step, or if none are kept."""

    def settle(self) -> None:
        """Add all noted durations to their bins: few more follow."""
        for distribution in self.durations.values():
            distribution.settle()

    def add_causes(self, row: Ints) -> None:
        """Add a finished request's ledger."""
        if self.causes is None:
            self.causes = row.copy()
        else:
            self.causes += row


class Windows:
    """Per-second buckets of one engine.

    Attributes:
        has_kinds: whether buckets hold sums of steps by kind.
    """

    def __init__(self, keep: Retention = ALL) -> None:
        self.has_kinds = keep.steps > 0
        self._kept_s = keep.seconds
        self._kept = keep.durations
        self._buckets: dict[int, Bucket] = {}
        self._now = Bucket(-1, dict.fromkeys(GAUGES, 0), self._kept)
        self._now_ns, self._next_ns = -SECOND_NS, 0
        """Start and end of the current bucket's second."""

    def at(self, at_ns: int) -> Bucket:
        """Return the bucket of a time; for a time before the oldest bucket, the oldest."""
        if self._now_ns <= at_ns < self._next_ns:
            return self._now
        second = at_ns // SECOND_NS
        if second > self._now.second:
            self.advance(at_ns)
            return self._now
        return self._buckets.get(second) or self._buckets[next(iter(self._buckets))]

    def advance(self, at_ns: int) -> None:
        """Advance to a time; seconds without events get a bucket too."""
        second = at_ns // SECOND_NS
        last = self._now
        if second <= last.second:
            return
        last.settle()
        first = last.second + 1 if last.second >= 0 else second
        for missing in range(max(first, second - self._kept_s + 1), second + 1):
            self._now = self._buckets[missing] = Bucket(missing, last.gauges, self._kept)
        self._now_ns, self._next_ns = second * SECOND_NS, (second + 1) * SECOND_NS
        while len(self._buckets) > self._kept_s:
            del self._buckets[next(iter(self._buckets))]

    def observe(self, name: str, durations_ns: Ints, at_ns: Ints) -> None:
        """Add durations in nanoseconds, with the time of each in order, to a distribution."""
        if not len(at_ns) or name not in self._kept:
            return
        seconds = at_ns // SECOND_NS
        starts = [0, *(np.diff(seconds).nonzero()[0] + 1).tolist(), len(seconds)]
        for start, end in pairwise(starts):
            add_durations(self.at(at_ns.item(start)).durations[name], durations_ns[start:end])

    def observe_one(self, name: str, duration_ns: int, at_ns: int) -> None:
        """Add one duration in nanoseconds to a distribution."""
        self.at(at_ns).durations[name].add(duration_ns)

    def add(self, at_ns: int, name: str, amount: int) -> None:
        """Add to one of AMOUNTS."""
        self.at(at_ns).amounts[name] += amount

    # --- reading ------------------------------------------------------------------------------

    def last(self, window_ns: int) -> list[Bucket]:
        """Return the buckets of a window up to now, oldest first."""
        num = max(1, min(self._kept_s, window_ns // SECOND_NS))
        return list(self._buckets.values())[-num:]


def quantiles(name: str, buckets: list[Bucket]) -> Quantiles:
    """Return the quantiles of a duration over buckets."""
    whole = LogHistogram()
    for bucket in buckets:
        bucket.durations[name].settle()
        whole.merge(bucket.durations[name])
    mean_ns = whole.mean_ns
    if mean_ns is None:
        return NO_QUANTILES
    return Quantiles(whole.num, round(mean_ns), *whole.percentiles_ns(), whole.longest_ns)


def amounts(buckets: list[Bucket]) -> dict[str, int]:
    """Return the sums of all amounts over buckets."""
    return {name: sum(bucket.amounts[name] for bucket in buckets) for name in AMOUNTS}


def causes(buckets: list[Bucket]) -> Ints | None:
    """Return the summed ledgers of finished requests over buckets; None without any."""
    rows = [bucket.causes for bucket in buckets if bucket.causes is not None]
    return sum(rows[1:], rows[0]) if rows else None
