"""Weight reads: one step's weight bytes over its requests, by the fair split.

A weight is read once for any number of requests, so its bytes are an any-of game: the whole is due
once one request needs it. Its Shapley value is an equal part for each that needs it:

    layers     W / P                         P requests with tokens
    lm_head    H / R                         R requests with sampled rows
    experts    Σ over experts of E[1{i wants it} / number who want it]

Which requests want an expert is not recorded. With even routing, each of a request's n tokens
misses it with 1 - k/E, independently, so request i wants it with p_i = 1 - (1 - k/E)^n_i, and the
expected equal part is ∫ p_i Π_{j≠i} (1 - p_j t) dt over t in [0, 1]: a polynomial, which
Gauss-Legendre quadrature gives exactly up to 64 requests, and beyond that all but so. Parts are
whole bytes; what is left over, less than a byte of each, is the first request's.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from inferscope.attribution.split import round_ns
from inferscope.cost import StepTable, WeightBytes

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_POINTS, _WEIGHTS = np.polynomial.legendre.leggauss(32)
_T, _WEIGHTS = (_POINTS + 1) / 2, _WEIGHTS / 2


def plain_shares(weights: WeightBytes, table: StepTable) -> Ints:
    """Return `weight_shares` for many steps: [members].

    Parts are rounded down; the first request of a step takes the few bytes left over.
    """
    samples, sizes = table.sampled > 0, table.sizes
    num_sampling = np.add.reduceat(samples, table.first, dtype=np.int64)
    of_head = np.repeat(weights.head // np.maximum(num_sampling, 1), sizes)
    shares: Ints = of_head * samples + np.repeat(weights.layers // sizes, sizes)
    read = weights.layers + np.where(num_sampling, weights.head, 0)
    if weights.experts:
        chunk_at = np.searchsorted(table.chunk_step, np.arange(len(table) + 1)).tolist()
        num_single, num_tokens = table.num_single.tolist(), table.num_tokens.tolist()
        for step, (start, stop) in enumerate(pairwise(chunk_at)):
            at, tokens = table.chunks[start:stop], table.chunk_tokens[start:stop].tolist()
            single, chunks = _of_plain_experts(weights, num_single[step], tuple(tokens))
            first = table.first.item(step)
            shares[first : first + sizes.item(step)] += single
            shares[at] += np.array(chunks, dtype=np.int64) - single
            read[step] += weights.of_experts(num_tokens[step])
    shares[table.first] += read - np.add.reduceat(shares, table.first)
    return shares


@lru_cache(maxsize=1024)
def _of_plain_experts(
    weights: WeightBytes, num_single: int, chunk_tokens: tuple[int, ...]
) -> tuple[int, list[int]]:
    """Return the experts' bytes, rounded down, for a single token and for each chunk."""
    total = weights.of_experts(num_single + sum(chunk_tokens))
    if not chunk_tokens:
        return total // num_single, []
    sizes = np.array([1, *chunk_tokens])
    counts = np.array([num_single, *[1] * len(chunk_tokens)])
    parts = _expected_parts(weights.touch_share, sizes, counts)
    # Slightly less than all, so that rounding cannot make the parts more than the whole.
    exact = parts * (total * (1 - 1e-12) / float(parts @ counts))
    single, *chunks = exact.astype(np.int64).tolist()
    return single, chunks


def weight_shares(weights: WeightBytes, tokens: Ints, sampled: Ints) -> Ints:
    """Return each request's bytes of the weights that a step reads, which sum to them exactly.

    Args:
        weights: weight bytes of the model.
        tokens: [requests], tokens of this model; a request with none reads nothing.
        sampled: [requests], rows of logits.
    """
    has_tokens = tokens > 0
    shares = _equally(weights.layers, has_tokens)
    shares += _equally(weights.head, has_tokens & (sampled > 0))
    if weights.experts:
        shares += _of_experts(weights, tokens, has_tokens)
    return shares


def _equally(total: int, is_in: NDArray[np.bool_]) -> Ints:
    """Return equal parts of a total over the included; the first of them takes the remainder."""
    num = int(np.count_nonzero(is_in))
    if not num:
        return np.zeros(len(is_in), dtype=np.int64)
    part, rest = divmod(total, num)
    shares = np.where(is_in, part, 0)
    shares[is_in.argmax()] += rest
    return shares


def _of_experts(weights: WeightBytes, tokens: Ints, has_tokens: NDArray[np.bool_]) -> Ints:
    total = weights.of_experts(int(tokens.sum()))
    sizes, group_of, counts = np.unique(tokens, return_inverse=True, return_counts=True)
    if len(sizes) == 1 or (len(sizes) == 2 and not sizes[0]):
        return _equally(total, has_tokens)
    exact = _expected_parts(weights.touch_share, sizes, counts)[group_of]
    return round_ns(exact * (total / exact.sum()), total)


def _expected_parts(touch_share: float, sizes: Ints, counts: Ints) -> Floats:
    """Return the expected part of one expert, for one request of each group.

    Args:
        touch_share: share of the experts that one token uses.
        sizes: [groups], tokens of each request.
        counts: [groups], requests of that size.
    """
    wants = 1 - (1 - touch_share) ** sizes
    others = 1 - wants[:, None] * _T  # [groups, points], above 0: no point is 1
    none_other = np.exp(counts @ np.log(others))
    parts: Floats = wants * ((none_other / others) @ _WEIGHTS)
    return parts
