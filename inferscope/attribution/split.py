"""The fair split: one step's measured time over its requests, by the Shapley value.

A request's share is what it adds to the step, averaged over every order in which the batch could
have been put together: the only rule that an ablation of the batch measures directly. The model
T(S) = f(N) + g(M) + Σ own_i is linear in its parts, and so is the Shapley value: own_i stays with
its request, g is shared by sampled rows, and only f(N) needs work.

For f, players are alike when they bring the same number of tokens. D players bring one token each
(the decodes), the others (prefill chunks) are few:

    no other      f(N)/D
    one, c        mean over k = 0..D of f(c + k) - f(k)                        prefix sums: O(1)
    two, c1 c2    the same mean with weights linear in k                       prefix sums: O(1)
    more          Owen's multilinear extension, ∫ E[f(X_t + n) - f(X_t)] dt    by quadrature

Shares are then scaled to the measured time, so they are conserved by construction; how well the
model fits is told by its residual, never by the sum.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from inferscope.cost.batch import Batch
from inferscope.cost.model import StepModel

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def fair(model: StepModel, batch: Batch, own_ns: Floats) -> Floats:
    """Return each request's fair part of the modelled step time, in nanoseconds.

    Args:
        model: the cost model in force.
        batch: the requests of the step.
        own_ns: [requests], the slices' own cost, as `model.own_ns` gives it.

    Returns:
        [requests], summing to the model's T(S) (to rounding; with three or more prefills too,
        where single parts are approximate).
    """
    team = batch.team
    chunks, num_single = team.chunks, team.num_single
    per_row = model.g(team.num_rows) / team.num_rows if team.num_rows else 0.0
    if not len(chunks):
        parts = own_ns + model.f(num_single) / num_single
    else:
        of_chunks, of_single = _split_f(model, team.tokens[chunks].tolist(), num_single)
        parts = own_ns + of_single
        parts[chunks] += np.asarray(of_chunks) - of_single
    if team.num_rows == len(parts) == num_single:
        parts += per_row
    elif team.num_rows:
        parts += team.sampled * per_row
    return parts


def _split_f(model: StepModel, chunks: list[int], num_single: int) -> tuple[list[float], float]:
    """Split f(N) over the chunks and, equally, over the single tokens."""
    total = sum(chunks) + num_single
    whole = model.f(total)
    if num_single == 0 and len(chunks) == 1:
        return [whole], 0.0
    if len(chunks) > 2 or total + 1 >= len(model.f_sum):
        return _split_by_quadrature(model, chunks, num_single, whole)
    if len(chunks) == 1:
        parts = [_one_chunk(model.f_sum, chunks[0], num_single)]
    else:
        parts = _two_chunks(model, chunks[0], chunks[1], num_single)
    rest = whole - sum(parts)
    return parts, rest / num_single if num_single else 0.0


def _one_chunk(f_sum: list[float], chunk: int, num_single: int) -> float:
    alone = num_single + 1
    return (f_sum[chunk + alone] - f_sum[chunk] - f_sum[alone]) / alone


def _two_chunks(model: StepModel, first: int, second: int, num_single: int) -> list[float]:
    """Weights of a coalition with k singles: (D+1-k) without the other chunk, (k+1) with it."""
    alone = num_single + 1
    f_sum, yf_sum = model.f_sum, model.yf_sum

    def moments(offset: int) -> tuple[float, float]:
        """Return Σ f(offset + k) and Σ k·f(offset + k) over k = 0..D."""
        plain = f_sum[offset + alone] - f_sum[offset]
        return plain, yf_sum[offset + alone] - yf_sum[offset] - offset * plain

    none, with_first, with_second, both = map(moments, (0, first, second, first + second))
    scale = alone * (alone + 1)

    def part(mine: tuple[float, float], other: tuple[float, float]) -> float:
        without_other = alone * (mine[0] - none[0]) - (mine[1] - none[1])
        with_other = both[0] + both[1] - other[0] - other[1]
        return (without_other + with_other) / scale

    return [part(with_first, with_second), part(with_second, with_first)]


_POINTS, _WEIGHTS = np.polynomial.legendre.leggauss(6)
_SPREAD = np.array([-np.sqrt(3.0), 0.0, np.sqrt(3.0)])
_SPREAD_WEIGHTS = np.array([1 / 6, 2 / 3, 1 / 6])
_T = np.repeat((_POINTS + 1) / 2, 3)[:, None]
_DEVIATION = np.sqrt(_T * (1 - _T)) * np.tile(_SPREAD, 6)[:, None]
_QUADRATURE = np.repeat(_WEIGHTS / 2, 3) * np.tile(_SPREAD_WEIGHTS, 6)


def _split_by_quadrature(
    model: StepModel, chunks: list[int], num_single: int, whole: float
) -> tuple[list[float], float]:
    """Approximate many chunks: everyone else is present with probability t, their sum normal.

    The cost of running at all (f's jump at 0) falls to all alike; the rest is integrated over t by
    6-point Gauss-Legendre, over the normal sum by 3-point Gauss-Hermite, then scaled to f(N).
    """
    sizes = np.array([*chunks, 1] if num_single else chunks, dtype=np.float64)
    counts = np.ones(len(sizes))
    if num_single:
        counts[-1] = num_single
    jump = max(0.0, 2 * model.f(1) - model.f(2))
    totals = sizes * counts
    rest = totals.sum() - sizes
    deviation = np.sqrt(np.maximum((sizes * totals).sum() - sizes**2, 0.0))
    present = np.clip(_T * rest + _DEVIATION * deviation, 0.0, rest)
    grid = np.arange(len(model.f_ns), dtype=np.float64)
    smooth = model.f_ns - jump
    smooth[0] = 0.0
    added = np.interp(present + sizes, grid, smooth) - np.interp(present, grid, smooth)
    parts = _QUADRATURE @ added + jump / (len(chunks) + num_single)
    parts *= whole / float(parts @ counts)
    if num_single:
        return parts[:-1].tolist(), float(parts[-1])
    return parts.tolist(), 0.0


def to_whole_ns(parts: Floats, total_ns: int, *, weight: float | None = None) -> Ints:
    """Scale parts to a total and round them to integers that sum to it exactly.

    The largest remainders are rounded up; equal remainders in order of position.

    Args:
        parts: [n], none negative, n at least 1.
        total_ns: what they must sum to.
        weight: what they do sum to, where that is known.
    """
    if weight is None:
        weight = float(np.add.reduce(parts))
    if weight <= 0.0:
        parts, weight = np.ones(len(parts)), float(len(parts))
    exact = parts * (total_ns / weight)
    whole = exact.astype(np.int64)
    missing = total_ns - int(np.add.reduce(whole))
    if missing > 0:
        order = np.argsort(whole - exact, kind="stable")
        whole[order[: missing % len(whole)]] += 1
        whole += missing // len(whole)
    elif missing < 0:  # a total too large for a float to be exact
        whole[int(np.argmax(whole))] += missing
    return whole
