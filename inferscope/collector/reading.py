"""From a step's slices to its rows: whose they are, and what has changed since the last step."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from inferscope.attribution.ledger import RUNNING
from inferscope.collector.requests import RequestTable
from inferscope.collector.rings import RingState
from inferscope.collector.rows import Rows
from inferscope.records import COLUMNS, StepSlices

Ints = NDArray[np.int64]

MOST_INDEX = 0xFFFFFFFE


def read(ring: RingState, slices: StepSlices, table: RequestTable) -> tuple[Rows, Ints] | None:
    """Return a step's rows and their contexts, None if its columns do not fit together.

    Args:
        ring: that tells of them.
        slices: the step's.
        table: to which requests are added that were never introduced.
    """
    try:
        rows = _rows_of(ring, slices, table)
        return rows, rows.contexts(slices)
    except ValueError:
        return None


def team_of(ring: RingState, requests: bytes) -> Ints | None:
    """Return the slots of the ring's last step, if it was made up of just these requests."""
    if ring.kept_rows.num_dropped != ring.slots.num_dropped:
        return None
    last = ring.kept_rows.last_of(requests)
    return None if last is None or last.member_of_row is not None else last.slots


def _rows_of(ring: RingState, slices: StepSlices, table: RequestTable) -> Rows:
    """Read a step's rows, or take kept ones, where only contexts have changed."""
    kept = ring.kept_rows
    rows = kept.rows_of(slices, ring.slots)
    if rows is None:
        like = kept.last_of(slices.requests)
        if like is not None:
            rows = kept.read(slices, like.slots, like=like)
            kept.keep(rows)
            return rows
        indices = np.frombuffer(slices.requests, dtype=COLUMNS["requests"])
        slots, is_known = _slots_of(ring, indices, slices.t_ns, table)
        rows = kept.read(slices, slots)
        if is_known and kept.num_dropped == ring.slots.num_dropped:
            kept.keep(rows)
        else:
            kept.drop()
    return rows


def _slots_of(
    ring: RingState, indices: NDArray[np.uint32], t_ns: int, table: RequestTable
) -> tuple[Ints, bool]:
    """Return the slots of a step's rows, adding requests that were never introduced.

    A request that is final already has none; whether all have one is returned as well.
    """
    slots = ring.slots.slots(indices)
    if not len(slots):
        return slots, False
    if np.count_nonzero(slots) == len(slots):
        return slots, True
    for at in np.flatnonzero(slots == 0).tolist():
        index = int(indices[at])
        slot = ring.slots.get(index)
        if not slot and ring.slots.highest < index <= MOST_INDEX:
            name = f"{ring.opened.role}-{ring.opened.rank}#{index}"
            request = table.add(name, t_ns, is_front_end=False, state=RUNNING)
            request.joined_late = request.is_first_unknown = True
            request.bind(ring.slots, index)
            slot = request.slot
        slots[at] = slot
    return slots, np.count_nonzero(slots) == len(slots)
