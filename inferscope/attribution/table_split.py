"""Price, split and explain many steps at once: the same numbers as step by step.

    price(model, table)             T(S) and the fair parts of every member
    shares_ns(priced, busy_ns)      whole nanoseconds by row, for one rank's time of each step
    delays(priced, delay_ns, ...)   own, class and excess time of every member

The results equal those of `split.fair`, `rules.scaled_ns` and `counterfactual.explain` to the
nanosecond, because every number is made by the same operations in the same order; where an
operation has no such form over columns (several chunks in one step), the function for one step is
called, once for each make-up.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from inferscope.attribution.split import NOTHING_NS, round_ns, split_f, to_whole_ns
from inferscope.attribution.step_table import Grid, StepTable
from inferscope.cost.model import StepModel, look_up
from inferscope.cost.pure_steps import TOLERANCE

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


class Priced(NamedTuple):
    """Steps with what a model says of them, in its nanoseconds."""

    model: StepModel
    table: StepTable
    modelled_ns: Floats
    """[steps], T(S)."""
    slope_ns: Floats
    """[steps], a single's part per visible token."""
    level_ns: Floats
    """[members], its part beside; of chunks it says nothing."""
    chunk_ns: Floats
    """[chunks], their whole parts."""
    attention_ns: Floats
    """[chunks], of these their own attention."""


class Delays(NamedTuple):
    """The delay of steps by member, as `counterfactual.Delay` has it of one step."""

    own_ns: Ints
    """[members], recomputed tokens left out."""
    recompute_ns: Ints | None
    """[members]; None where nothing is recomputed."""
    prefill_class_ns: Ints
    """[steps]."""
    decode_class_ns: Ints
    """[steps]."""
    explained_ns: Ints
    """[steps]."""
    excess_ns: Ints
    """[steps]."""
    bounded_ns: Ints
    """[steps]."""


class TableBounds(NamedTuple):
    """Bounds from measured steps, as `cost.pure_steps.Bounds` of one step; infinite where none."""

    step_ns: Floats
    """[steps]."""
    own_ns: Floats
    """[members]."""


def price(model: StepModel, table: StepTable) -> Priced:
    """Return T(S) of each step and the fair parts of its members."""
    num_single, num_tokens = table.num_single, table.num_tokens
    model.reach(max(int(num_tokens.max()), int(table.num_rows.max())))
    # Attention.
    slope = np.full(len(table), model.single_ns)
    if model.padded_ns:
        slope += model.padded_ns * (num_single * table.longest) / np.maximum(table.sum_visible, 1)
    attention = (
        model.chunk_ns + model.pair_ns * table.chunk_pairs + model.context_ns * table.chunk_visible
    )
    # What all share.
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
        is_padded = num_single > 1
        slope[is_padded] = model.single_ns + model.padded_ns
        beyond = _beyond_own(table) * model.padded_ns
        level_ns = np.where(is_padded[table.step_of], beyond + level_ns, level_ns)
        more = model.padded_ns * (num_single * table.longest - table.sum_visible)
        levels = np.where(is_padded, more + levels, levels)
    modelled_ns = slope * table.sum_visible + levels + table.by_step(chunk_ns)
    return Priced(model, table, modelled_ns, slope, level_ns, chunk_ns, attention)


def parts_ns(priced: Priced) -> Floats:
    """Return the fair parts in the model's nanoseconds: [members]."""
    ones = np.ones(len(priced.table))
    return _values(priced.table, priced.slope_ns, priced.level_ns, priced.chunk_ns, ones)


