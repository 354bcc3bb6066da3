"""The Shapley value of f(N) for many chunks, by a deterministic approximation.

A chunk's part is the mean of f(X + n) - f(X), X being the tokens before it in a random order. The
number h of other chunks before one is uniform; the singles before it follow from h (beta-binomial).

    h = 0, all           X is known but for the singles
    h = 1, all but one   one of few values
    between              taken as normal, with the mean and the variance that X has, by which of
                         the two largest other chunks are before it

All of these are cut in cells of X, in which f has a mean by two of its prefix sums: so a step of f
inside a cell counts as it should.
"""

from __future__ import annotations

import math
from functools import lru_cache
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from inferscope.cost import StepModel

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_EDGE_CELLS, _PAIR_CELLS = 5, 3
_MOST_NUMBERS, _FEWEST_NUMBERS = 8, 3
"""Numbers of chunks before one that are distinguished where X is taken as normal: fewer for more
sizes."""
_MOST_PAIRED = 16
"""Largest number of sizes for which each is tried alone before each other."""


class _Plan(NamedTuple):
    """Values that depend only on the player counts; last index: for a chunk, for a single."""

    num_others: Floats
    """[2], other chunks."""
    singles_before: Floats
    """[2], other singles."""
    edges: tuple[Floats, Floats]
    """[2, cells + 1, 2] and [2, cells, 2]: bounds of the singles before it, and weights by width,
    if no other chunk is before it, and if all are."""
    pairs: tuple[Floats, Floats]
    """Bounds and weights if one other chunk is before it, and if all but one are."""
    numbers: Floats
    """[numbers, 2], counts of other chunks before it, between these."""
    weights: Floats
    """[4, numbers, 2], their chances, by which of the two largest chunks are among them."""
    mean: Floats
    """[numbers, 2], mean count of singles before it, plus half a token."""
    variance: Floats
    """[numbers, 2], variance of that count."""


