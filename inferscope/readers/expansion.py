"""Expansion of ring records for the fold: a `StepSame` becomes the records that it stands for.

    StepSlices 7        kept, with its frame's number      StepSlices 7
    StepSame 8      ──► base is slices 7, contexts + 1 ──► Emitted 7, StepPlan 8, StepSlices 8

It runs directly before the fold, so recordings keep the original frames. Unchanged columns are the
same objects in every step, by which the fold finds the rows that it has read. If the base's frame
is not the one that a StepSame refers to, that frame was lost: the step has a plan and no slices,
and the fold counts it as `unjoined` after its execution.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from inferscope.records import (
    BINDINGS,
    COLUMNS,
    Emitted,
    Record,
    StepPlan,
    StepSame,
    StepSlices,
)

_MOST_RINGS = 4096
"""Most rings whose last slices are kept."""
_MOST_STEPS = 1 << 20
"""Most steps between a step and its base; more means damage."""
_LONGEST_NS = 1 << 62


class _Base:
    """Last StepSlices of a ring."""

    __slots__ = ("contexts", "is_plain", "sequence", "slices")

    def __init__(self, sequence: int, slices: StepSlices) -> None:
        self.sequence = sequence
        self.slices = slices
        self.contexts: NDArray[np.uint32] | None = None
        """Contexts of its rows; None until the first step that repeats it."""
        self.is_plain = True


class Expansion:
    """Expander of the records of any number of rings."""

    def __init__(self) -> None:
        self._bases: dict[int, _Base] = {}
        """Bases by ring number, least recently updated first."""

    def of(self, ring: int, sequence: int, record: Record) -> Sequence[Record]:
        """Return the records that a ring's record stands for: itself, unless it is a StepSame.

        Args:
            ring: number of the ring.
            sequence: number of the record's frame.
            record: record of the ring, in the ring's order.
        """
        kind = type(record)
        if kind is StepSlices:
            bases = self._bases
            bases.pop(ring, None)
            bases[ring] = _Base(sequence, record)  # type: ignore[arg-type]  # by its exact type
            if len(bases) > _MOST_RINGS:
                del bases[next(iter(bases))]
        elif kind is StepSame:
            return self._expand(ring, sequence, record)  # type: ignore[arg-type]  # likewise
        return (record,)

    def _expand(self, ring: int, sequence: int, same: StepSame) -> Sequence[Record]:
        t_ns, step, start_ns = same.t_ns, same.step, same.start_ns
        plan = StepPlan(
            t_ns,
            step,
            start_ns,
            start_ns + same.took_ns if 0 <= same.took_ns < _LONGEST_NS else start_ns,
            same.waiting,
            same.running,
            same.blocks_used,
            same.blocks_cached,
            same.blocks_total,
            b"",
            BINDINGS[same.binding] if 0 <= same.binding < len(BINDINGS) else "none",
        )
        base = self._bases.get(ring)
        if base is None or base.sequence != sequence - same.frames_back:
            return (plan,)
        full = base.slices
        num_steps = step - full.step
        if base.contexts is None:
            base.is_plain = full.is_plain_decode
            base.contexts = np.frombuffer(full.contexts if base.is_plain else b"", _CONTEXTS)
        if not base.is_plain or not 0 < num_steps <= _MOST_STEPS:
            return (plan,)
        slices = StepSlices(
            t_ns,
            step,
            full.digest,
            full.requests,
            full.phases,
            full.tokens,
            (base.contexts + np.uint32(num_steps)).tobytes(),
            full.flags,
            full.sampled,
        )
        if not 0 < same.emitted_back <= step:
            return plan, slices
        left_ns = start_ns - same.emitted_before_ns
        emitted = Emitted(t_ns, full.requests, full.tokens, step - same.emitted_back, left_ns)
        return emitted, plan, slices


_CONTEXTS = np.dtype(COLUMNS["contexts"])
