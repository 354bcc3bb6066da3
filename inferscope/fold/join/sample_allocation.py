"""Allocation of counter samples to the steps of a device's ranks, by 100 ms bucket.

samples   │◄───── a ─────►│◄───── b ─────►│
buckets   ┊◄───── 7 ────────►┊◄───── 8 ──────►┊        bucket 7 gets the first part of b
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence
from operator import add
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from inferscope.attribution import amounts_until, one_by_one
from inferscope.fold.join.counter_shares import ENERGY, NUM_COUNTED
from inferscope.fold.join.step_buffer import (
    BLURRED,
    BY_EXPECTED,
    BYTES_READ,
    BYTES_WRITTEN,
    FLOPS,
    KNOWN,
    NUM_EXPECTED,
    TIME,
    VALUES,
    Amounts,
    StepBuffer,
)
from inferscope.fold.join.windows import Window
from inferscope.records import CounterSample

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
T = TypeVar("T")
Term = tuple[int, float, int]
"""Index in a bucket's amounts, rate per unit, and column of the expected amounts."""

_BUSY, MOVING = NUM_EXPECTED, NUM_EXPECTED + 1
"""Additional rows of `StepBuffer.amounts_until`."""


class _Window:
    """Window of a long sample.

    Attributes:
        whole: expected amounts of the steps in the window.
        parts: amounts of the overlapping buckets, each with its part of `whole`.
        busy_ns: time in which the steps ran.
    """

    __slots__ = ("busy_ns", "parts", "whole")

    def __init__(self) -> None:
        self.whole: Amounts = [0.0] * NUM_EXPECTED
        self.parts: list[tuple[Amounts, Amounts]] = []
        self.busy_ns = 0


class AllocatedSamples:
    """Long samples allocated to steps.

    Attributes:
        sums: expected amounts of the steps in each sample, [samples][NUM_EXPECTED].
        busy_ns: time in which any step ran, [samples].
    """

    def __init__(self, steps: Collection[StepBuffer], samples: list[CounterSample]) -> None:
        self._windows = [(sample.start_ns, sample.end_ns) for sample in samples]
        laid = {window: _Window() for window in self._windows}
        from_ns, to_ns = min(laid)[0], max(end_ns for _, end_ns in laid)
        for each in steps:
            buckets = each.windows(from_ns, to_ns)[::-1]
            begins_ns = [since_ns for _, since_ns, _ in buckets]
            for (start_ns, end_ns), window in laid.items():
                begin = since = each.place(start_ns)
                for at in range(bisect_right(begins_ns, start_ns), len(buckets) + 1):
                    is_last = at == len(buckets) or begins_ns[at] >= end_ns
                    until = each.place(end_ns if is_last else begins_ns[at])
                    amounts = each.between(since, until)
                    window.whole = list(map(add, window.whole, amounts))
                    if at:  # else its bucket is settled
                        window.parts.append((buckets[at - 1][0].given, amounts))
                    since = until
                    if is_last:
                        break
                window.busy_ns += each.busy_ns(begin, since)
        self._parts = {window: of.parts for window, of in laid.items()}
        self.sums = [laid[window].whole for window in self._windows]
        self.busy_ns: list[float] = [laid[window].busy_ns for window in self._windows]
        if len(steps) > 1:
            starts_ns, ends_ns = np.array(self._windows).T
            self.busy_ns = _busy_ns(steps, starts_ns, ends_ns).tolist()

    def give(self, place: int, terms: list[Term]) -> None:
        """Add a sample to the buckets that it overlaps."""
        for given, part in self._parts[self._windows[place]]:
            for into, rate, column in terms:
                given[into] += rate * part[column]


