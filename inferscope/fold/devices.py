"""Division of a device's wall time: busy in a phase, busy without a request, idle.

A device runs one step at a time. If spans overlap (the host's clock, steps launched ahead), the
later one counts from the end of the earlier one, so the parts sum to the wall time exactly.

A restarted rank continues the device time of its predecessor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from operator import add, itemgetter
from typing import NamedTuple

import numpy as np

from inferscope.attribution import to_whole_ns
from inferscope.fold.final_records import DeviceTime
from inferscope.fold.rings import RingState

_FIRST = itemgetter(0)
BUSY = ("prefill", "decode", "padding", "unattributed")


class RankTime:
    """Busy time of one rank's device.

    Attributes:
        until_ns: time through which steps are booked.
        busy_ns: busy time, in the order of `BUSY`.
    """

    def __init__(self, first_ns: int) -> None:
        """Start at the fold's first time."""
        self.until_ns = first_ns
        self.busy_ns = [0, 0, 0, 0]

    def book(self, start_ns: int, end_ns: int, parts_ns: Sequence[int]) -> None:
        """Add a step.

        Args:
            start_ns: start on the host's clock.
            end_ns: end on the host's clock.
            parts_ns: parts of its time, in the order of `BUSY`; they sum to it, less the time that
                it waited for other ranks.
        """
        if start_ns < self.until_ns:
            left_ns = min(end_ns - self.until_ns, sum(parts_ns))
            if left_ns <= 0:
                return
            parts_ns = to_whole_ns(np.array(parts_ns, dtype=np.float64), left_ns).tolist()
        self.busy_ns = list(map(add, self.busy_ns, parts_ns))
        self.until_ns = end_ns

    def seconds_by_ns(
        self, wall_ns: int, *, no_work_ns: int, foreign_ns: int | None = None
    ) -> dict[str, int]:
        """Return the wall time by use; idle time with requests counts as a host gap.

        Args:
            wall_ns: wall time, up to `until_ns` at least.
            no_work_ns: idle time without requests.
            foreign_ns: idle time in which other processes used the device, None if unknown.
        """
        idle_ns = wall_ns - sum(self.busy_ns)
        no_work_ns = min(no_work_ns, idle_ns)
        spent = dict(zip(BUSY, self.busy_ns, strict=True))
        spent |= {"idle_no_work": no_work_ns, "idle_host_gap": idle_ns - no_work_ns}
        return spent if foreign_ns is None else with_foreign(spent, foreign_ns)

    def followed_by(self, successor: RankTime) -> RankTime:
        """Return the sum of both times; the successor began after this one ended."""
        both = RankTime(max(self.until_ns, successor.until_ns))
        both.busy_ns = [
            one + other for one, other in zip(self.busy_ns, successor.busy_ns, strict=True)
        ]
        return both


def with_foreign(spent_ns: dict[str, int], foreign_ns: int) -> dict[str, int]:
    """Move other processes' use of a device from its idle time to `foreign`.

    Samples do not locate it in gaps, so both kinds of idle time shrink in proportion.
    """
    no_work_ns, gap_ns = spent_ns["idle_no_work"], spent_ns["idle_host_gap"]
    idle_ns = no_work_ns + gap_ns
    foreign_ns = min(foreign_ns, idle_ns)
    of_no_work_ns = foreign_ns * no_work_ns // idle_ns if idle_ns else 0
    return spent_ns | {
        "foreign": foreign_ns,
        "idle_no_work": no_work_ns - of_no_work_ns,
        "idle_host_gap": gap_ns - (foreign_ns - of_no_work_ns),
    }


class Line(NamedTuple):
    """Device time of successive processes of one role and rank."""

    first: int
    """Number of the oldest process's ring."""
    ring: RingState
    """Ring of the newest process."""
    time: RankTime
    """Sum over these processes."""


def successions(
    times: Iterable[tuple[RingState, RankTime]], *, before: Iterable[Line] = ()
) -> list[Line]:
    """Add up the device time of each process and its successors in role and rank.

    Args:
        times: rings with their times, oldest first.
        before: lines of older rings.

    Returns:
        all lines, oldest first.
    """
    lines = list(before)
    for ring, time in times:
        for at, (first, last, so_far) in enumerate(lines):
            is_successor = last.slots.origin == ring.slots.origin
            if is_successor and so_far.until_ns <= ring.opened.start_ns:
                lines[at] = Line(first, ring, so_far.followed_by(time))
                break
        else:
            lines.append(Line(ring.opened.ring, ring, time))
    return sorted(lines, key=_FIRST)


def by_name(times: Iterable[DeviceTime]) -> list[DeviceTime]:
    """Add up the times of devices that have the same name."""
    found: dict[str, DeviceTime] = {}
    for time in times:
        same = found.get(time.device)
        if same is None:
            found[time.device] = time
            continue
        spent = {name: ns + time.seconds_by_ns[name] for name, ns in same.seconds_by_ns.items()}
        found[time.device] = replace(same, wall_ns=same.wall_ns + time.wall_ns, seconds_by_ns=spent)
    return list(found.values())
