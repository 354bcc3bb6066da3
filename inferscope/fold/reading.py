"""Mapping of a step's slices to the slots of their requests."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from inferscope.attribution import RUNNING
from inferscope.cost import pairs
from inferscope.fold.requests import RequestTable
from inferscope.fold.rings import RingState
from inferscope.records import COLUMNS, StepSlices

Ints = NDArray[np.int64]

MOST_INDEX = 0xFFFFFFFE
_MOST_PAIRS = 1 << 40
"""Most query-key pairs of a slice: a million tokens with half a million of context."""


def read(ring: RingState, slices: StepSlices, table: RequestTable) -> tuple[Ints, bool] | None:
    """Return the slots of a step's rows, and whether each row has a request of its own.

    None if its columns have different lengths, or more pairs than any engine computes in a step.

    Args:
        ring: ring of the slices.
        slices: slices of the step.
        table: request table; requests without a previous record are added to it.
    """
    num, rest = divmod(len(slices.requests), 4)
    tokens, contexts = slices.tokens, slices.contexts
    if (
        rest
        or len(slices.phases) not in (0, num)
        or len(slices.flags) not in (0, num)
        or len(slices.sampled) not in (0, 2 * num)
        or len(tokens) not in (0, 4 * num)
        or len(contexts) not in (0, 4 * num)
    ):
        return None
    # 65,536 tokens or 16 million of context, by their high bytes: maxima take ten times as long.
    if any((tokens[2::4].strip(b"\0"), tokens[3::4].strip(b"\0"), contexts[3::4].strip(b"\0"))):
        most, context = (
            int(np.frombuffer(column or bytes(4), dtype=COLUMNS["tokens"]).max())
            for column in (tokens, contexts)
        )
        if most > 1 and pairs(most, context) > _MOST_PAIRS:
            return None
    slots = ring.slots.team(slices.requests)
    if slots is not None:
        return slots, True
    indices = np.frombuffer(slices.requests, dtype=COLUMNS["requests"])
    slots = _slots_of(ring, indices, slices.t_ns, table)
    return slots, len(set(slots.tolist())) == num


def _slots_of(ring: RingState, indices: NDArray[np.uint32], t_ns: int, table: RequestTable) -> Ints:
    """Return the slots of a step's rows, adding requests without a previous record.

    A request that is final already has no slot.
    """
    slots = ring.slots.slots(indices)
    for at in np.flatnonzero(slots == 0).tolist():
        index = int(indices[at])
        slot = ring.slots.get(index)
        is_new = not slot and ring.slots.highest < index <= MOST_INDEX
        if is_new and not table.refuses(ring.slots, index):
            name = f"{ring.opened.role}-{ring.opened.rank}#{index}"
            request = table.add(name, t_ns, is_front_end=False, state=RUNNING)
            request.joined_late = request.is_first_unknown = True
            request.bind(ring.slots, index)
            slot = request.slot
        slots[at] = slot
    return slots
