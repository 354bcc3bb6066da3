"""The Shapley value of what was measured: from the costs of coalitions, and from nothing else.

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
        cost: [2^players] or [2^players, samples], of each coalition; that of nobody is 0.
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
    """Return each chunk's value, and what all decodes have together.

    Args:
        cost: [2^chunks, decodes + 1], of a set of chunks with k decodes; that of nobody is 0.
    """
    num_chunks, num_decodes = len(cost).bit_length() - 1, cost.shape[1] - 1
    num = num_chunks + num_decodes
    values = np.zeros(num_chunks)
    for chunks in range(len(cost)):
        for decodes in range(num_decodes + 1):
            size = chunks.bit_count() + decodes
            if size == num:
                continue
            # The chance that a given chunk, in a random order, finds just such a coalition.
            chance = math.comb(num_decodes, decodes) / (num * math.comb(num - 1, size))
            for chunk in range(num_chunks):
                if not chunks >> chunk & 1:
                    added = cost[chunks | 1 << chunk, decodes] - cost[chunks, decodes]
                    values[chunk] += chance * added
    return values, float(cost[-1, -1] - values.sum())


def filled(cost: Floats, at: Ints) -> Floats:
    """Fill in the numbers of decodes that were not measured, by straight lines between the others.

    Args:
        cost: [2^chunks, measured].
        at: [measured], the numbers of decodes, rising from 0.

    Returns:
        [2^chunks, decodes + 1]. From nobody to one decode nothing is filled in: `at` holds 0 and 1.
    """
    assert at[0] == 0, "without the step that has no decodes"
    assert at[-1] == 0 or at[1] == 1, "a step's fixed cost lies between nobody and one"
    every = np.arange(at[-1] + 1)
    return np.stack([np.interp(every, at, row) for row in cost])
