"""Cost of padding: decode attention computed for every request up to the longest context.

An engine that pads computes n requests of one token each as if all of them were as long as the
longest: the cost of a coalition S is |S| · max over S of the visible tokens. Each request pays for
its presence, the long ones for the padding they cause. Cut by lengths, it is a sum of games "|S| if
any request in S is as long as this", each with a value in closed form, so the Shapley value takes
one sort. With m of n requests as long as a level, that level's height is paid

Divided by what each makes visible instead, the short ones pay far too little: of 64 requests evenly
from 300 to 3,000 tokens, the shortest a fifth of its part, and 18 % of the padded attention goes to
the wrong request.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from inferscope.cost import Grid

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def padding(visible: Floats) -> Floats:
    """Return the Shapley value of |S| · max visible: [requests], summing to n · max.

    Args:
        visible: tokens, [requests], at least one request.
    """
    return visible + beyond_own(visible, np.array([len(visible)]))


def beyond_own(visible: Floats | Ints, sizes: Ints) -> Floats:
    """Return each request's padding cost beyond its own visible tokens, by step: [requests].

    All requests reach the lowest level, so only the differences in length count.

    Args:
        visible: visible tokens, or their excess over any number, [requests], at least one request.
        sizes: [steps], number of requests.
    """
    grid = Grid(sizes)
    laid = grid.lay(visible.astype(np.float64), math.inf)
    order = grid.positions(laid.argsort(axis=1))  # of equals, all pay the same
    ordered = laid.reshape(-1)[order]
    num = sizes[:, None]
    longer = num - np.arange(1, grid.width)
    is_level = longer > 0
    longer = np.where(is_level, longer, 1).astype(np.float64)
    ordered[:, 1:][~is_level] = 0.0  # cells beyond the step
    levels = np.where(is_level, ordered[:, 1:] - ordered[:, :-1], 0.0)
    prices = np.zeros_like(ordered)
    if grid.width > 1:
        prices[:, 0] = np.add.accumulate(levels * (longer / (longer + 1)), axis=1)[:, -1]
    prices[:, 1:] = levels * (num / (longer * (longer + 1)) - 1)
    beyond = np.zeros(order.size)
    beyond[order] = np.add.accumulate(prices, axis=1)
    return grid.pick(beyond)


def airport(heights: Floats) -> Floats:
    """Return the Shapley value of max height: each level is shared by those that reach it.

    Args:
        heights: [players], none negative, at least one player.
    """
    order = heights.argsort(kind="stable")
    ordered = heights[order]
    levels = np.concatenate([ordered[:1], ordered[1:] - ordered[:-1]])
    values = np.empty(len(heights))
    values[order] = np.cumsum(levels / np.arange(len(heights), 0, -1))
    return values


def padding_after(visible: Floats, *, num_before: int, longest_before: float) -> Floats:
    """Return the Shapley value of a group's increase of the padding of requests already present.

    Args:
        visible: [requests], visible tokens of the group, at least one request.
        num_before: number of other requests.
        longest_before: largest number of visible tokens among the others.
    """
    reached = np.maximum(visible, longest_before)
    return padding(reached) + num_before * airport(reached - longest_before)
