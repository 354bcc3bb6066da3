"""Resamples of one recording, by blocks of time.

    ├─┼─┼─┼─┼─┼─┼─┼─┼─┼─┼─┼─┼─┼─┼─┼─┼─┼─┼─┼─┤   slots of equal length, from the first arrival
        └──────┘  └──────┘                      to the last; a block is four or eight in a row

Requests that are in the engine at the same time share steps, a queue and the machine's other work.
Drawn one by one, they would pass for independent measurements, and intervals would be too narrow.
So a block is at least two median lifetimes long, and a resample is as many blocks as there are,
with the end joined to the beginning (moving-block bootstrap: H. R. Künsch, Annals of Statistics 17,
1989; D. N. Politis and J. P. Romano, 1992).

A machine's speed swings more slowly than that. With at most ten blocks, those of a long recording
are long and hold such swings; thirty would narrow an interval by a fifth only. And half of the
resamples have blocks of twice the length: if neighbouring blocks swing together, these spread more,
and what is still missing is extrapolated (`intervals`).
"""

from __future__ import annotations

import numpy as np

from inferscope.insight.compare.columns import Columns, Floats
from inferscope.insight.compare.estimates import Resamples
from inferscope.insight.compare.workload import Placing

FEWEST_BLOCKS = 6
_MOST_BLOCKS = 10
_LIFETIMES = 2.0
_SLOTS = 4
"""Slots of a block."""
_NUM_RESAMPLES = 300
"""Number of resamples with blocks of each length, which gives the error to 4 %."""


def lifetime_ns(of: Columns) -> float:
    """Return the median time from a request's arrival to its delivery."""
    lives_ns = (of.facts["delivered_ns"] - of.facts["arrived_ns"])[of.is_complete > 0]
    return float(np.median(lives_ns))


def span_ns(of: Columns) -> float:
    """Return the time from the first arrival to the last."""
    return float(np.ptp(of.facts["arrived_ns"]))


def fewest_ns(of: Columns) -> float:
    """Return the span that a comparison needs at least."""
    return FEWEST_BLOCKS * _LIFETIMES * lifetime_ns(of)


def num_blocks(of: Columns) -> int:
    """Return the number of blocks."""
    life_ns = lifetime_ns(of)
    most = span_ns(of) / (_LIFETIMES * life_ns) if life_ns else _MOST_BLOCKS
    return min(_MOST_BLOCKS, int(most))


def resamples(
    of: Columns, placing: Placing, share: Floats, *, num_blocks: int, seed: int
) -> Resamples:
    """Return resamples of a recording.

    Args:
        of: requests of the recording.
        placing: stratum and position of each request.
        share: [strata], common share of each stratum.
        num_blocks: number of blocks.
        seed: seed of the draws, which depend on nothing else but the number of blocks.
    """
    num_slots, num_strata = num_blocks * _SLOTS, len(share)
    slot = np.minimum(placing.position * num_slots, num_slots - 1).astype(np.int64)
    group = slot * num_strata + placing.stratum
    drawn = _drawn(num_blocks, seed)
    counts = np.bincount(group, weights=of.is_complete, minlength=num_slots * num_strata)
    by_stratum = drawn @ counts.reshape(num_slots, num_strata)
    weight = np.divide(share, by_stratum, out=np.zeros_like(by_stratum), where=by_stratum > 0)
    matched = (drawn[:, :, None] * weight[:, None, :]).reshape(len(drawn), -1)
    gaps_ns = np.diff(of.facts["arrived_ns"], prepend=of.facts["arrived_ns"][:1])
    span = drawn @ np.bincount(slot, weights=gaps_ns, minlength=num_slots)
    return Resamples(group, drawn.repeat(num_strata, axis=1), matched, span)


def _drawn(num: int, seed: int) -> Floats:
    """Return how often each slot is drawn: [resamples, slots], all once in the first.

    The first half of the other resamples has blocks of one length, the second of twice that.
    """
    num_slots = num * _SLOTS
    draw = np.random.default_rng(seed)
    drawn = [np.ones((1, num_slots))]
    for length in (_SLOTS, 2 * _SLOTS):
        shape = (_NUM_RESAMPLES, round(num_slots / length))
        starts = draw.integers(0, num_slots, size=shape)
        begun = np.zeros((_NUM_RESAMPLES, num_slots))
        np.add.at(begun, (np.arange(_NUM_RESAMPLES)[:, None], starts), 1)
        drawn.append(np.sum([np.roll(begun, shift, axis=1) for shift in range(length)], axis=0))
    return np.concatenate(drawn)
