"""The Shapley value of f(N) for steps with several chunks and single tokens.

A chunk's share is the mean of f(X + n) - f(X), where X is the number of tokens before it in a
random order of the batch. Two methods compute that mean, both deterministic:

    enumerated    Chunks of one size are alike, as are the singles, so a coalition is a number of
                  each size and of singles. Exact while there are few such coalitions. With many
                  singles their numbers are pooled in cells, whose mean cost two prefix sums of f
                  give, so that a step of f inside a cell counts as it should.
    approximate   For more coalitions than that, see `many_chunks`. Parts are scaled to f(N).
"""

from __future__ import annotations

import math
from collections import Counter
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from inferscope.attribution.many_chunks import Sums, approximate, log_factorials
from inferscope.cost import StepModel, look_up

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

MOST_COALITIONS = 1024
"""Coalitions of chunks that are enumerated; ten chunks of different sizes have as many."""
_FEW, _MOST_OF_FEW, _MOST_COSTS = 64, 1 << 14, 1 << 12
"""Coalitions with singles that are enumerated one by one, with few coalitions of chunks and with
more."""
_MOST_CELLS, _MOST_POOLED = 12, 1 << 13
"""Cells of singles, and at most of coalitions with them: arrays of twice the size take ten times as
long, because the allocator maps each anew."""


