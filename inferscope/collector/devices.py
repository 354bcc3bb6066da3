"""Where a device's wall time goes: busy for a phase, busy for nobody, idle.

A device does one thing at a time. Where spans overlap (the host's clock, steps launched ahead) the
later one counts from where the earlier one ended, so that all parts sum to the wall exactly.

A rank that is started again goes on where the one before it ended: its device is one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from operator import add, itemgetter
from typing import NamedTuple

import numpy as np

from inferscope.attribution.split import to_whole_ns
from inferscope.collector.finals import DeviceTime
from inferscope.collector.rings import RingState

_FIRST = itemgetter(0)
BUSY = ("prefill", "decode", "padding", "unattributed")


class RankTime:
    """The busy time of one rank's device.

    Attributes:
        until_ns: explained up to here.
        busy_ns: by BUSY.
    """

    def __init__(self, first_ns: int) -> None:
        """Start where the fold's time starts."""
        self.until_ns = first_ns
        self.busy_ns = [0, 0, 0, 0]

    def book(self, start_ns: int, end_ns: int, parts_ns: Sequence[int]) -> None:
        """Add a step.

        Args:
            start_ns: on the host's clock.
            end_ns: likewise.
            parts_ns: of its time, by BUSY; they sum to it.
        """
        if start_ns < self.until_ns:
            left_ns = end_ns - self.until_ns
            if left_ns <= 0:
                return
            parts_ns = to_whole_ns(np.array(parts_ns, dtype=np.float64), left_ns).tolist()
        self.busy_ns = list(map(add, self.busy_ns, parts_ns))
        self.until_ns = end_ns

    def seconds_by_ns(
        self, wall_ns: int, *, no_work_ns: int, foreign_ns: int | None = None
    ) -> dict[str, int]:
        """Return where the wall time went; what is neither busy nor workless waited for the host.

        Args:
            wall_ns: up to `until_ns` at least.
            no_work_ns: idle time in which no request was there.
            foreign_ns: idle time in which others used the device, None where nobody tells.
        """
        idle_ns = wall_ns - sum(self.busy_ns)
        no_work_ns = min(no_work_ns, idle_ns)
        spent = dict(zip(BUSY, self.busy_ns, strict=True))
        spent |= {"idle_no_work": no_work_ns, "idle_host_gap": idle_ns - no_work_ns}
        return spent if foreign_ns is None else with_foreign(spent, foreign_ns)

    def followed_by(self, heir: RankTime) -> RankTime:
        """Return the time of both as one's; the heir's began when this one's was over."""
        both = RankTime(max(self.until_ns, heir.until_ns))
        both.busy_ns = [one + other for one, other in zip(self.busy_ns, heir.busy_ns, strict=True)]
        return both


def with_foreign(spent_ns: dict[str, int], foreign_ns: int) -> dict[str, int]:
    """Take what others used a device for off its idle time.

    Samples do not say in which gaps that was: both kinds of idle time give alike.
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
    """Device time of processes of one role and rank that came one after the other's end."""

    first: int
    """Number of the oldest ring."""
    ring: RingState
    """The newest one."""
    time: RankTime
    """The sum over these processes."""


def successions(
    told: Iterable[tuple[RingState, RankTime]], *, before: Iterable[Line] = ()
) -> list[Line]:
    """Join the time of a process and of those of its role and rank that came after its end.

    Args:
        told: by age of the rings.
        before: of older ones.

    Returns:
        all lines, by age.
    """
    lines = list(before)
    for ring, time in told:
        for at, (first, last, so_far) in enumerate(lines):
            is_heir = last.slots.teller == ring.slots.teller
            if is_heir and so_far.until_ns <= ring.opened.start_ns:
                lines[at] = Line(first, ring, so_far.followed_by(time))
                break
        else:
            lines.append(Line(ring.opened.ring, ring, time))
    return sorted(lines, key=_FIRST)


def by_name(times: Iterable[DeviceTime]) -> list[DeviceTime]:
    """Add up what is told of devices that nothing tells apart."""
    found: dict[str, DeviceTime] = {}
    for time in times:
        same = found.get(time.device)
        if same is None:
            found[time.device] = time
            continue
        spent = {name: ns + time.seconds_by_ns[name] for name, ns in same.seconds_by_ns.items()}
        found[time.device] = replace(same, wall_ns=same.wall_ns + time.wall_ns, seconds_by_ns=spent)
    return list(found.values())
