"""Blame weights of steps' members: how much shorter each step would have been without each.

A share is what a member costs, and it holds a part of what the step costs however few are in it.
Blame asks another question: whose absence would have shortened the wait? Three waits end with a
step, each with its own game of the cost model:

    queue          a request outside waits for the whole step     T(S)
    interference   a member waits for the members of the other class, D being its own
                                                                  T(S) - T(D)
    co_batched     a member j waits for the others of its class   T(D) - T({j})

A member i answers for its marginal time, T(S) - T(S - i) or T(D) - T(D - i): exactly what would
have been saved. These need not sum to the wait:

    less   The step is cheaper together, so part of the wait remains whichever one is absent (a
           staircase f can make every marginal 0). The rest is divided by how much each Shapley
           share exceeds its marginal time; where all marginals are 0, the weights are the shares.
    more   Several cause the same part, each by joining the others (padding to the longest does
           so). All weights are lowered by one amount, none below 0: of all weights that sum to
           the wait, these have the smallest largest difference from the marginal times.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from inferscope.attribution.counterfactual import alone_ns
from inferscope.attribution.split import Priced, parts_ns
from inferscope.cost import Grid, StepTable, look_up

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


class BlameWeights(NamedTuple):
    """Weights of a step's members in what others wait for them, in the model's nanoseconds.

    Compare weights within one wait only: all members' for the queue, one class's for the others.
    None is negative, and those of one wait are not all 0 unless the model knows no cost.
    """

    queue: Floats
    """[members], to requests outside that wait for this step."""
    interference: Floats
    """[members], to the members of the other class."""
    co_batched: Floats
    """[members], to the other members of the same class."""


def marginal_ns(priced: Priced) -> Floats:
    """Return T(S) - T(S - i), not below 0: [members]."""
    model, table = priced.model, priced.table
    step, num_rows = table.step_of, table.num_rows
    f_ns = look_up(model.f_ns, table.num_tokens)
    g_ns = look_up(model.g_ns, num_rows)
    of_one = f_ns - look_up(model.f_ns, table.num_tokens - 1)
    of_one += np.where(table.num_single == 1, model.decoding_ns, 0.0)
    saved = model.single_ns * table.visible + of_one[step]
    if model.padded_ns:
        saved += model.padded_ns * _padding_saved(table)
    if len(table.chunks):
        of = table.chunk_step
        rest = look_up(model.f_ns, table.num_tokens[of] - table.chunk_tokens)
        saved[table.chunks] = priced.attention_ns + (f_ns[of] - rest)
    saved += g_ns[step] - look_up(model.g_ns, num_rows[step] - table.sampled)
    return np.maximum(saved, 0.0)


def _padding_saved(table: StepTable) -> Floats:
    """Return by how much the padding shrinks without each single: [members]."""
    saved = table.longest[table.step_of].astype(np.float64)
    longest = _first_where(table, table.visible == table.longest[table.step_of])
    others = table.visible.copy()
    others[longest] = 0
    fewer = np.maximum(table.num_single - 1, 0)
    saved[longest] += fewer * (table.longest - np.maximum.reduceat(others, table.first))
    return saved


def blame_weights(priced: Priced) -> BlameWeights:
    """Return the weights of each step's members in the waits of others: [members] each."""
    table = priced.table
    step_ns, shares_ns = marginal_ns(priced), parts_ns(priced)
    queue = _completed(table, step_ns, shares_ns, priced.modelled_ns)
    classes = priced.classes
    co_batched = interference = np.zeros(len(step_ns))
    if classes is None or len(classes.mixed) < len(table):  # right where there is one class
        co_batched = _co_batched(priced, step_ns, shares_ns)
    if classes is None:
        return BlameWeights(queue, interference, co_batched)
    at, part = classes.at, classes.priced
    co_batched, interference = co_batched.copy(), interference.copy()
    co_batched[at] = _co_batched(part, marginal_ns(part), parts_ns(part))
    # T(S) less what the other class of the step takes.
    of_classes = part.modelled_ns.reshape(2, -1)[::-1]
    waited_ns = (priced.modelled_ns[classes.mixed] - of_classes).reshape(-1)
    interference[at] = _completed(part.table, step_ns[at], shares_ns[at], waited_ns)
    return BlameWeights(queue, interference, co_batched)


def _co_batched(priced: Priced, marginals: Floats, shares_ns: Floats) -> Floats:
    """Return the weights within one class, of which the table has nothing else."""
    table, alone = priced.table, alone_ns(priced)
    least = np.minimum.reduceat(alone, table.first)
    shortest = _first_where(table, alone == least[table.step_of])
    waited_ns = priced.modelled_ns - alone[shortest] + marginals[shortest]
    return _completed(table, marginals, shares_ns, waited_ns)


def _first_where(table: StepTable, is_it: Bools) -> Ints:
    """Return the first member of each step of which something holds: [steps], some in each."""
    found = np.flatnonzero(is_it)[::-1]
    first: Ints = np.empty(len(table), dtype=np.int64)
    first[table.step_of[found]] = found
    return first


def _completed(table: StepTable, marginals: Floats, shares_ns: Floats, waited_ns: Floats) -> Floats:
    """Return weights that sum to each step's wait; as close to the marginal times as can be."""
    step, first = table.step_of, table.first
    rest_ns = waited_ns - np.add.reduceat(marginals, first)
    excess_ns = np.maximum(shares_ns - marginals, 0.0)
    whole_ns = np.add.reduceat(excess_ns, first)
    none = whole_ns <= 0.0
    if none.any():
        excess_ns = np.where(none[step], 1.0, excess_ns)
        whole_ns = np.where(none, table.sizes, whole_ns)
    weights = marginals + excess_ns * (np.maximum(rest_ns, 0.0) / whole_ns)[step]
    is_more = rest_ns < 0.0
    if is_more.any():
        members = np.flatnonzero(is_more[step])
        weights[members] = _lowered(marginals[members], waited_ns[is_more], table.sizes[is_more])
    return weights


def _lowered(marginals: Floats, waited_ns: Floats, sizes: Ints) -> Floats:
    """Lower each step's marginal times by one amount, none below 0, to sum to its wait."""
    grid = Grid(sizes)
    falling = -np.sort(grid.lay(-marginals, math.inf), axis=1)
    is_member = np.arange(grid.width) < sizes[:, None]
    falling[~is_member] = 0.0
    sums = np.add.accumulate(falling, axis=1) - np.maximum(waited_ns, 0.0)[:, None]
    lower_by = sums / np.arange(1, grid.width + 1)
    stays = (falling >= lower_by) & is_member
    last = grid.width - 1 - stays[:, ::-1].argmax(axis=1)
    amount = lower_by[np.arange(len(sizes)), last]
    lowered = np.maximum(marginals - np.repeat(amount, sizes), 0.0)
    is_any = np.add.reduceat(lowered, np.cumsum(sizes) - sizes) > 0
    return np.where(np.repeat(is_any, sizes), lowered, marginals)
