"""Inside a step: how much of its delay each member owes to whom, by nested counterfactuals.

A cost share says who should pay for a step; it does not say how long anybody waited, for every
member waited for all of it. The delay is explained by asking how long the step would have taken
with fewer members:

    own           T({i})              the member alone
    co_batched    T(class) - T({i})   with the others of its class: all decodes, or all prefills
    interference  T(S) - T(class)     with the other class as well
    excess        measured - T(S)     what the model of a healthy step cannot explain, if positive

T is the model scaled to healthy steps. If the step was faster than that, the first three scale
down together. The excess is booked as `slowdown`, or as `cold_start` in a step that was the first
of its shape; a member's own part that recomputes lost tokens as `recompute`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from inferscope.cost.batch import Batch, Team
from inferscope.cost.model import StepModel

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]


class Delay(NamedTuple):
    """A step's delay, by member; every member's parts sum to the whole delay."""

    own_ns: Ints
    recompute_ns: Ints | None
    """None where nothing is recomputed."""
    co_batched_ns: Ints
    prefill_interference_ns: int
    """To each prefill, by the decodes."""
    decode_interference_ns: int
    """To each decode, by the prefills."""
    excess_ns: int


def explain(
    model: StepModel,
    batch: Batch,
    own_ns: Floats,
    *,
    modelled_ns: float,
    is_prefill: Flags | None,
    recomputed: Ints | None,
    delay_ns: int,
    healthy_ratio: float,
) -> Delay:
    """Explain a step's delay to each of its members.

    Args:
        model: the cost model of the mode in which the step ran.
        batch: the members.
        own_ns: [members], as `model.own_ns` gives it.
        modelled_ns: T(S), unscaled.
        is_prefill: [members]; None where all are decodes.
        recomputed: [members], tokens lost to a preemption; None where there are none.
        delay_ns: from the earliest start to the latest end over all ranks.
        healthy_ratio: measured over modelled time of a healthy step in this mode.
    """
    team = batch.team
    whole = modelled_ns or 1.0
    explained_ns = min(delay_ns, round(healthy_ratio * whole))
    scale = explained_ns / whole
    if team.alone is None or team.alone[0] is not model.key:
        team.alone = (model.key, _alone(model, team))
    alone = model.alone_ns(batch, own_ns) + team.alone[1]
    alone *= scale
    own = alone.astype(np.int64)
    prefill_ns = decode_ns = explained_ns
    if is_prefill is None:
        np.minimum(own, decode_ns, out=own)
        co_batched: Ints = decode_ns - own
    else:
        of_prefills, of_decodes = _class_ns(model, batch, own_ns, is_prefill)
        if of_prefills:
            prefill_ns = min(explained_ns, round(of_prefills * scale))
        if of_decodes:
            decode_ns = min(explained_ns, round(of_decodes * scale))
        of_class = np.full(len(own), decode_ns)
        of_class[is_prefill] = prefill_ns
        np.minimum(own, of_class, out=own)
        co_batched = of_class - own
    again: Ints | None = None
    if recomputed is not None:
        again = (own * (recomputed / team.tokens)).astype(np.int64)
        own = own - again
    return Delay(
        own,
        again,
        co_batched,
        explained_ns - prefill_ns,
        explained_ns - decode_ns,
        delay_ns - explained_ns,
    )


def _alone(model: StepModel, team: Team) -> float | Floats:
    """Return each member's f and g by itself; one number where all have the same."""
    f_one, g_one = model.f(1), model.g(1)
    has_plain_rows = team.num_rows == len(team.tokens)
    if has_plain_rows and not len(team.chunks):
        return f_one + g_one
    alone = np.full(len(team.tokens), f_one + g_one)
    for at in team.chunks.tolist():
        alone[at] += model.f(team.tokens.item(at)) - f_one
    if not has_plain_rows:
        alone += model.g_ns[team.sampled.clip(max=len(model.g_ns) - 1)] - g_one
    return alone


def _class_ns(
    model: StepModel, batch: Batch, own_ns: Floats, is_prefill: Flags
) -> tuple[float, float]:
    """Return what the step would have taken with its prefills only, and with its decodes only."""
    team = batch.team
    prefills = is_prefill.nonzero()[0].tolist()
    tokens = sum([team.tokens.item(at) for at in prefills])
    rows = sum([team.sampled.item(at) for at in prefills])
    own = sum([own_ns.item(at) for at in prefills])
    others_own = max(0.0, float(np.add.reduce(own_ns)) - own)
    others = team.num_tokens - tokens
    return (
        model.f(tokens) + model.g(rows) + own,
        model.f(others) + model.g(team.num_rows - rows) + others_own if others else 0.0,
    )