def allocate_short(
    steps: Collection[StepBuffer], window: Window
) -> tuple[Floats, Floats, list[tuple[Amounts, slice, Floats]]]:
    """Allocate short samples to steps.

    Returns:
        Amounts of the steps in each sample, [rows of `StepBuffer.amounts_until`, samples]; time
        in which any step ran, [samples]; and for each bucket its amounts, the slice of overlapping
        samples, and the amounts of its own steps in these.
    """
    from_ns, to_ns, num = window.from_ns, window.to_ns, len(window.from_ns)
    first_ns, last_ns = from_ns.item(0), to_ns.item(-1)
    sums, parts = np.zeros((MOVING + 4, num)), []
    for each in steps:
        buckets = each.windows(first_ns, last_ns)[::-1]
        bounds_ns = [max(one[1], first_ns) for one in buckets]
        bounds_ns += [min(one[2], last_ns) for one in buckets[-1:]]
        times_ns = np.concatenate([from_ns, to_ns, np.array(bounds_ns, dtype=np.int64)])
        until = each.amounts_until(times_ns)
        lower, upper, bounds = until[:, :num], until[:, num : 2 * num], until[:, 2 * num :]
        sums += upper - lower
        # After a stall there are thousands of samples and hundreds of buckets.
        firsts = to_ns.searchsorted(bounds_ns[:-1], "right").tolist()
        lasts = from_ns.searchsorted(bounds_ns[1:]).tolist()
        for at, (bucket, _, _) in enumerate(buckets):
            since, before = bounds[:, at : at + 1], bounds[:, at + 1 : at + 2]
            these = slice(firsts[at], max(firsts[at], lasts[at]))
            part = upper[:, these].clip(since, before) - lower[:, these].clip(since, before)
            parts.append((bucket.given, these, part))
    busy_ns = _busy_ns(steps, from_ns, to_ns) if len(steps) > 1 else np.rint(sums[_BUSY])
    return sums, busy_ns, parts


def _busy_ns(steps: Collection[StepBuffer], from_ns: Ints, to_ns: Ints) -> Floats:
    """Return the time in which any step of several ranks ran in each sample: [samples]."""
    between = [each.spans_between(int(from_ns.min()), int(to_ns.max())) for each in steps]
    starts_ns, ends_ns = one_by_one(*map(np.concatenate, zip(*between, strict=True)))
    spans_ns = (ends_ns - starts_ns).astype(np.float64)[None]
    until_ns = amounts_until(starts_ns, ends_ns, spans_ns, np.concatenate([from_ns, to_ns]))[0]
    found: Floats = np.rint(until_ns[len(from_ns) :] - until_ns[: len(from_ns)])
    return found


def terms_of(counted: int, phase: int, rate: float, *, is_blurred: bool) -> list[Term]:
    """Return the terms that add a long sample to a bucket by one expected amount."""
    at, column = phase * NUM_COUNTED + counted, BY_EXPECTED[counted] + phase
    terms = [(VALUES + at, rate, column), (KNOWN + at, 1.0, column)]
    if is_blurred:
        terms.append((BLURRED + at, rate, column))
    return terms


def terms_of_short(
    counted: int, rates: Floats, known: Floats, blurred: Floats, *, row: int
) -> list[tuple[int, Floats, int]]:
    """Return the same terms for short samples, [samples] each; some rows are moving time."""
    terms = []
    for phase in (0, 1):
        at, column = phase * NUM_COUNTED + counted, BY_EXPECTED[counted] + phase
        terms += [(VALUES + at, rates, row + phase), (BLURRED + at, blurred, row + phase)]
        terms.append((KNOWN + at, known, column))
    return terms


def terms_of_energy(rates: Sequence[T], known: T) -> list[tuple[int, T, int]]:
    """Return the same terms for energy, which is always divided by time, bytes and FLOPs.

    Args:
        rates: energy per unit of prefill time, decode time, bytes and FLOPs.
        known: 1 for a long sample; for short samples, whether each is known.
    """
    terms = []
    for phase in (0, 1):
        at = phase * NUM_COUNTED + ENERGY
        for place in (VALUES + at, BLURRED + at):
            terms.append((place, rates[phase], TIME + phase))
            terms += [(place, rates[2], row + phase) for row in (BYTES_READ, BYTES_WRITTEN)]
            terms.append((place, rates[3], FLOPS + phase))
        terms.append((KNOWN + at, known, TIME + phase))
    return terms