def padding_ns(priced: Priced, measured_ns: Ints, padded_tokens: Ints) -> Ints:
    """Return what padding to a number of tokens takes of each step's time.

    Args:
        priced: the steps.
        measured_ns: [steps], a rank's time.
        padded_tokens: [steps], computed; 0 where nothing is padded.
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
    exact = _values(table, priced.slope_ns, priced.level_ns, priced.chunk_ns, scale)
    sizes, rows = table.sizes, table.rows
    if rows is not None:
        sizes, is_cut = rows.sizes, rows.sizes != table.sizes
        per_token = exact / table.tokens
        by_tokens = per_token[rows.member] * rows.tokens
        exact = np.where(np.repeat(is_cut, sizes), by_tokens, exact[rows.member])
    first = np.cumsum(sizes) - sizes
    if not is_known.all():
        exact = np.where(np.repeat(is_known, sizes), exact, 0.0)
    whole = _round(exact, busy_ns, sizes, first, is_known)
    for step in np.flatnonzero(~is_known).tolist():
        start, num = first.item(step), sizes.item(step)
        whole[start : start + num] = to_whole_ns(np.ones(num), busy_ns.item(step))
    return whole


def delays(
    priced: Priced, delay_ns: Ints, healthy_ratio: Floats, bounds: TableBounds | None = None
) -> Delays:
    """Explain the steps' delays to each of their members.

    Args:
        priced: the steps.
        delay_ns: [steps], from the earliest start to the latest end over all ranks.
        healthy_ratio: [steps], measured over modelled time of a healthy step then.
        bounds: from measured steps; None where the model needs none.
    """
    table = priced.table
    modelled = np.where(priced.modelled_ns == 0, 1.0, priced.modelled_ns)
    explained = np.minimum(delay_ns, np.rint(healthy_ratio * modelled)).astype(np.int64)
    bounded = np.zeros(len(table), dtype=np.int64)
    if bounds is not None:
        is_over = explained > bounds.step_ns
        most = np.rint(np.where(is_over, bounds.step_ns, 0.0)).astype(np.int64)
        bounded = np.where(is_over, explained - most, 0)
        explained -= bounded
    scale = explained / modelled
    own_ns = alone_ns(priced, scale).astype(np.int64)
    beyond: Ints | None = None
    if bounds is not None:
        beyond = _beyond_bounds(own_ns, bounds.own_ns)
        own_ns -= beyond
        bounded += np.maximum.reduceat(beyond, table.first)
    prefill_class, decode_class = explained.copy(), explained.copy()
    if len(table.prefills):
        of_prefills, of_decodes = _classes(priced)
        for of_class, class_ns in ((of_prefills, prefill_class), (of_decodes, decode_class)):
            bound = np.minimum(explained, np.rint(of_class * scale)).astype(np.int64)
            class_ns[:] = np.where(of_class > 0, bound, explained)
        if beyond is not None:
            has_both = (of_prefills > 0) & (of_decodes > 0)
            for is_of_class, class_ns in (
                (table.is_prefill, prefill_class),
                (~table.is_prefill, decode_class),
            ):
                is_bounded = np.add.reduceat(np.where(is_of_class, beyond, 0), table.first) > 0
                all_alone = np.add.reduceat(np.where(is_of_class, own_ns, 0), table.first)
                is_less = is_bounded & has_both & (all_alone < class_ns)
                class_ns[is_less] = all_alone[is_less]
    class_of = decode_class[table.step_of]
    class_of[table.prefills] = prefill_class[table.step_of[table.prefills]]
    np.minimum(own_ns, class_of, out=own_ns)
    again: Ints | None = None
    if table.recomputed is not None:
        again = (own_ns * (table.recomputed / table.tokens)).astype(np.int64)
        own_ns -= again
    return Delays(
        own_ns, again, prefill_class, decode_class, explained, delay_ns - explained, bounded
    )


def _beyond_bounds(own_ns: Ints, most_ns: Floats) -> Ints:
    """Return by how much each member's own time exceeds its bound, where by much: [members]."""
    is_beyond = own_ns > TOLERANCE * most_ns
    beyond = np.where(is_beyond, own_ns - np.where(is_beyond, most_ns, 0.0), 0.0)
    return beyond.astype(np.int64)


# --- parts ----------------------------------------------------------------------------------------


def _shared(model: StepModel, table: StepTable) -> tuple[Floats, Floats]:
    """Return each chunk's part of f, and by step each single's."""
    num_single, f_sum = table.num_single, model.f_sum
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
        alone = num_single[step] + 1
        with_it = f_sum[tokens + alone] - f_sum[tokens]
        part = np.maximum(0.0, (with_it - (f_sum[alone] - f_sum[0])) / alone)
        of_chunks[one] = np.where(alone == 1, whole[step], part)
        rest = (whole[step] - of_chunks[one]) / np.maximum(num_single[step], 1)
        of_single[step] = np.where(alone == 1, 0.0, np.maximum(0.0, rest))
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


def _beyond_own(table: StepTable) -> Floats:
    """Return what each single pays for padding beyond its own visible tokens; see `padding`."""
    grid = Grid(table.sizes)
    is_single = table.visible > 0
    laid = grid.lay(np.where(is_single, table.visible, math.inf), math.inf)
    order = grid.positions(laid.argsort(axis=1))  # of equals, all pay the same
    ordered = laid.reshape(-1)[order]
    num = table.num_single[:, None]
    longer = num - np.arange(1, grid.width)
    is_level = longer > 0
    longer = np.where(is_level, longer, 1).astype(np.float64)
    ordered[:, 1:][~is_level] = 0.0  # chunks and cells beyond the step
    levels = np.where(is_level, ordered[:, 1:] - ordered[:, :-1], 0.0)
    prices = np.zeros_like(ordered)
    if grid.width > 1:
        prices[:, 0] = np.add.accumulate(levels * (longer / (longer + 1)), axis=1)[:, -1]
    prices[:, 1:] = levels * (num / (longer * (longer + 1)) - 1)
    beyond = np.zeros(order.size)
    beyond[order] = np.add.accumulate(prices, axis=1)
    return np.where(is_single, grid.pick(beyond), 0.0)


