"""Blame weights of a step's members: how much shorter the step would have been without each.

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

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from inferscope.attribution.rules import marginal
from inferscope.attribution.split import fair
from inferscope.cost.alone import alone
from inferscope.cost.batch import Batch, Line, Team
from inferscope.cost.model import StepModel

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Marginals(NamedTuple):
    """Marginal times of a step's members, in the model's nanoseconds; none is negative."""

    step_ns: Floats
    """T(S) - T(S - i): [members]."""
    class_ns: Floats
    """T(D) - T(D - i), D being the members of the same class, prefills or decodes: [members]."""


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


def marginals(model: StepModel, batch: Batch, own: Line, prefills: list[int]) -> Marginals:
    """Return how much shorter a step, and its class alone, would have been without each member.

    Args:
        model: the cost model in force.
        batch: the members.
        own: their attention, as `model.own` gives it.
        prefills: positions of the members that prefill; the others decode.
    """
    step_ns = _marginal_ns(model, batch, own)
    class_ns = step_ns
    if 0 < len(prefills) < len(step_ns):
        class_ns = np.empty(len(step_ns))
        for members in _classes(len(step_ns), prefills):
            part = _part(batch, members)
            class_ns[members] = _marginal_ns(model, part, model.own(part))
    return Marginals(step_ns, class_ns)


def blame_weights(model: StepModel, batch: Batch, own: Line, prefills: list[int]) -> BlameWeights:
    """Return the weights of a step's members in the waits of others.

    Args:
        model: the cost model in force.
        batch: the members.
        own: their attention, as `model.own` gives it.
        prefills: positions of the members that prefill; the others decode.
    """
    step_ns = _marginal_ns(model, batch, own)
    shares = fair(model, batch, own)
    shares_ns, whole_ns = shares.values(batch), shares.total(batch)
    queue = _completed(step_ns, shares_ns, whole_ns)
    if not 0 < len(prefills) < len(step_ns):
        co_batched = _co_batched(model, batch, own, step_ns, shares_ns, whole_ns)
        return BlameWeights(queue, np.zeros(len(step_ns)), co_batched)
    interference, co_batched = np.empty(len(step_ns)), np.empty(len(step_ns))
    classes = _classes(len(step_ns), prefills)
    for members, others in (classes, classes[::-1]):
        part = _part(batch, members)
        part_own = model.own(part)
        part_shares = fair(model, part, part_own)
        part_ns = part_shares.total(part)
        co_batched[members] = _co_batched(
            model, part, part_own, _marginal_ns(model, part, part_own),
            part_shares.values(part), part_ns,
        )  # fmt: skip
        interference[others] = _completed(step_ns[others], shares_ns[others], whole_ns - part_ns)
    return BlameWeights(queue, interference, co_batched)


def _marginal_ns(model: StepModel, batch: Batch, own: Line) -> Floats:
    saved: Floats = np.maximum(marginal(model, batch, own).values(batch), 0.0)
    return saved


def _classes(num: int, prefills: list[int]) -> tuple[Ints, Ints]:
    is_decode = np.ones(num, dtype=np.bool_)
    is_decode[prefills] = False
    return np.asarray(prefills), is_decode.nonzero()[0]


def _part(batch: Batch, members: Ints) -> Batch:
    """Return the step with these members only."""
    team = batch.team
    if team.rows is not None:
        rows = team.rows[members]
    else:
        sampled = np.ones(len(team.tokens), dtype=np.int64)
        sampled[team.chunks] = team.chunk_rows
        rows = sampled[members]
    return Batch(Team(team.tokens[members], rows), batch.context[members])


def _completed(marginal_ns: Floats, shares_ns: Floats, waited_ns: float) -> Floats:
    """Return weights that sum to a wait, as close to the marginal times as the module says."""
    rest_ns = waited_ns - float(marginal_ns.sum())
    if rest_ns < 0.0:
        return _lowered(marginal_ns, waited_ns)
    excess_ns = np.maximum(shares_ns - marginal_ns, 0.0)
    whole_ns = float(excess_ns.sum())
    if whole_ns <= 0.0:
        excess_ns, whole_ns = np.ones(len(marginal_ns)), float(len(marginal_ns))
    completed: Floats = marginal_ns + excess_ns * (rest_ns / whole_ns)
    return completed


def _lowered(marginal_ns: Floats, waited_ns: float) -> Floats:
    """Lower all marginal times by one amount, none below 0, to sum to a wait (or to little)."""
    falling = np.sort(marginal_ns)[::-1]
    lower_by = (np.cumsum(falling) - max(waited_ns, 0.0)) / np.arange(1, len(falling) + 1)
    # Those that stay above 0 are the longest run whose smallest exceeds the amount for that run.
    last = int(np.flatnonzero(falling >= lower_by)[-1])
    lowered: Floats = np.maximum(marginal_ns - lower_by[last], 0.0)
    return lowered if lowered.any() else marginal_ns


def _co_batched(
    model: StepModel,
    batch: Batch,
    own: Line,
    marginal_ns: Floats,
    shares_ns: Floats,
    whole_ns: float,
) -> Floats:
    """Return the weights within one class: of the waits, the longest is completed."""
    alone_ns = alone(model, batch, own).values(batch)
    shortest = int(alone_ns.argmin())
    waited_ns = whole_ns - alone_ns.item(shortest) + marginal_ns.item(shortest)
    return _completed(marginal_ns, shares_ns, waited_ns)
