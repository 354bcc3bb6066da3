"""Wall clock that drifts and is set, and a sampler whose library stamps windows by it."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from inferscope.records import Clock, CounterSample, Record
from tests.fold.scripts import MS, START_NS

DECODE_NS = 100 * MS
"""Time between two decodes."""
_REAL_NS = 1_700_000_000_000_000_000


@dataclass(frozen=True)
class Wall:
    """Readings of the wall clock.

    Attributes:
        drift: nanoseconds gained in one nanosecond.
        jumps: times at which it was set, and the differences.
    """

    drift: float = 0.0
    jumps: Sequence[tuple[int, int]] = ()

    def real_ns(self, at_ns: int) -> int:
        passed_ns = at_ns - START_NS
        set_ns = sum(by_ns for when_ns, by_ns in self.jumps if when_ns <= at_ns)
        return _REAL_NS + passed_ns + round(passed_ns * self.drift) + set_ns

    def is_set_within(self, after_ns: int, to_ns: int) -> bool:
        return any(after_ns < when_ns <= to_ns for when_ns, _ in self.jumps)


@dataclass(frozen=True)
class Counted:
    """True time and value of one window."""

    start_ns: int
    end_ns: int
    value: float


def anchor(wall: Wall, at_ns: int, *, error_ns: int = 0, draw: random.Random) -> Clock:
    """Return a simultaneous reading of the two clocks, with an error."""
    wrong_ns = draw.randint(-error_ns, error_ns)
    written_ns = at_ns + error_ns + 1
    return Clock(written_ns, wall.real_ns(at_ns), error_ns=error_ns, host_ns=at_ns + wrong_ns)


def reported(
    wall: Wall,
    windows: Sequence[Counted],
    *,
    word: str = "sm_active_share",
    device: str = "GPU-1234",
    lag_ns: int = 0,
    error_ns: int = 0,
    draw: random.Random | None = None,
) -> list[Record]:
    """Return a sampler's records of windows: at each decode an anchor, then the samples.

    Args:
        wall: clock of the stamps.
        windows: windows in the order of time.
        word: name of the counter.
        device: device of the windows.
        lag_ns: minimum time from the end of a window to its decode.
        error_ns: maximum error of the anchors.
        draw: source of the random errors.
    """
    draw = draw or random.Random(0)
    left, at_ns = list(windows), START_NS
    records: list[Record] = [anchor(wall, at_ns, error_ns=error_ns, draw=draw)]
    while left:
        at_ns += DECODE_NS
        clock = anchor(wall, at_ns, error_ns=error_ns, draw=draw)
        records.append(clock)
        num = sum(each.end_ns <= at_ns - lag_ns for each in left)
        come, left = left[:num], left[num:]
        stamped = [(wall.real_ns(each.start_ns), wall.real_ns(each.end_ns), each) for each in come]
        stamped = [each for each in stamped if each[0] < each[1]]  # as the session does
        if stamped:
            offset_ns = wall.real_ns(at_ns) - at_ns
            starts, ends = ([each[side] - offset_ns for each in stamped] for side in (0, 1))
            column = [each.value for _, _, each in stamped]
            records.append(
                CounterSample(
                    clock.t_ns,
                    device,
                    starts[0],
                    ends[-1],
                    "pm",
                    {word: sum(column) / len(column)},
                    starts_ns=array("q", starts).tobytes(),
                    ends_ns=array("q", ends).tobytes(),
                    series={word: array("f", column).tobytes()},
                    real_offset_ns=offset_ns,
                )
            )
    return records
