"""Clock skew: differences of monotonic clocks between processes in separate time namespaces.

    core       wall 12:00:00   monotonic  4,000 s
    front end  wall 12:00:00   monotonic  7,600 s      (unshare --time --monotonic 3600)

Containers of one host share the wall clock, while CLOCK_MONOTONIC has an offset per time namespace.
Every process states both clocks in one reading (`Clock`). Their difference is the same for all
processes of a namespace, until the wall clock is set or the machine sleeps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

LEAST_SKEW_NS = 250_000_000
"""Smallest skew in nanoseconds: a process may lose its core between two readings."""
_RESTATED_NS = 15_000_000_000
"""Longest nanoseconds between readings of a running process: keyframes are 10 s apart."""


@dataclass(frozen=True)
class SkewedClock:
    """A process whose monotonic clock differs from the rest of its engine, or from the reader."""

    engine_id: str
    """ID of the engine."""
    role: str
    """Role of the process."""
    rank: int
    """Rank of the process."""
    pid: int
    """Process ID in its own namespace."""
    skew_ns: int
    """Nanoseconds to add to the process's times; negative if its clock is ahead."""
    is_corrected: bool = True
    """Whether the reader has added the correction."""

    def in_words(self) -> str:
        """Return the line for screens and logs."""
        way = "behind" if self.skew_ns > 0 else "ahead"
        then = "its times are corrected" if self.is_corrected else "its times are wrong by that"
        return (
            f"the clock of {self.role} {self.rank} of {self.engine_id} (pid {self.pid}) is "
            f"{abs(self.skew_ns) / 1e9:.3f} s {way}, as in a time namespace of its own; {then}"
        )


class Offsets(NamedTuple):
    """Differences of wall clock and monotonic clock of one process, at two readings."""

    first_ns: int
    last_ns: int
    first_real_ns: int
    """Wall time of the first reading, in nanoseconds."""
    last_real_ns: int

    @property
    def last_mono_ns(self) -> int:
        """Return the monotonic time of the second reading."""
        return self.last_real_ns - self.last_ns

    @property
    def best_ns(self) -> int:
        """Return the newest offset; of two that agree, the smaller: delays only increase it."""
        is_same = not differ(self.first_ns, self.last_ns)
        return min(self.first_ns, self.last_ns) if is_same else self.last_ns


def differ(offset_ns: int, other_ns: int) -> bool:
    """Return whether two offsets belong to different clocks."""
    return abs(offset_ns - other_ns) >= LEAST_SKEW_NS


def skew_between_ns(offsets: Offsets, reference: Offsets) -> int | None:
    """Return the nanoseconds to add to a process's times to get another's clock.

    Returns:
        0 if the clocks are the same. None if the readings do not determine it: the wall clock was
        set between them, or may have been, since the processes did not run at the same time.
    """
    mine, theirs = offsets[:2], reference[:2]
    if any(not differ(one, other) for one in mine for other in theirs):
        return 0
    if (
        offsets.first_real_ns > reference.last_real_ns + _RESTATED_NS
        or reference.first_real_ns > offsets.last_real_ns + _RESTATED_NS
        or differ(mine[0] - theirs[0], mine[1] - theirs[1])
    ):
        return None
    return offsets.best_ns - reference.best_ns
