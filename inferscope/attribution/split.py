"""The fair split: one step's measured time over its requests, by the Shapley value.

A request's share is what it adds to the step, averaged over every order in which the batch could
have been put together: the only rule that an ablation of the batch measures directly. The model
T(S) = f(N) + g(M) + Σ own_i is linear in its parts, and so is the Shapley value: own_i stays with
its request but for padding (see `padding`), g is shared by sampled rows (exact where nobody samples
more than one, or g is linear), what decoding costs once by those who decode, and only f(N) needs
work.

For f, players are alike when they bring the same number of tokens. D players bring one token each
(the decodes), the others (prefill chunks) are few:

    no other      f(N)/D
    one, c        mean over k = 0..D of f(c + k) - f(k)                        prefix sums: O(1)
    two           likewise, weighted by who of the two comes first             O(D)
    more          all subsets, or close to them where those are too many       see `chunks`

Shares are then scaled to the measured time, so they are conserved by construction; how well the
model fits is told by its residual, never by the sum.
"""

from __future__ import annotations

import math
from functools import lru_cache
from operator import add

import numpy as np
from numpy.typing import NDArray

from inferscope.attribution.chunks import split_chunks
from inferscope.attribution.padding import beyond_own
from inferscope.cost.batch import Batch, Line, Team
from inferscope.cost.model import StepModel

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def fair(model: StepModel, batch: Batch, own: Line) -> Line:
    """Return each request's fair part of the modelled step time.

    Args:
        model: the cost model in force.
        batch: the requests of the step.
        own: the slices' own cost, as `model.own` gives it.

    Returns:
        nanoseconds by request, summing to the model's T(S) (to rounding; where there are more than
        `chunks.MOST_COALITIONS`, too, though single parts are approximate then).
    """
    team = batch.team
    line, chunks = _shared(model, team), own.chunks
    if chunks:
        chunks = list(map(add, chunks, line.chunks))
    if model.padded_ns and team.num_single > 1:
        return _padded(model, batch, line, chunks)
    return Line(own.slope, own.level + line.level, chunks, line.levels)


def _padded(model: StepModel, batch: Batch, line: Line, chunks: list[float]) -> Line:
    """Return the line of those who pay for padding beyond their own visible tokens as well.

    Args:
        model: the cost model in force.
        batch: the requests of the step.
        line: what else those with one token pay.
        chunks: all that the others pay.
    """
    team = batch.team
    singles = np.arange(len(team.tokens)) if team.singles is None else team.singles
    level = np.zeros(len(team.tokens))
    level[singles] = beyond_own(batch.context[singles]) * model.padded_ns
    level[singles] += line.level if isinstance(line.level, float) else line.level[singles]
    levels = line.level * team.num_single if line.levels is None else line.levels
    more = model.padded_ns * (team.num_single * batch.longest_single - batch.single_visible)
    return Line(model.single_ns + model.padded_ns, level, chunks, float(more + levels))


def _shared(model: StepModel, team: Team) -> Line:
    """Return each request's part of f and g, and of what decoding costs once."""
    per_row = model.g(team.num_rows) / team.num_rows if team.num_rows else 0.0
    of_chunks, of_single = split_f(model, team.chunk_tokens, team.num_single)
    of_single += model.decoding_ns / team.num_single if team.num_single else 0.0
    chunks = [part + per_row * rows for part, rows in zip(of_chunks, team.chunk_rows, strict=True)]
    if team.rows is None:
        return Line(0.0, of_single + per_row, chunks)
    levels: Floats = np.multiply(team.rows, per_row)
    levels += of_single
    rows = team.num_rows - sum(team.chunk_rows)
    return Line(0.0, levels, chunks, of_single * team.num_single + per_row * rows)