def approximate(
    model: StepModel, sizes: tuple[int, ...], counts: tuple[int, ...], num_single: int, before: int
) -> tuple[Floats, float]:
    """Return each size's part and a single's, which sum to f(N) but for the approximation.

    Args:
        model: the model whose f is split.
        sizes: tokens of a chunk, all different.
        counts: chunks of each size, at least 11 in all.
        num_single: requests with one token.
        before: tokens of other requests, which stand before all of these.
    """
    num_chunks, num_sizes = sum(counts), len(sizes)
    is_paired = num_sizes <= _MOST_PAIRED
    num_numbers = min(max(_FEWEST_NUMBERS, 160 // num_sizes), _MOST_NUMBERS)
    plan = _plan(num_chunks, num_single, num_numbers, is_paired=is_paired)
    size, count = np.array(sizes, dtype=np.float64), np.array(counts, dtype=np.float64)
    kind = np.zeros(num_sizes + (num_single > 0), dtype=np.int64)
    own = np.ones(len(kind))
    own[:num_sizes] = size
    present = np.broadcast_to(count, (len(kind), num_sizes)).copy()
    diagonal = np.arange(num_sizes)
    present[diagonal, diagonal] -= 1.0
    kind[num_sizes:] = 1
    others = plan.num_others[kind]
    total, squares = present @ size, present @ (size * size)

    # All points are [..., bounds, rows].
    edge_bounds, edge_weights = plan.edges
    points = edge_bounds[..., kind]
    points[1] += total
    pieces, weights = [points], [edge_weights[..., kind]]
    if is_paired:
        pair_bounds, pair_weights = plan.pairs
        points = np.empty((2, num_sizes, *pair_bounds.shape[1:-1], len(kind)))
        points[0] = size[:, None, None]
        points[1] = total - size[:, None, None]
        points += pair_bounds[..., kind][:, None]
        chance = (present / others[:, None]).T
        pieces.append(points)
        weights.append(pair_weights[..., kind][:, None] * chance[:, None])

    # Between: by which of the two largest of the others are before it.
    first, second, third = np.sort(np.repeat(size, np.minimum(counts, 3)))[:-4:-1].tolist()
    larger = np.where(own == first, second, first)
    smaller = np.where(own >= second, third, second)
    rest = others - 2
    mean = (total - larger - smaller) / rest
    spread = (squares - larger * larger - smaller * smaller) / rest - mean * mean
    spread /= rest - 1
    numbers = plan.numbers[:, kind]
    drawn = numbers - _OF_LARGEST.sum(axis=0)  # [4, numbers, rows]
    variance = drawn * (rest - drawn)
    variance *= np.maximum(spread, 0.0)
    variance += plan.variance[:, kind]
    np.maximum(variance, 0.0, out=variance)
    drawn *= mean
    drawn += _OF_LARGEST[0] * larger + _OF_LARGEST[1] * smaller
    drawn += plan.mean[:, kind]
    bounds = np.sqrt(variance)[:, :, None] * _NORMAL_BOUNDS
    bounds += drawn[:, :, None]
    np.maximum(bounds, 0.0, out=bounds)
    np.minimum(bounds, total + plan.singles_before[kind] + 1, out=bounds)
    chance = plan.weights[..., kind]
    widths = np.maximum(bounds[:, :, 1:] - bounds[:, :, :-1], 1e-9)
    pieces.append(bounds)
    weights.append(chance[:, :, None] * _NORMAL_MASSES / widths)

    flat = np.concatenate([piece.reshape(-1, len(kind)) for piece in pieces])
    if before:
        flat += before
    sums = Sums(model).between(np.stack([flat, flat + own]))
    added = sums[1] - sums[0]
    parts, first = np.zeros(len(kind)), 0
    for piece, weight in zip(pieces, weights, strict=True):
        last = first + math.prod(piece.shape[:-1])
        here = added[first:last].reshape(piece.shape)
        rising = (here[..., 1:, :] - here[..., :-1, :]) * weight
        parts += rising.reshape(-1, len(kind)).sum(axis=0)
        first = last
    parts = np.maximum(parts, 0.0)
    return parts[:num_sizes], float(parts[-1]) if num_single else 0.0


_OF_LARGEST = np.array([[0.0, 1.0, 0.0, 1.0], [0.0, 0.0, 1.0, 1.0]])[..., None, None]
"""Whether the largest of the other chunks, and the second, are before one: [2, 4, 1, 1]."""


def _normal() -> tuple[Floats, Floats]:
    """Return bounds of cells of a normal distribution and their masses, variance 1 in all."""
    bounds = np.array([-2.2, -0.8, 0.0, 0.8, 2.2])
    masses = np.diff([NormalDist().cdf(bound) for bound in bounds])
    masses /= masses.sum()
    squares = (bounds[1:] ** 2 + bounds[1:] * bounds[:-1] + bounds[:-1] ** 2) / 3
    return bounds[:, None] / math.sqrt(float(masses @ squares)), masses[:, None]


_NORMAL_BOUNDS, _NORMAL_MASSES = _normal()


@lru_cache(maxsize=256)
def _plan(num_chunks: int, num_single: int, num_numbers: int, *, is_paired: bool) -> _Plan:
    """Return what depends on the numbers of players alone.

    Args:
        num_chunks: at least 11.
        num_single: number of single tokens.
        num_numbers: largest number of distinguished counts of chunks before one.
        is_paired: whether the cases of one other chunk, and of all but one, are separate.
    """
    kinds = [(num_chunks - 1, num_single), (num_chunks, max(0, num_single - 1))]
    first = 2 if is_paired else 1
    num = min(num_numbers, num_chunks - 2 * first)
    middles = [_middle(n, d, first, num) for n, d in kinds]
    return _Plan(
        np.array([n for n, _ in kinds], dtype=np.float64),
        np.array([d for _, d in kinds], dtype=np.float64),
        _cells(kinds, 0, _EDGE_CELLS),
        _cells(kinds, 1, _PAIR_CELLS),
        *(np.moveaxis(np.array([middle[at] for middle in middles]), 0, -1) for at in range(4)),
    )


def _cells(kinds: list[tuple[int, int]], h: int, num: int) -> tuple[Floats, Floats]:
    """Return cells of singles before one that h of n other chunks precede, or all but h do.

    The second case is the first in reverse.

    Args:
        kinds: n and the number of other singles, by kind of player.
        h: 0 or 1.
        num: cells.

    Returns:
        bounds [2, cells + 1, kinds] and weights by width [2, cells, kinds], which sum to the
        chance 1/(n + 1) of each case.
    """
    bounds = np.zeros((2, num + 1, len(kinds)))
    weights = np.zeros((2, num, len(kinds)))
    log = log_factorials(max(n + d + 1 for n, d in kinds))
    for kind, (n, d) in enumerate(kinds):
        cut = [0]
        for at in range(1, num):
            reach = 1 - (1 - (at - 1) / (num - 1)) ** (1 / (n + 1 - h))
            cut.append(
                min(max(cut[-1] + 1, round(reach * (d + 1))), max(cut[-1], d + 1 - num + at))
            )
        cut.append(d + 1)
        cut = [min(bound, d + 1) for bound in cut]
        up_to = [1 - _chance_of_more(log, n, d, h, bound) for bound in cut]
        of_cells = [
            (after - before) / (n + 1) / max(1, end - start)
            for start, end, before, after in zip(cut, cut[1:], up_to, up_to[1:], strict=False)
        ]
        bounds[0, :, kind], weights[0, :, kind] = cut, of_cells
        bounds[1, :, kind] = [d + 1 - bound for bound in reversed(cut)]
        weights[1, :, kind] = of_cells[::-1]
    return bounds, weights


def _chance_of_more(log: Floats, n: int, d: int, h: int, least: int) -> float:
    """Return the chance that one which h of n chunks precede is preceded by so many of d singles.

    That is: at most h of the n + 1 chunks are among the first `least` + h of all.
    """
    if least > d:
        return 0.0
    first = least + h
    all_ways = log.item(n + d + 1) - log.item(first) - log.item(n + d + 1 - first)
    chance = 0.0
    for chunks in range(h + 1):
        singles = first - chunks
        if singles <= d:
            of_chunks = log.item(n + 1) - log.item(chunks) - log.item(n + 1 - chunks)
            of_singles = log.item(d) - log.item(singles) - log.item(d - singles)
            chance += math.exp(of_chunks + of_singles - all_ways)
    return chance


def _middle(n: int, d: int, first: int, num: int) -> tuple[Floats, Floats, Floats, Floats]:
    """Return counts of chunks before one, their chances, and the mean and variance of singles."""
    h, chances = _numbers(n, first, num)
    mean = (h + 1) * (d / (n + 2))
    variance = mean * (n + 1 - h) * ((n + 2 + d) / ((n + 2) * (n + 3)))
    return h, chances, mean + 0.5, variance + 1 / 12


@lru_cache(maxsize=256)
def _numbers(n: int, first: int, num: int) -> tuple[Floats, Floats]:
    """Return numbers of chunks before one, of n, and chances by which of the two largest are."""
    groups = np.array_split(np.arange(first, n + 1 - first), num)
    h = np.array([group.mean() for group in groups])
    chance = np.array([len(group) / (n + 1) for group in groups])
    both, neither = h * (h - 1), (n - h) * (n - h - 1)
    which = np.stack([neither, h * (n - h), h * (n - h), both]) / (n * (n - 1))
    return h, chance * which


def log_factorials(most: int) -> Floats:
    """Return the logarithms of the factorials from 0 to at least `most`."""
    return _log_factorials_to(1 << most.bit_length())


@lru_cache(maxsize=20)
def _log_factorials_to(most: int) -> Floats:
    return np.concatenate([[0.0], np.cumsum(np.log(np.arange(1.0, most + 1)))])


class Sums:
    """Prefix sums of f, for fractional token counts and beyond its table too."""

    def __init__(self, model: StepModel) -> None:
        self._f_ns, self._f_sum = model.f_ns, model.f_sum

    def at(self, tokens: Ints) -> Floats:
        """Return Σ f(y) over y < x for whole numbers."""
        last = len(self._f_ns) - 1
        if int(np.max(tokens)) <= last:
            return self._f_sum[tokens]
        return self.between(tokens.astype(np.float64))

    def between(self, tokens: Floats) -> Floats:
        """Return the same for any numbers; f is constant between two whole ones."""
        f_ns, f_sum = self._f_ns, self._f_sum
        last = len(f_ns) - 1
        floor = tokens.astype(np.int64)
        if int(floor.max()) <= last:
            sums: Floats = (tokens - floor) * f_ns.take(floor)
            sums += f_sum.take(floor)
            return sums
        inside = np.minimum(floor, last)
        beyond = (floor - inside).astype(np.float64)
        slope = f_ns.item(last) - f_ns.item(last - 1)
        f_here = f_ns.take(inside) + beyond * slope
        whole = f_sum.take(inside) + beyond * (f_ns.item(last) + slope * (beyond - 1) / 2)
        return np.where(beyond > 0, whole, f_sum.take(inside)) + (tokens - floor) * f_here
