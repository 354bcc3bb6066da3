"""A team that stands at one mark: what all of its members are booked alike, kept as sums.

From one decode step to the next a batch mostly stays as it is, and all that distinguishes its
members is their own part of each step. So while nobody joins or leaves, the ledger adds numbers
here, and writes the members' rows when somebody asks for rows, or the team breaks up:

    cpu_gap, output, excess, interference    the same for every decode: one sum each
    decode_own                               one vector, by member
    decode_co_batched                        time in steps - excess - interference - decode_own

A step's few prefills are told apart by writing what differs for them into their rows at once. A row
may run below zero by that, but never after `write`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from inferscope.attribution.open_step import OpenStep
from inferscope.records import CAUSES

Ints = NDArray[np.int64]

_OUTPUT, _CPU_GAP = CAUSES.index("output"), CAUSES.index("cpu_gap")
_SLOWDOWN, _COLD_START = CAUSES.index("slowdown"), CAUSES.index("cold_start")
_PREFILL, _DECODE = CAUSES.index("prefill_own"), CAUSES.index("decode_own")
_PHASES = slice(_PREFILL, _PREFILL + 6)
"""Own, co-batched and interference, of the prefill and then of the decode."""
_MOST_PREFILLS = 4
"""With more, a step is booked by member."""


class Together:
    """What the members of one team have been booked since their rows were last written.

    Every member's mark is `mark_ns`, in the sums here if not in the ledger. What the sums hold
    comes to just the time from the mark that was last written to `mark_ns`, for each member.

    Attributes:
        slots: the team, each slot once; the array itself is its name.
        mark_ns: where all of them stand.
        changes: the ledger's number of changes when they came to stand together.
    """

    __slots__ = (
        "_cold_ns",
        "_excess_ns",
        "_gap_ns",
        "_in_steps_ns",
        "_interference_ns",
        "_is_written",
        "_output_ns",
        "_own_ns",
        "changes",
        "mark_ns",
        "slots",
    )

    def __init__(self, slots: Ints, mark_ns: int, changes: int) -> None:
        self.slots = slots
        self.mark_ns = mark_ns
        self.changes = changes
        self._is_written = False
        self._own_ns: Ints | None = None
        self._gap_ns = self._output_ns = 0
        self._in_steps_ns = self._interference_ns = self._excess_ns = self._cold_ns = 0

    def stand(self, at_ns: int) -> None:
        """Move the mark: what lies before it is in the rows already."""
        self.mark_ns = at_ns
        self._is_written = False

    def emit(self, at_ns: int) -> None:
        """Book the time up to an emission as output."""
        self._output_ns += at_ns - self.mark_ns
        self.mark_ns = at_ns
        self._is_written = False

    def wait(self, until_ns: int) -> None:
        """Book the time up to the start of a step as the host's."""
        self._gap_ns += until_ns - self.mark_ns
        self.mark_ns = until_ns
        self._is_written = False

    def book(self, step: OpenStep, rows: Ints) -> bool:
        """Book a whole step of all members, who stand at its start; move the mark to its end.

        Args:
            step: none of its parts is changed or booked yet.
            rows: the ledger's, for what distinguishes the prefills.

        Returns:
            False where it has to be booked by member.
        """
        delay, prefills = step.delay, step.delay.prefills
        if len(prefills) > _MOST_PREFILLS or delay.recompute_ns is not None:
            return False
        for at in prefills:
            own_ns = delay.own_ns.item(at)
            rows[self.slots.item(at), _PHASES] += (
                own_ns,
                delay.prefill_class_ns - own_ns,
                delay.prefill_interference_ns,
                -own_ns,
                own_ns - delay.decode_class_ns,
                -delay.decode_interference_ns,
            )
        delay_ns = step.end_ns - step.start_ns
        if self._own_ns is None:
            self._own_ns = delay.own_ns.copy()
        else:
            self._own_ns += delay.own_ns
        self._in_steps_ns += delay_ns
        self._interference_ns += delay.decode_interference_ns
        self._excess_ns += delay.excess_ns
        if step.excess_column == _COLD_START:
            self._cold_ns += delay.excess_ns
        self.mark_ns = step.end_ns
        self._is_written = False
        return True

    def write(self, rows: Ints, marks_ns: Ints) -> None:
        """Bring the members' rows and marks up to date."""
        if self._is_written:
            return
        self._is_written = True
        slots = self.slots
        marks_ns[slots] = self.mark_ns
        cells = rows.reshape(-1)
        first = slots * rows.shape[1]
        if self._gap_ns:
            cells[first + _CPU_GAP] += self._gap_ns
        if self._output_ns:
            cells[first + _OUTPUT] += self._output_ns
        if self._own_ns is not None:
            own = first + _DECODE
            cells[own] += self._own_ns
            of_decode_ns = self._in_steps_ns - self._excess_ns - self._interference_ns
            cells[own + 1] += of_decode_ns - self._own_ns
            if self._interference_ns:
                cells[own + 2] += self._interference_ns
            if self._excess_ns > self._cold_ns:
                cells[first + _SLOWDOWN] += self._excess_ns - self._cold_ns
            if self._cold_ns:
                cells[first + _COLD_START] += self._cold_ns
        self._own_ns = None
        self._gap_ns = self._output_ns = 0
        self._in_steps_ns = self._interference_ns = self._excess_ns = self._cold_ns = 0