def split_f(
    model: StepModel, chunks: list[int], num_single: int, *, num_before: int = 0
) -> tuple[list[float], float]:
    """Split f(N) over chunks and, equally, over single tokens.

    Args:
        model: whose f.
        chunks: tokens of each.
        num_single: requests with one token.
        num_before: tokens of others, who are there whoever else is: what is split is what these
            add to them.
    """
    total = sum(chunks) + num_single
    whole = model.f(num_before + total) - (model.f(num_before) if num_before else 0.0)
    if not chunks:
        return [], whole / num_single if num_single else 0.0
    if num_single == 0 and len(chunks) == 1:
        return [whole], 0.0
    if len(chunks) > 2 or num_before + total >= len(model.f_ns):
        return split_chunks(model, chunks, num_single, num_before=num_before, whole=whole)
    if len(chunks) == 1:
        parts = [_one_chunk(model.f_sum, chunks[0], num_single, num_before)]
    else:
        parts = _two_chunks(model.f_ns[num_before:], chunks[0], chunks[1], num_single)
    rest = whole - sum(parts)
    return parts, max(0.0, rest / num_single) if num_single else 0.0


def _one_chunk(f_sum: Floats, chunk: int, num_single: int, before: int) -> float:
    alone = num_single + 1
    with_it = f_sum.item(before + chunk + alone) - f_sum.item(before + chunk)
    part: float = (with_it - (f_sum.item(before + alone) - f_sum.item(before))) / alone
    return max(0.0, part)


def _two_chunks(f_ns: Floats, one: int, other: int, num_single: int) -> list[float]:
    """Weigh both orders of the two with every number of singles before the one that joins."""
    first, second = _weights_of_two(num_single)
    of_none, of_one, of_other, of_both = (
        f_ns[tokens : tokens + num_single + 1] for tokens in (0, one, other, one + other)
    )
    alike = float(second @ of_both) - float(first @ of_none)
    parts = (
        alike + float(first @ of_one) - float(second @ of_other),
        alike + float(first @ of_other) - float(second @ of_one),
    )
    return [max(0.0, part) for part in parts]


@lru_cache(maxsize=256)
def _weights_of_two(num_single: int) -> tuple[Floats, Floats]:
    """Return the chances that k singles stand before one chunk and the other does not, or does.

    Returns:
        both [singles + 1], by k.
    """
    before = np.arange(1.0, num_single + 2) / ((num_single + 1) * (num_single + 2))
    return before[::-1].copy(), before


def to_whole_ns(parts: Floats, total_ns: int) -> Ints:
    """Scale parts to a total and round them to integers that sum to it exactly.

    Args:
        parts: [n], none negative, n at least 1.
        total_ns: what they must sum to.
    """
    weight = float(np.add.reduce(parts))
    if not NOTHING_NS < weight < math.inf:
        parts, weight = np.ones(len(parts)), float(len(parts))
    return round_ns(parts * (total_ns / weight), total_ns)


def round_ns(exact: Floats, total_ns: int) -> Ints:
    """Round parts of a total to integers that sum to it exactly.

    The largest remainders are rounded up; equal remainders in order of position.

    Args:
        exact: [n], none negative, summing to the total but for the floats' own rounding.
        total_ns: what they must sum to.
    """
    whole = exact.astype(np.int64)
    missing = total_ns - int(whole.dot(_ones(len(whole))))  # half of a reduction's time
    if missing >= len(whole):  # parts that fell short of the total
        whole += missing // len(whole)
        missing %= len(whole)
    if not missing:
        return whole
    # Not by sorting values for their bound: vector instructions of another width slow down all the
    # rest of a step by more than they save.
    order = (whole - exact).argsort(kind="stable")
    if missing > 0:
        whole[order[:missing]] += 1
    else:  # a total too large for a float to be exact
        falling = order[::-1]
        whole[falling[whole[falling] > 0][:-missing]] -= 1
    return whole


@lru_cache(maxsize=256)
def _ones(num: int) -> Ints:
    return np.ones(num, dtype=np.int64)


NOTHING_NS = 1e-6
"""Parts that sum to less than this are all alike."""
