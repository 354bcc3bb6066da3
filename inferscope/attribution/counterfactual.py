"""Delay of each member of a step by cause, from nested counterfactuals.

A cost share says how to divide the cost of a step, not how long a member waited: every member
waited for all of it. The delay is explained by the predicted time of the step with fewer members:

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

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from inferscope.attribution.split import Priced, values_ns
from inferscope.cost import TOLERANCE, StepTable, cut_into_steps, look_up

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Delay(msgspec.Struct, frozen=True, gc=False):
    """Delay of a step by member; every member's parts sum to the whole delay."""

    own_ns: Ints
    """[members], own work in nanoseconds, without recomputed tokens."""
    recompute_ns: Ints | None
    """[members], recomputation in nanoseconds; None if nothing is recomputed."""
    prefills: list[int]
    """Positions of the members that prefill; the others decode."""
    prefill_class_ns: int
    """Predicted nanoseconds of the prefills alone; `decode_class_ns` is that of the decodes."""
    decode_class_ns: int
    explained_ns: int
    """Nanoseconds of the delay that the model of a healthy step explains."""
    excess_ns: int
    """Remaining nanoseconds of the delay."""
    bounded_ns: int = 0
    """Nanoseconds by which measured steps lowered the modelled time of one member alone."""

    @property
    def prefill_interference_ns(self) -> int:
        """Return how long each prefill waits for the decodes, in nanoseconds."""
        return self.explained_ns - self.prefill_class_ns

    @property
    def decode_interference_ns(self) -> int:
        """Return how long each decode waits for the prefills, in nanoseconds."""
        return self.explained_ns - self.decode_class_ns


class TableBounds(NamedTuple):
    """Bounds from measured steps, one `cost.pure_steps.Bounds` per step; infinite if unbounded."""

    step_ns: Floats
    """[steps], in nanoseconds."""
    own_ns: Floats
    """[members], in nanoseconds."""


def delays(
    priced: Priced, delay_ns: Ints, healthy_ratio: Floats, bounds: TableBounds | None = None
) -> list[Delay]:
    """Divide each step's delay by cause for each of its members.

    Args:
        priced: priced steps.
        delay_ns: [steps], time from the earliest start to the latest end over all ranks.
        healthy_ratio: [steps], measured over modelled time of a healthy step at that time.
        bounds: bounds from measured steps; None if the model needs none.
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
    if (classes := priced.classes) is not None:
        mixed = classes.mixed
        of_classes = priced.model.steps_ns(classes.priced.table).reshape(2, -1)
        for of_class, class_ns in zip(of_classes, (prefill_class, decode_class), strict=True):
            bound = np.rint(of_class * scale[mixed]).astype(np.int64)
            class_ns[mixed] = np.where(
                of_class > 0, np.minimum(explained[mixed], bound), explained[mixed]
            )
        if beyond is not None:
            has_both = np.zeros(len(table), dtype=np.bool_)
            has_both[mixed] = (of_classes > 0).all(axis=0)
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
    num_prefills = np.add.reduceat(table.is_prefill, table.first, dtype=np.int64)
    num_decodes = table.sizes - num_prefills
    num_alike = np.where(table.is_prefill, num_prefills[table.step_of], num_decodes[table.step_of])
    is_class = (num_alike == 1) & (True if beyond is None else beyond == 0)
    own_ns[is_class] = class_of[is_class]  # the same time, but not rounded alike
    again: Ints | None = None
    if table.recomputed is not None:
        again = (own_ns * (table.recomputed / table.tokens)).astype(np.int64)
        own_ns -= again
    own = cut_into_steps(own_ns, table.sizes)
    recompute_ns: Sequence[Ints | None] = [None] * len(own)
    if again is not None and table.recomputed is not None:
        lost = np.add.reduceat(table.recomputed, table.first).tolist()
        by_step = zip(lost, cut_into_steps(again, table.sizes), strict=True)
        recompute_ns = [of_step if tokens else None for tokens, of_step in by_step]
    numbers = (prefill_class, decode_class, explained, delay_ns - explained, bounded)
    columns = [column.tolist() for column in numbers]
    return list(map(Delay, own, recompute_ns, prefills_of(table), *columns))


def prefills_of(table: StepTable) -> list[list[int]]:
    """Return the positions of the members that prefill, by step."""
    found: list[list[int]] = [[] for _ in range(len(table))]
    of = table.step_of[table.prefills]
    for step, at in zip(of.tolist(), (table.prefills - table.first[of]).tolist(), strict=True):
        found[step].append(at)
    return found


def _beyond_bounds(own_ns: Ints, most_ns: Floats) -> Ints:
    """Return each member's own time above its bound, if beyond the tolerance: [members]."""
    is_beyond = own_ns > TOLERANCE * most_ns
    beyond = np.where(is_beyond, own_ns - np.where(is_beyond, most_ns, 0.0), 0.0)
    return beyond.astype(np.int64)


def alone_ns(priced: Priced, scale: Floats | None = None) -> Floats:
    """Return the modelled time of each member alone, without padding: [members].

    Args:
        priced: priced steps.
        scale: [steps], factor for the model's nanoseconds; None for 1.
    """
    model, table = priced.model, priced.table
    f_one = model.f(1) + model.decoding_ns
    level = f_one + look_up(model.g_ns, table.sampled)
    chunk_ns = priced.attention_ns
    if len(table.chunks):
        of_tokens = look_up(model.f_ns, table.chunk_tokens)
        chunk_ns = chunk_ns + (of_tokens + look_up(model.g_ns, table.sampled[table.chunks]))
    return values_ns(priced, level, chunk_ns, scale)
