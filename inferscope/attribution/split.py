"""The fair split: the measured time of many steps over their requests, by the Shapley value.

    price(model, table)         T(S) and the fair parts of every member
    shares_ns(priced, busy_ns)  whole nanoseconds by row, for one rank's time of each step

A request's share is what it adds to the step, averaged over every order in which the batch could
have been put together: the only rule that an ablation of the batch measures directly. The model
T(S) = f(N) + g(M) + Σ own_i is linear in its parts, and so is the Shapley value: own_i stays with
its request but for padding (see `padding`), g is shared by sampled rows (exact if each request
samples at most one, or g is linear), the fixed decoding cost by the decodes, and only f(N) needs
work.

For f, players are alike when they bring the same number of tokens. D players bring one token each
(the decodes), the others (prefill chunks) are few:

    no other      f(N)/D
    one, c        mean over k = 0..D of f(c + k) - f(k)                        prefix sums: O(1)
    two           likewise, weighted by who of the two comes first             O(D)
    more          all subsets, or close to them where those are too many       see `chunks`

Steps of at most one chunk are split by columns, others one by one, once for each make-up. Shares
are then scaled to the measured time, so they are conserved by construction; how well the model
fits is shown by its residual, never by the sum.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from inferscope.attribution.chunks import split_chunks
from inferscope.attribution.padding import beyond_own
from inferscope.cost import Grid, StepModel, StepTable, look_up

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

NOTHING_NS = 1e-6
"""Smallest sum in nanoseconds; parts below it are treated as equal."""


class Classes(NamedTuple):
    """Each class of the mixed steps as a step by itself: their prefills, then their decodes."""

    mixed: Ints
    """[mixed], positions of the steps."""
    at: Ints
    """[members], positions in the original table."""
    priced: Priced
    """[2 mixed], priced steps."""


@dataclass(frozen=True, eq=False)
class Priced:
    """Steps with their modelled costs in nanoseconds."""

    model: StepModel
    table: StepTable
    modelled_ns: Floats
    """[steps], T(S)."""
    level_ns: Floats
    """[members], a single's cost apart from visible tokens; undefined for chunks."""
    chunk_ns: Floats
    """[chunks], whole fair parts."""
    attention_ns: Floats
    """[chunks], the attention share of `chunk_ns`."""

    @cached_property
    def classes(self) -> Classes | None:
        """Return the classes of the steps that have both; None if no step has."""
        table = self.table
        num_prefills = np.bincount(table.step_of[table.prefills], minlength=len(table))
        is_mixed = (num_prefills > 0) & (num_prefills < table.sizes)
        mixed = is_mixed.nonzero()[0]
        if not len(mixed):
            return None
        of_mixed = is_mixed[table.step_of]
        is_decode = of_mixed.copy()
        is_decode[table.prefills] = False
        prefills = table.prefills[of_mixed[table.prefills]]
        at = np.concatenate([prefills, is_decode.nonzero()[0]])
        sizes = np.concatenate([num_prefills[mixed], (table.sizes - num_prefills)[mixed]])
        classes = table.taken(at, sizes)
        return Classes(mixed, at, price(self.model, classes))


def price(model: StepModel, table: StepTable) -> Priced:
    """Return T(S) of each step and the fair parts of its members."""
    num_single, num_tokens = table.num_single, table.num_tokens
    model.reach(max(int(num_tokens.max()), int(table.num_rows.max())))
    attention = model.attention_ns(table)
    per_row = look_up(model.g_ns, table.num_rows) / np.maximum(table.num_rows, 1)
    of_chunks, of_single = _shared(model, table)
    of_single += model.decoding_ns / np.maximum(num_single, 1)
    of_chunks += per_row[table.chunk_step] * table.sampled[table.chunks]
    chunk_ns = attention + of_chunks
    level_ns = (per_row[table.step_of] * table.sampled) + of_single[table.step_of]
    levels = np.where(
        table.is_plain,
        (of_single + per_row) * num_single,
        of_single * num_single + per_row * table.single_rows,
    )
    if model.padded_ns:
        is_single = table.visible > 0
        if is_single.any():
            beyond = beyond_own(table.visible[is_single], num_single)
            level_ns[is_single] += beyond * model.padded_ns
        levels = model.padded_ns * (num_single * table.longest - table.sum_visible) + levels
    padded = model.padded_ns * (num_single * table.longest) / np.maximum(table.sum_visible, 1)
    slope_ns = model.single_ns + np.where(num_single > 1, model.padded_ns, padded)
    modelled_ns = slope_ns * table.sum_visible + levels + table.by_step(chunk_ns)
    return Priced(model, table, modelled_ns, level_ns, chunk_ns, attention)


