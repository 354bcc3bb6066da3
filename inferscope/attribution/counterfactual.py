"""Inside a step: how much of its delay each member owes to whom, by nested counterfactuals.

A cost share says who should pay for a step; it does not say how long anybody waited, for every
member waited for all of it. The delay is explained by asking how long the step would have taken
with fewer members:

    own           T({i})              the member alone
    co_batched    T(class) - T({i})   with the others of its class: all decodes, or all prefills
    interference  T(S) - T(class)     with the other class as well
    excess        measured - T(S)     what the model of a healthy step cannot explain, if positive

T is the model scaled to healthy steps. If the step was faster than that, the first three scale
down together. What a member takes alone is bounded by measured steps (`cost.pure_steps`). What the
model says beyond that is taken from `own` and from its class. So it falls to the members that no
measured step shows to be short, and to the excess if there are none. The excess is booked as
`slowdown`, or as `cold_start` in a step that was the first of its shape; a member's own part that
recomputes lost tokens as `recompute`.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from inferscope.cost.alone import alone
from inferscope.cost.batch import Batch, Line, Team
from inferscope.cost.model import StepModel
from inferscope.cost.pure_steps import TOLERANCE, Bounds

Ints = NDArray[np.int64]


class Delay(msgspec.Struct, frozen=True, gc=False):
    """A step's delay, by member; every member's parts sum to the whole delay."""

    own_ns: Ints
    """[members], recomputed tokens left out."""
    recompute_ns: Ints | None
    """[members]; None where nothing is recomputed."""
    prefills: list[int]
    """Positions of the members that prefill; the others decode."""
    prefill_class_ns: int
    """What the step would have taken with the prefills only; likewise the decodes."""
    decode_class_ns: int
    explained_ns: int
    """What the model of a healthy step explains of it."""
    excess_ns: int
    """The rest."""
    bounded_ns: int = 0
    """Part of the delay that measured steps took off what the model says of one member alone."""

    @property
    def prefill_interference_ns(self) -> int:
        """Return what each prefill waits for the decodes."""
        return self.explained_ns - self.prefill_class_ns

    @property
    def decode_interference_ns(self) -> int:
        """Return what each decode waits for the prefills."""
        return self.explained_ns - self.decode_class_ns

    def co_batched_ns(self) -> Ints:
        """Return what each member waits for the others of its class: [members]."""
        co_batched: Ints = self.decode_class_ns - self.own_ns
        if self.prefills:
            co_batched[self.prefills] += self.prefill_class_ns - self.decode_class_ns
        if self.recompute_ns is not None:
            co_batched -= self.recompute_ns
        return co_batched


def explain(
    model: StepModel,
    batch: Batch,
    own: Line,
    *,
    modelled_ns: float,
    prefills: list[int],
    recomputed: Ints | None,
    delay_ns: int,
    healthy_ratio: float,
    bounds: Bounds | None = None,
) -> Delay:
    """Explain a step's delay to each of its members.

    Args:
        model: the cost model of the mode in which the step ran.
        batch: the members.
        own: their attention, as `model.own` gives it.
        modelled_ns: T(S), unscaled.
        prefills: positions of the members that prefill.
        recomputed: [members], tokens lost to a preemption; None where there are none.
        delay_ns: from the earliest start to the latest end over all ranks.
        healthy_ratio: measured over modelled time of a healthy step in this mode.
        bounds: from measured steps; None where the model needs none.
    """
    whole = modelled_ns or 1.0
    explained_ns = min(delay_ns, round(healthy_ratio * whole))
    bounded_ns = 0
    if bounds is not None and explained_ns > bounds.step_ns:
        bounded_ns = explained_ns - round(bounds.step_ns)
        explained_ns -= bounded_ns
    scale = explained_ns / whole
    by_itself = alone(model, batch, own)
    own_ns = by_itself.values(batch, scale).astype(np.int64)
    beyond_ns: Ints | None = None
    if bounds is not None:
        is_beyond = own_ns > TOLERANCE * bounds.own_ns
        if is_beyond.any():
            beyond_ns = np.where(is_beyond, own_ns - np.where(is_beyond, bounds.own_ns, 0.0), 0.0)
            beyond_ns = beyond_ns.astype(np.int64)
            own_ns -= beyond_ns
            bounded_ns += int(beyond_ns.max())
    prefill_ns = decode_ns = explained_ns
    of_them: list[int] = []
    if prefills:
        of_prefills, of_decodes = _class_ns(model, batch, own, prefills)
        if of_prefills:
            prefill_ns = min(explained_ns, round(of_prefills * scale))
        if of_decodes:
            decode_ns = min(explained_ns, round(of_decodes * scale))
        if beyond_ns is not None and of_prefills and of_decodes:
            prefill_ns, decode_ns = _bounded(own_ns, beyond_ns, prefills, prefill_ns, decode_ns)
        of_them = [min(own_ns.item(at), prefill_ns) for at in prefills]
    np.minimum(own_ns, decode_ns, out=own_ns)
    if prefills:
        for at, mine_ns in zip(prefills, of_them, strict=True):
            own_ns[at] = mine_ns
    again: Ints | None = None
    if recomputed is not None:
        again = (own_ns * (recomputed / batch.team.tokens)).astype(np.int64)
        own_ns -= again
    return Delay(
        own_ns,
        again,
        prefills,
        prefill_ns,
        decode_ns,
        explained_ns,
        delay_ns - explained_ns,
        bounded_ns,
    )


def _bounded(
    own_ns: Ints, beyond_ns: Ints, prefills: list[int], prefill_ns: int, decode_ns: int
) -> tuple[int, int]:
    """Return the times of both classes, at most their members' one after the other.

    A class of which no member exceeded its bound stays as the model has it.
    """
    whole_ns, all_beyond_ns = int(own_ns.sum()), int(beyond_ns.sum())
    of_prefills_ns, prefills_beyond_ns = int(own_ns[prefills].sum()), int(beyond_ns[prefills].sum())
    if prefills_beyond_ns:
        prefill_ns = min(prefill_ns, of_prefills_ns)
    if all_beyond_ns > prefills_beyond_ns:
        decode_ns = min(decode_ns, whole_ns - of_prefills_ns)
    return prefill_ns, decode_ns


def _class_ns(
    model: StepModel, batch: Batch, own: Line, prefills: list[int]
) -> tuple[float, float]:
    """Return what the step would have taken with its prefills only, and with its decodes only."""
    team = batch.team
    if prefills == team.chunks:
        prefills_ns, others_ns = _classes_alone(model, team)
        visible, longest = batch.single_visible, batch.longest_single
        of_singles = _singles_ns(model, team.num_single, visible, longest)
        return prefills_ns + sum(own.chunks), others_ns + of_singles
    tokens = rows = 0
    of_prefills = 0.0
    singles: list[int] = []
    for at in prefills:
        tokens += team.tokens.item(at)
        rows += team.rows_of(at)
        if team.tokens.item(at) == 1:
            singles.append(at)
        else:
            of_prefills += own.one(batch, at)
    of_decodes = max(0.0, sum(own.chunks) - of_prefills)
    visible, longest = batch.single_visible, batch.longest_single
    if singles:  # all of a prompt but its last token was cached
        theirs = [batch.context.item(at) + 1 for at in singles]
        of_prefills += _singles_ns(model, len(singles), sum(theirs), max(theirs))
        visible -= sum(theirs)
        if max(theirs) == longest:
            of_others = batch.context.copy()
            of_others[[*singles, *team.chunks]] = -1
            longest = int(np.maximum.reduce(of_others)) + 1
    of_decodes += _singles_ns(model, team.num_single - len(singles), visible, longest)
    others = team.num_tokens - tokens
    return (
        model.f(tokens) + model.g(rows) + of_prefills,
        model.f(others) + model.g(team.num_rows - rows) + of_decodes if others else 0.0,
    )


def _classes_alone(model: StepModel, team: Team) -> tuple[float, float]:
    """Return f and g of the chunks only, and of the others only."""
    tokens, rows = sum(team.chunk_tokens), sum(team.chunk_rows)
    of_others = 0.0
    if team.num_single:
        of_others = model.f(team.num_single) + model.g(team.num_rows - rows)
    return model.f(tokens) + model.g(rows), of_others


def _singles_ns(model: StepModel, num: int, visible: int, longest: int) -> float:
    """Return what the attention of so many requests with one token takes.

    Args:
        model: the cost model in force.
        num: of them.
        visible: tokens of all together.
        longest: the most that one of them has.
    """
    if not num:
        return 0.0
    return model.decoding_ns + model.single_ns * visible + model.padded_ns * num * longest
