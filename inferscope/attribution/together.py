"""A team that stands at one mark: what all of its members are booked alike, kept as sums.

From one decode step to the next a batch mostly stays as it is, and all that distinguishes its
members is their own part of each step. So the ledger adds numbers here and leaves the rows alone:

    cpu_gap, output, excess, interference    the same for every decode: one row of sums
    decode_own                               one vector, by slot
    decode_co_batched                        time in steps - excess - interference - decode_own

Who joins has the sums so far taken from its row, who leaves has them added to it; the others are
not touched. So a member's row is wrong by the sums, below zero even, until `write` or `leave`.

A step's few prefills are told apart by writing what differs for them into their rows at once.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from inferscope.attribution.open_step import OpenStep
from inferscope.records import CAUSES

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

_OUTPUT, _CPU_GAP = CAUSES.index("output"), CAUSES.index("cpu_gap")
_PREFILL, _DECODE = CAUSES.index("prefill_own"), CAUSES.index("decode_own")
"""Of each, co-batched and interference are the next two columns."""
_MOST_PREFILLS = 4
"""With more, a step is booked by member."""


class Together:
    """Requests whose marks are one, and what they have been booked since their rows were written.

    Every member's mark is `mark_ns`, here if not in the ledger.

    Attributes:
        members: the slots.
        is_member: the same: [slots].
        team: the same as an array, which is the team's name; None since somebody left or joined.
        mark_ns: where all of them stand.
    """

    __slots__ = (
        "_is_written",
        "_marks_ns",
        "_own_ns",
        "_rows",
        "_sums",
        "is_member",
        "mark_ns",
        "members",
        "team",
    )

    def __init__(self, team: Ints, mark_ns: int, *, rows: Ints, marks_ns: Ints) -> None:
        """Bring together requests that stand at one mark.

        Args:
            team: [members], each slot once.
            mark_ns: where they stand.
            rows: the ledger's, up to date for the members.
            marks_ns: likewise.
        """
        self.members = set(team.tolist())
        self.is_member = np.zeros(len(marks_ns), dtype=np.bool_)
        self.is_member[team] = True
        self.team: Ints | None = team
        self.mark_ns = mark_ns
        self._rows = rows
        self._marks_ns = marks_ns
        self._is_written = False
        self._own_ns: Ints = np.zeros(len(marks_ns), dtype=np.int64)
        """[slots], 0 of who is no member."""
        self._sums: Ints = np.zeros(len(CAUSES), dtype=np.int64)
        """[causes], what each has been booked, but for its own parts."""

    # --- who ----------------------------------------------------------------------------------

    def join(self, slot: int) -> None:
        """Take in a request that stands at the mark."""
        self._rows[slot] -= self._sums
        self.members.add(slot)
        self.is_member[slot] = True
        self.team = None
        self._is_written = False

    def leave(self, slot: int) -> None:
        """Let a request go: its row and its mark are its own again."""
        self._add_to(self._rows[slot], slot)
        self._own_ns[slot] = 0
        self._marks_ns[slot] = self.mark_ns
        self.members.remove(slot)
        self.is_member[slot] = False
        self.team = None

    # --- what ---------------------------------------------------------------------------------

    def stand(self, at_ns: int) -> None:
        """Move the mark: what lies before it is in the rows already."""
        self.mark_ns = at_ns
        self._is_written = False

    def emit(self, at_ns: int) -> None:
        """Book the time up to an emission as output."""
        self._sums[_OUTPUT] += at_ns - self.mark_ns
        self.mark_ns = at_ns
        self._is_written = False

    def wait(self, until_ns: int) -> None:
        """Book the time up to the start of a step as the host's."""
        self._sums[_CPU_GAP] += until_ns - self.mark_ns
        self.mark_ns = until_ns
        self._is_written = False

    def book(self, step: OpenStep) -> bool:
        """Book a whole step of the team, who stand at its start; move the mark to its end.

        Args:
            step: none of its parts is changed or booked yet.

        Returns:
            False where it has to be booked by member.
        """
        delay, prefills = step.delay, step.delay.prefills
        if len(prefills) > _MOST_PREFILLS or delay.recompute_ns is not None:
            return False
        own_ns, interference_ns = delay.own_ns, delay.decode_interference_ns
        for at in prefills:
            row, mine_ns = self._rows[step.slots.item(at)], own_ns.item(at)
            row[_PREFILL] += mine_ns
            row[_PREFILL + 1] += delay.prefill_class_ns - mine_ns
            row[_PREFILL + 2] += delay.prefill_interference_ns
            row[_DECODE] -= mine_ns
            row[_DECODE + 1] -= delay.decode_class_ns - mine_ns
            row[_DECODE + 2] -= interference_ns
        self._own_ns[step.slots] += own_ns
        sums, of_decodes_ns = self._sums, step.end_ns - step.start_ns
        if interference_ns:
            sums[_DECODE + 2] += interference_ns
            of_decodes_ns -= interference_ns
        if delay.excess_ns:
            sums[step.excess_column] += delay.excess_ns
            of_decodes_ns -= delay.excess_ns
        sums[_DECODE + 1] += of_decodes_ns
        self.mark_ns = step.end_ns
        self._is_written = False
        return True

    # --- rows ---------------------------------------------------------------------------------

    def row(self, slot: int) -> Ints:
        """Return a copy of a member's row, up to date."""
        row: Ints = self._rows[slot].copy()
        self._add_to(row, slot)
        return row

    def write(self) -> None:
        """Bring all members' rows and marks up to date."""
        if self._is_written:
            return
        self._is_written = True
        slots = self.team
        if slots is None:
            slots = np.fromiter(self.members, dtype=np.int64, count=len(self.members))
        self._marks_ns[slots] = self.mark_ns
        rows, own_ns = self._rows.take(slots, axis=0), self._own_ns[slots]
        rows += self._sums
        rows[:, _DECODE] += own_ns
        rows[:, _DECODE + 1] -= own_ns
        self._rows[slots] = rows
        self._own_ns[slots] = self._sums[:] = 0

    def _add_to(self, row: Ints, slot: int) -> None:
        """Add to a row what its owner has been booked."""
        own_ns = self._own_ns.item(slot)
        row += self._sums
        row[_DECODE] += own_ns
        row[_DECODE + 1] -= own_ns


def outsiders(slots: Ints, is_in: Flags) -> list[int]:
    """Return those of some slots that are not in: few or none, so each is looked for by itself.

    Args:
        slots: [requests].
        is_in: [slots].
    """
    found, column = [], is_in[slots].tobytes()
    at = column.find(0)
    while at >= 0:
        found.append(slots.item(at))
        at = column.find(0, at + 1)
    return found