def values_ns(
    priced: Priced, level: Floats, chunk_ns: Floats, scale: Floats | None = None
) -> Floats:
    """Return members' scaled nanoseconds: singles' by visible tokens, chunks' one by one.

    Args:
        priced: priced steps.
        level: [members], cost of a single apart from visible tokens.
        chunk_ns: [chunks].
        scale: [steps], factor for the model's nanoseconds; None for 1.
    """
    table, slope = priced.table, priced.model.single_ns + priced.model.padded_ns
    if scale is None:
        values: Floats = table.context * slope + (slope + level)
        values[table.chunks] = chunk_ns
        return values
    values = table.context * (slope * scale)[table.step_of]
    values += (slope + level) * scale[table.step_of]
    if len(table.chunks):
        values[table.chunks] = chunk_ns * scale[table.chunk_step]
    return values


def parts_ns(priced: Priced) -> Floats:
    """Return the fair parts in the model's nanoseconds: [members]."""
    return values_ns(priced, priced.level_ns, priced.chunk_ns)


def padding_ns(priced: Priced, measured_ns: Ints, padded_tokens: Ints) -> Ints:
    """Return the part of each step's time that padding to a number of tokens takes.

    Args:
        priced: priced steps.
        measured_ns: [steps], time of a rank.
        padded_tokens: [steps], number of computed tokens; 0 without padding.
    """
    model, num_tokens = priced.model, priced.table.num_tokens
    is_padded = padded_tokens > num_tokens
    if not is_padded.any():
        return np.zeros(len(num_tokens), dtype=np.int64)
    model.reach(int(padded_tokens.max()))
    f_ns = look_up(model.f_ns, np.maximum(padded_tokens, num_tokens))
    extra = f_ns - look_up(model.f_ns, num_tokens)
    padding = np.rint(measured_ns * extra / np.where(is_padded, priced.modelled_ns + extra, 1.0))
    return np.where(is_padded, padding, 0.0).astype(np.int64)


def shares_ns(priced: Priced, busy_ns: Ints) -> Ints:
    """Scale the steps' parts to a rank's time: whole nanoseconds by row, which sum to it.

    Args:
        priced: the steps.
        busy_ns: [steps], without padding.
    """
    table, modelled_ns = priced.table, priced.modelled_ns
    is_known = (modelled_ns > NOTHING_NS) & (modelled_ns < math.inf)
    scale = busy_ns / np.where(is_known, modelled_ns, 1.0)
    exact, sizes = values_ns(priced, priced.level_ns, priced.chunk_ns, scale), table.row_sizes
    exact = by_row(table, exact)
    if not is_known.all():
        exact = np.where(np.repeat(is_known, sizes), exact, np.repeat(busy_ns / sizes, sizes))
    return round_steps_ns(exact, busy_ns, sizes)


def by_row(table: StepTable, parts: Floats) -> Floats:
    """Return members' parts divided over their rows, by tokens: [rows]."""
    rows = table.rows
    if rows is None:
        return parts
    by_tokens = (parts / table.tokens)[rows.member] * rows.tokens
    is_cut = np.repeat(rows.sizes != table.sizes, rows.sizes)
    return np.where(is_cut, by_tokens, parts[rows.member])


# --- the parts of f -----------------------------------------------------------------------------


def _shared(model: StepModel, table: StepTable) -> tuple[Floats, Floats]:
    """Return each chunk's part of f, and each single's by step."""
    num_single = table.num_single
    whole = look_up(model.f_ns, table.num_tokens)
    of_single = whole / np.maximum(num_single, 1)
    of_chunks = np.zeros(len(table.chunks))
    if not len(table.chunks):
        return of_chunks, of_single
    num_chunks = table.num_chunks[table.chunk_step]
    is_inside = table.num_tokens[table.chunk_step] < len(model.f_ns)
    is_one = (num_chunks == 1) & is_inside
    one = np.flatnonzero(is_one)
    if len(one):
        step, tokens = table.chunk_step[one], table.chunk_tokens[one]
        parts = _one_chunk(model.f_sum, tokens, num_single[step], 0)
        of_chunks[one] = np.where(num_single[step], parts, whole[step])
        rest = np.maximum(0.0, whole[step] - of_chunks[one])
        of_single[step] = rest / np.maximum(num_single[step], 1)
    made: dict[tuple[int, ...], tuple[list[float], float]] = {}
    others = np.flatnonzero(~is_one)
    at = 0
    while at < len(others):
        this = table.chunk_step.item(others.item(at))
        end = at + table.num_chunks.item(this)
        tokens_of = table.chunk_tokens[others[at:end]].tolist()
        key = (num_single.item(this), *tokens_of)
        if key not in made:
            made[key] = split_f(model, tokens_of, key[0])
        of_chunks[others[at:end]], of_single[this] = made[key]
        at = end
    return of_chunks, of_single