def split_chunks(
    model: StepModel, chunks: list[int], num_single: int, *, num_before: int, whole: float
) -> tuple[list[float], float]:
    """Split the cost in f of chunks and single tokens: return each chunk's and each single's.

    Args:
        model: model whose f is split.
        chunks: tokens of each chunk, at least one chunk.
        num_single: number of requests with one token.
        num_before: tokens of other requests, which precede all of these.
        whole: total that the shares must sum to.
    """
    counts = Counter(chunks)
    sizes, of_sizes = tuple(counts), tuple(counts.values())
    num = math.prod([count + 1 for count in of_sizes])
    is_exact = False
    if num <= MOST_COALITIONS:
        is_exact = num * (num_single + 1) <= (_MOST_COSTS if num > _FEW else _MOST_OF_FEW)
        num_cells = num_single + 1 if is_exact else min(_MOST_CELLS, _MOST_POOLED // num)
        every = _coalitions(of_sizes, num_single, num_cells)
        parts, single = _enumerate(model, sizes, every, num_before)
    else:
        parts, single = approximate(model, sizes, of_sizes, num_single, num_before)
    if len(sizes) == len(chunks):
        of_chunks = parts.tolist()
    else:
        by_size = dict(zip(sizes, parts.tolist(), strict=True))
        of_chunks = [by_size[size] for size in chunks]
    total = sum(of_chunks)
    if is_exact:
        return of_chunks, max(0.0, (whole - total) / num_single) if num_single else 0.0
    total += single * num_single
    if not total > 0:
        each = whole / (len(chunks) + num_single)
        return [each] * len(chunks), each
    scale = whole / total
    return [part * scale for part in of_chunks], single * scale


class _Coalitions(NamedTuple):
    """Coalitions of chunks by counts of each size, each with the counts of singles."""

    numbers: Floats
    """[coalitions, sizes]."""
    shares: Floats
    """[coalitions, sizes], fraction of the chunks of each size that the coalition contains."""
    reaching: Floats
    """[cells, coalitions], the chance that, in a random order, just these chunks but for a given
    one of them, and so many of the singles, stand before that one; 0 where there is none."""
    leaving: Floats
    """[cells, coalitions], chance that exactly these precede a given other chunk."""
    before_single: Floats
    """[cells - 1, coalitions], the chance that just these stand before a given single, by how many
    numbers of singles the cell has."""
    bounds: Ints
    """[cells + 1, 1], first count of singles of each cell, from 0 to all, then one more."""
    is_whole: bool
    """Whether every count of singles is a cell of its own."""


def _enumerate(
    model: StepModel, sizes: tuple[int, ...], every: _Coalitions, before: int
) -> tuple[Floats, float]:
    """Weigh every coalition; return each size's share, and a single's if counts are pooled.

    A coalition counts for each chunk in it as what it reached by joining, and against each chunk
    outside as what was there before; the weights are the chances of just that coalition.
    """
    tokens = (every.numbers @ np.array(sizes, dtype=np.float64)).astype(np.int64)
    at = tokens + (every.bounds + before)  # [cells + 1, coalitions]: long rows are faster
    single = 0.0
    if every.is_whole:
        cost = look_up(model.f_ns, at[:-1])
    else:
        sums = Sums(model).at(at)
        cost = sums[1:] - sums[:-1]
        f_ns = look_up(model.f_ns, at[:-1])
        single = max(0.0, float(np.vdot(f_ns[1:] - f_ns[:-1], every.before_single)))
    left = np.einsum("ks,ks->s", cost, every.leaving)
    joint = np.einsum("ks,ks->s", cost, every.reaching)
    joint += left
    parts = joint @ every.shares - left.sum()
    return np.maximum(parts, 0.0), single


@lru_cache(maxsize=32)  # each at most 400 KB
def _coalitions(counts: tuple[int, ...], num_single: int, num_cells: int) -> _Coalitions:
    """Return the coalitions of chunks for given counts of each size.

    Args:
        counts: number of chunks by size.
        num_single: number of singles.
        num_cells: number of cells for the counts of singles; singles + 1 for no pooling.
    """
    numbers, shares, ways, h = _of_chunks(counts)
    num_chunks = sum(counts)
    bounds = _bounds(num_single, num_cells)
    starts, widths = bounds[:-1], np.diff(bounds)[:, None]
    is_whole = len(starts) == num_single + 1
    weights = np.zeros((len(starts), num_chunks + 2))  # by number of chunks before, and one more
    weights[:, 1:-1] = np.add.reduceat(_chances(num_chunks - 1, num_single), starts) / widths
    of_single = np.zeros((0, num_chunks + 1))
    if not is_whole:
        of_single = np.add.reduceat(_chances(num_chunks, num_single - 1), starts[:-1])
        of_single /= widths[:-1]
    return _Coalitions(
        numbers, shares, weights.take(h, axis=1) * ways, weights.take(h + 1, axis=1) * ways,
        of_single.take(h, axis=1) * ways, bounds[:, None], is_whole,
    )  # fmt: skip


@lru_cache(maxsize=64)  # each at most 200 KB
def _of_chunks(counts: tuple[int, ...]) -> tuple[Floats, Floats, Floats, Ints]:
    """Return coalitions of chunks: numbers of each size, parts of all of that size, ways, size."""
    numbers = np.indices([count + 1 for count in counts]).reshape(len(counts), -1).T.copy()
    of_counts = np.array(counts)
    log = log_factorials(int(of_counts.max()))
    ways = (log[of_counts] - log[numbers] - log[of_counts - numbers]).sum(axis=1)
    shares = numbers / of_counts
    return numbers.astype(np.float64), shares, np.exp(ways), numbers.sum(axis=1)


def _chances(num_chunks: int, num_single: int) -> Floats:
    """Return the joint chances of which other chunks and how many singles precede one.

    Args:
        num_chunks: number of other chunks.
        num_single: number of other singles.

    Returns:
        [singles + 1, chunks + 1], by count before it.
    """
    players = num_chunks + num_single
    log = log_factorials(players + 1)
    k = np.arange(num_single + 1)[:, None]
    choices = log[num_single] - log[k] - log[num_single - k]
    before = k + np.arange(num_chunks + 1)
    chances: Floats = np.exp(choices - log[players + 1] + log[before] + log[players - before])
    return chances


def _bounds(num_single: int, num_cells: int) -> Ints:
    """Return the first counts of the cells of singles, and the end: [cells + 1], rising.

    None and all are cells of their own. Between, cells are narrower towards both ends, where the
    first and the last of the chunks find the singles, most of all towards none, where f bends.
    """
    if num_cells > num_single:
        return np.arange(num_single + 2)
    at = np.linspace(0.0, 1.0, num_cells - 1)
    spread = at * at * (1.8 - 0.8 * at)
    inner = np.rint(1 + spread * (num_single - 1)).astype(np.int64)
    return np.unique(np.concatenate([[0], inner, [num_single, num_single + 1]]))
