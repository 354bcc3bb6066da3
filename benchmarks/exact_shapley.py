"""The exact Shapley value, computed from measured costs of coalitions alone.

A coalition is a part of a step's requests, its cost the time of a step with just these. Two tables
give the value exactly:

    by subset        [2^players], every coalition; bit i of its index is player i
    by class         [2^chunks, decodes + 1], a set of chunks with any k of the decodes: where these
                     are interchangeable, so few numbers stand for 2^players

Nothing here is shared with `inferscope.attribution`, which is what these values judge.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def of_subsets(cost: Floats) -> Floats:
    """Return each player's value: [players].

    Args:
        cost: [2^players] or [2^players, samples], cost of each coalition; the empty one's is 0.
    """
    num = len(cost).bit_length() - 1
    coalitions = np.arange(len(cost))
    size = np.array([int(coalition).bit_count() for coalition in coalitions])
    chance = np.array([1 / (num * math.comb(num - 1, s)) for s in range(num)] + [0.0])[size]
    values = np.zeros((num, *cost.shape[1:]))
    for player in range(num):
        before = coalitions[(coalitions >> player) & 1 == 0]
        added = cost[before | 1 << player] - cost[before]
        values[player] = np.tensordot(chance[before], added, axes=1)
    return values


def of_classes(cost: Floats) -> tuple[Floats, float]:
    """Return each chunk's value, and the total value of the decodes.

    Args:
        cost: [2^chunks, decodes + 1], cost of a set of chunks with k decodes; the empty one's is 0.
    """
    num_chunks, num_decodes = len(cost).bit_length() - 1, cost.shape[1] - 1
    num = num_chunks + num_decodes
    values = np.zeros(num_chunks)
    for chunks in range(len(cost)):
        for decodes in range(num_decodes + 1):
            size = chunks.bit_count() + decodes
            if size == num:
                continue
            # The probability that a random order puts exactly this coalition before a chunk.
            chance = math.comb(num_decodes, decodes) / (num * math.comb(num - 1, size))
            for chunk in range(num_chunks):
                if not chunks >> chunk & 1:
                    added = cost[chunks | 1 << chunk, decodes] - cost[chunks, decodes]
                    values[chunk] += chance * added
    return values, float(cost[-1, -1] - values.sum())


def filled(cost: Floats, at: Ints) -> Floats:
    """Interpolate linearly between the measured numbers of decodes.

    Args:
        cost: [2^chunks, measured].
        at: [measured], the numbers of decodes, rising from 0.

    Returns:
        [2^chunks, decodes + 1]. Nothing is interpolated below one decode: `at` holds 0 and 1.
    """
    assert at[0] == 0, "the step without decodes is missing"
    assert at[-1] == 0 or at[1] == 1, "a step's fixed cost lies between no decode and one"
    every = np.arange(at[-1] + 1)
    return np.stack([np.interp(every, at, row) for row in cost])
