from __future__ import annotations

from array import array

import msgspec
import pytest
from msgspec.structs import replace

from inferscope.readers.shifting import TIMES, shifted
from inferscope.records import (
    COLUMNS,
    RECORD_TYPES,
    Clock,
    CounterSample,
    Live,
    Missed,
    Record,
    RingOpened,
    StepSpan,
    Tick,
)

NOT_TIMES = {
    "device_start_ns", "device_end_ns", "device_ns",  # of the device's clock
    "error_ns", "cost_ns", "hidden_ns", "blocked_ns", "waits_ns", "took_ns",  # durations
    "emitted_before_ns",
    "real_ns", "real_offset_ns",  # of the wall clock
}  # fmt: skip
OF_RINGS = [kind for kind in RECORD_TYPES if kind not in (RingOpened, Missed, Tick)]


@pytest.mark.parametrize("kind", OF_RINGS)
def test_every_field_in_nanoseconds_is_moved_or_known_to_be_no_time(kind: type[Record]) -> None:
    named = {field.name for field in msgspec.structs.fields(kind) if field.name.endswith("_ns")}
    assert named - {"t_ns"} - NOT_TIMES == set(TIMES.get(kind, ()))


def test_times_are_moved_and_nothing_else() -> None:
    span = StepSpan(9, 3, 4, 5, 6, 7, 100, 200, cold=True)
    moved = replace(span, t_ns=19, launch_start_ns=15, launch_end_ns=16, ready_ns=17)
    assert shifted(span, 10) == moved
    assert shifted(moved, -10) == span
    clock = Clock(5, 1000)
    assert shifted(clock, 10) == Clock(15, 1000)


def test_columns_of_times_are_moved() -> None:
    arrived = array("q", [1, 2]).tobytes()
    live = Live(9, b"", b"", b"", b"", arrived, ("a", "b"))
    assert shifted(live, 10).arrived_ns == array("q", [11, 12]).tobytes()
    assert shifted(replace(live, arrived_ns=b"odd"), 10).arrived_ns == b"odd"
    assert {COLUMNS[name] for name in ("arrived_ns", "starts_ns", "ends_ns")} == {"<i8"}


def test_stamps_of_the_wall_clock_are_recovered_all_the_same() -> None:
    sample = CounterSample(9, "", 3, 4, "cupti", {}, real_offset_ns=1000)
    moved = shifted(sample, 10)
    assert moved.start_ns + moved.real_offset_ns == 3 + 1000