def _values(
    table: StepTable, slope: Floats, level: Floats, chunk_ns: Floats, scale: Floats
) -> Floats:
    """Return a line's values, scaled, by member; see `cost.batch.Line`."""
    values = table.context * (slope * scale)[table.step_of]
    values += (slope[table.step_of] + level) * scale[table.step_of]
    if len(table.chunks):
        values[table.chunks] = chunk_ns * scale[table.chunk_step]
    return values


# --- whole nanoseconds ----------------------------------------------------------------------------


def _round(exact: Floats, totals: Ints, sizes: Ints, first: Ints, is_known: Bools) -> Ints:
    """Round parts to integers that sum to their step's total; see `split.round_ns`."""
    whole = exact.astype(np.int64)
    missing = np.where(is_known, totals - np.add.reduceat(whole, first), 0)
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
    for step in np.flatnonzero(missing < 0).tolist():
        at = slice(first.item(step), first.item(step) + sizes.item(step))
        whole[at] = round_ns(exact[at], totals.item(step))
    return whole


# --- delay ----------------------------------------------------------------------------------------


def alone_ns(priced: Priced, scale: Floats | None = None) -> Floats:
    """Return what each member would take alone; see `cost.alone`.

    Args:
        priced: the steps.
        scale: [steps], of the model's nanoseconds; None for 1.
    """
    model, table = priced.model, priced.table
    scale = np.ones(len(table)) if scale is None else scale
    slope = np.full(len(table), model.single_ns + model.padded_ns)
    f_one = model.f(1) + model.decoding_ns
    level = f_one + look_up(model.g_ns, table.sampled)
    chunk_ns = priced.attention_ns
    if len(table.chunks):
        of_tokens = look_up(model.f_ns, table.chunk_tokens)
        chunk_ns = chunk_ns + (of_tokens + look_up(model.g_ns, table.sampled[table.chunks]))
    return _values(table, slope, level, chunk_ns, scale)


def _classes(priced: Priced) -> tuple[Floats, Floats]:
    """Return what each step would take with its prefills only, and with its decodes only."""
    model, table = priced.model, priced.table
    prefills, num = table.prefills, len(table)
    step = table.step_of[prefills]
    is_single = table.visible[prefills] > 0

    def sums(values: Ints | Bools) -> Ints:
        return np.bincount(step, values, minlength=num).astype(np.int64)

    tokens, rows = sums(table.tokens[prefills]), sums(table.sampled[prefills])
    num_single, visible = sums(is_single), sums(table.visible[prefills])
    longest: Ints = np.zeros(num, dtype=np.int64)
    longest_other = table.longest
    if is_single.any():
        np.maximum.at(longest, step, table.visible[prefills])
        of_others = np.where(table.is_prefill, 0, table.visible)
        longest_other = np.maximum.reduceat(of_others, table.first)
    is_prefill = table.is_prefill[table.chunks]
    of_chunks = np.where(is_prefill, priced.attention_ns, 0.0)
    of_prefills = table.by_step(of_chunks)
    of_decodes = np.maximum(0.0, table.by_step(priced.attention_ns) - of_prefills)
    of_prefills = of_prefills + _singles(model, num_single, visible, longest)
    of_decodes = of_decodes + _singles(
        model, table.num_single - num_single, table.sum_visible - visible, longest_other
    )
    others = table.num_tokens - tokens
    by_prefills = look_up(model.f_ns, tokens) + look_up(model.g_ns, rows) + of_prefills
    g_ns = look_up(model.g_ns, table.num_rows - rows)
    by_decodes = look_up(model.f_ns, others) + g_ns + of_decodes
    has_prefills = tokens > 0
    return (
        np.where(has_prefills, by_prefills, 0.0),
        np.where(has_prefills & (others > 0), by_decodes, 0.0),
    )


def _singles(model: StepModel, num: Ints, visible: Ints, longest: Ints) -> Floats:
    """Return what the attention of some singles takes; see `counterfactual`."""
    found = model.decoding_ns + model.single_ns * visible + model.padded_ns * num * longest
    return np.where(num > 0, found, 0.0)
