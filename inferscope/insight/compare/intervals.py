"""Intervals of the difference between two sides: of paired runs, and of two recordings.

## Paired runs

A run, not a request, is what is drawn again: the requests of one run share a queue, a cache and the
other work of the machine, so a hundred of them are not a hundred independent measurements.

Resamples are subsets of the pairs. If both sides are equal, a difference is as often positive as
negative, with any distribution, and then the sorted means of all 2ⁿ - 1 subsets cut the line into
2ⁿ parts, each of which holds the true difference with the same probability (J. A. Hartigan, "Using
Subsample Values as Typical Values", JASA 64, 1969). So the interval between the k-th means from
both ends misses it in exactly k of 2ⁿ⁻¹ comparisons, also of few runs and of runs with rare stalls.
The usual bootstrap draws n of n pairs with replacement and is too narrow there: of 8 pairs with
heavy-tailed (lognormal) differences, its 99 % interval missed 2.4 % of 1,000, with the correction
for few pairs by Student's t.

## Two recordings

Resamples by blocks of time give the standard error of the difference. If both sides served the same
requests, the same blocks are drawn of both. If not, each side has an error of its own. Blocks are
few, so that the error is itself uncertain: Student's t widens the interval, with the degrees of
freedom of both sides together (B. L. Welch, Biometrika 34, 1947).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import ceil, log2, pi, sqrt
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from inferscope.insight.compare.columns import Floats

_MOST_ENUMERATED = 12
"""Number of pairs up to which all subsets are taken; of more, 2¹² - 1 random ones."""
_T_POINTS = 20_001
"""Points of the integral of Student's t, which then errs by less than 1e-6 of its value."""


def paired_interval(differences: Sequence[float], *, level: float) -> tuple[float, float]:
    """Return the interval of the difference between two sides.

    Args:
        differences: one difference for each pair of runs, at least `fewest_pairs(level)`.
        level: share of such intervals that hold the true difference, 0 to 1.
    """
    subsets = _subsets(len(differences))
    means = np.sort(subsets @ np.asarray(differences, dtype=np.float64) / subsets.sum(axis=1))
    outside = int((1 - level) / 2 * (len(means) + 1))
    if not outside:
        raise ValueError(f"{len(differences)} pairs have no interval at {level:g}")
    return means.item(outside - 1), means.item(-outside)


def fewest_pairs(level: float) -> int:
    """Return the number of pairs below which there is no interval at a level.

    The widest one is from the least to the largest difference, and misses the true one if all n lie
    on one side of it, with probability 2 / 2ⁿ.
    """
    return ceil(log2(2 / (1 - level)))


@lru_cache(maxsize=2)
def _subsets(num: int) -> NDArray[np.float64]:
    """Return 1 where a subset holds a pair, else 0: [subset, pair], without the empty subset."""
    if num <= _MOST_ENUMERATED:
        numbers = np.arange(1, 1 << num)
        return (numbers[:, None] >> np.arange(num) & 1).astype(np.float64)
    draw = np.random.default_rng(0)
    drawn = draw.integers(0, 2, size=((1 << _MOST_ENUMERATED) - 1, num)).astype(np.float64)
    drawn[drawn.sum(axis=1) == 0] = 1.0
    return drawn


class Draws(NamedTuple):
    """Values of one side."""

    value: float
    resampled: Floats
    """[resamples], half of them with blocks of twice the length; NaN where it is unknown."""
    num_blocks: int
    """Number of blocks of a resample of the first half."""
    model_error: float = 0.0
    """Standard error that no resample shows, since it is the same for the whole recording."""

    def error(self) -> float:
        """Return the standard error of the value."""
        return _error(self.resampled, self.num_blocks)


def recording_interval(a: Draws, b: Draws, *, level: float, is_paired: bool) -> tuple[float, float]:
    """Return the interval of B minus A.

    Args:
        a: values of side A.
        b: values of side B.
        level: share of such intervals that hold the true difference, 0 to 1.
        is_paired: whether a resample has the same blocks on both sides.
    """
    difference = b.value - a.value
    if is_paired:
        error, freedom = _error(b.resampled - a.resampled, a.num_blocks), a.num_blocks - 1.0
    else:
        square_a, square_b = a.error() ** 2, b.error() ** 2
        error = sqrt(square_a + square_b)
        spread = square_a**2 / (a.num_blocks - 1) + square_b**2 / (b.num_blocks - 1)
        freedom = error**4 / spread if spread else 1.0
    error = sqrt(error**2 + a.model_error**2 + b.model_error**2)
    half = student_t(level, freedom) * error
    return difference - half, difference + half


def _error(resampled: Floats, num_blocks: int) -> float:
    short, long = (float(np.nanvar(half)) for half in resampled.reshape(2, -1))
    num_long = round(num_blocks / 2)
    # Of so few blocks, the spread of resamples is too small by these factors.
    short *= num_blocks / (num_blocks - 1)
    long *= num_long / max(num_long - 1, 1)
    # If neighbouring blocks swing together, the variance is too small by a part that falls with the
    # length of the blocks: half as much is missing of the longer ones.
    return sqrt(max(short, 2 * long - short))


def student_t(level: float, freedom: float) -> float:
    """Return the number that the absolute value of Student's t stays below at a level.

    With t = √freedom · tan θ, the density is proportional to cos θ to the power of freedom - 1.
    """
    theta = np.linspace(0, pi / 2, _T_POINTS)
    density = np.cos(theta) ** (freedom - 1)
    below = np.concatenate([[0.0], (density[1:] + density[:-1]).cumsum()])
    return sqrt(freedom) * float(np.tan(np.interp(level, below / below[-1], theta)))