def split_f(
    model: StepModel, chunks: list[int], num_single: int, *, num_before: int = 0
) -> tuple[list[float], float]:
    """Split f(N) over chunks and, equally, over single tokens.

    Args:
        model: model whose f is split.
        chunks: tokens of each chunk.
        num_single: requests with one token.
        num_before: tokens of other requests that are always present; the split covers only what
            these requests add.
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
        parts = [float(_one_chunk(model.f_sum, chunks[0], num_single, num_before))]
    else:
        parts = _two_chunks(model.f_ns[num_before:], chunks[0], chunks[1], num_single)
    rest = whole - sum(parts)
    return parts, max(0.0, rest / num_single) if num_single else 0.0


def _one_chunk(f_sum: Floats, chunk: Ints | int, num_single: Ints | int, before: int) -> Floats:
    """Return the part of the only chunk, for one step or for many."""
    alone = num_single + 1
    with_it = f_sum[before + chunk + alone] - f_sum[before + chunk]
    without = f_sum[before + alone] - f_sum[before]
    part: Floats = np.maximum(0.0, (with_it - without) / alone)
    return part


def _two_chunks(f_ns: Floats, one: int, other: int, num_single: int) -> list[float]:
    """Return both parts, averaged over both orders and every number of singles before a chunk."""
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
    """Return the chances that k singles precede one chunk and the other does not, or does.

    Returns:
        both [singles + 1], by k.
    """
    before = np.arange(1.0, num_single + 2) / ((num_single + 1) * (num_single + 2))
    return before[::-1].copy(), before


# --- whole nanoseconds ----------------------------------------------------------------------------


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
    """Round the parts of one total; see `round_steps_ns`."""
    return round_steps_ns(exact, np.array([total_ns]), np.array([len(exact)]))


def round_steps_ns(exact: Floats, totals_ns: Ints, sizes: Ints) -> Ints:
    """Round parts to integers that sum to their step's total exactly.

    The largest remainders are rounded up; equal remainders in order of position.

    Args:
        exact: [rows], none negative, by step summing to its total but for the floats' own rounding.
        totals_ns: [steps], what they must sum to.
        sizes: [steps], rows of each, at least one.
    """
    whole, first = exact.astype(np.int64), np.cumsum(sizes) - sizes
    missing = totals_ns - np.add.reduceat(whole, first)
    is_short = missing >= sizes
    if is_short.any():
        whole += np.repeat(np.where(is_short, missing // sizes, 0), sizes)
        missing = np.where(is_short, missing % sizes, missing)
    grid = Grid(sizes)
    laid = grid.lay(whole - exact, math.inf)
    # The `missing` smallest by step; of equals the first. Sorting values is several times as fast
    # as sorting positions, and here it is done once for many steps.
    up_to = np.sort(laid, axis=1)[np.arange(len(sizes)), np.maximum(missing - 1, 0)]
    up_to[missing <= 0] = -math.inf
    is_up = laid <= up_to[:, None]
    extra = np.add.reduce(is_up, axis=1) - np.maximum(missing, 0)
    for step in np.flatnonzero(extra > 0).tolist():
        equals = np.flatnonzero(laid[step] == up_to[step])
        is_up[step, equals[len(equals) - extra.item(step) :]] = False
    whole += grid.pick(is_up.reshape(-1))
    for step in np.flatnonzero(missing < 0).tolist():  # a total too large for a float to be exact
        at = slice(first.item(step), first.item(step) + sizes.item(step))
        of_step = whole[at]
        falling = (of_step - exact[at]).argsort(kind="stable")[::-1]
        of_step[falling[of_step[falling] > 0][: -missing.item(step)]] -= 1
    return whole
