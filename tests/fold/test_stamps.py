"""Windows stamped by a wall clock that drifts and is set: mapped to their true time, or dropped."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferscope.fold.join.stamps import MappedSample, WallClockMapper
from inferscope.records import Clock, CounterSample, Record
from tests.fold.scripts import MS, START_NS
from tests.fold.walls import DECODE_NS, Counted, Wall, reported

NUM_DECODES = 12
END_NS = START_NS + NUM_DECODES * DECODE_NS
LENGTH_NS = MS // 2


def train() -> list[Counted]:
    """Return windows without gaps; each value is its window's number."""
    num = (END_NS - START_NS) // LENGTH_NS - 100
    first_ns = START_NS + 1
    return [
        Counted(first_ns + at * LENGTH_NS, first_ns + (at + 1) * LENGTH_NS, float(at))
        for at in range(num)
    ]


def placed(records: Sequence[Record], *, wait_ns: int = 600 * MS) -> list[MappedSample]:
    """Map the samples of some records, and release those that still wait."""
    stamps, out = WallClockMapper(), []
    for record in records:
        out += stamps.give_up(record.t_ns)
        if isinstance(record, Clock):
            out += stamps.anchor(record)
        elif isinstance(record, CounterSample):
            out += stamps.place(record)
    return out + stamps.give_up(records[-1].t_ns + wait_ns)


def anchored_late(records: Sequence[Record]) -> list[Record]:
    """Move each sample before the anchor that was taken for it."""
    late = list(records)
    for at in range(1, len(late)):
        if isinstance(late[at], CounterSample):
            late[at - 1], late[at] = late[at], late[at - 1]
    assert late != list(records)
    return late


def num_reported(records: Sequence[Record]) -> int:
    return sum(len(one.starts_ns) // 8 for one in records if isinstance(one, CounterSample))


def hold_to_truth(
    found: Sequence[MappedSample], truth: Sequence[Counted], *, slack_ns: int = 3
) -> int:
    """Check every mapped window against the truth; return their number."""
    num = 0
    for each in found:
        if each.window is None:
            continue
        assert each.error_ns is not None
        window = each.window
        numbers = window.values["sm_active_share"].astype(int).tolist()
        num += len(numbers)
        for at, from_ns, to_ns in zip(numbers, window.from_ns, window.to_ns, strict=True):
            assert abs(from_ns - truth[at].start_ns) <= each.error_ns + slack_ns
            assert abs(to_ns - truth[at].end_ns) <= each.error_ns + slack_ns
    return num


# Not two between the same anchors: setting a clock and setting it back is undetectable.
slots = st.lists(st.integers(0, NUM_DECODES - 1), max_size=4, unique=True)
sizes = st.one_of(st.integers(MS, 90 * MS), st.integers(90 * MS, 3_600_000 * MS))


@st.composite
def jumps(draw: st.DrawFn, size: st.SearchStrategy[int] = sizes) -> list[tuple[int, int]]:
    return [
        (
            START_NS + slot * DECODE_NS + draw(st.integers(1, DECODE_NS - 1)),
            draw(size) * draw(st.sampled_from([1, -1])),
        )
        for slot in draw(slots)
    ]


@given(
    jumps=jumps(),
    drift=st.floats(-2e-4, 2e-4),
    error_ns=st.integers(0, 20_000),
    lag_ns=st.integers(0, DECODE_NS - 2 * LENGTH_NS),
    is_late=st.booleans(),
    seed=st.integers(0, 1 << 30),
)
def test_no_window_is_put_where_it_was_not_and_all_are_counted(
    jumps: list[tuple[int, int]],
    drift: float,
    error_ns: int,
    lag_ns: int,
    is_late: bool,
    seed: int,
) -> None:
    truth, wall = train(), Wall(drift, jumps)
    draw = random.Random(seed)
    records = reported(wall, truth, lag_ns=lag_ns, error_ns=error_ns, draw=draw)
    if is_late:
        records = anchored_late(records)
    found = placed(records)
    num_placed = hold_to_truth(found, truth)
    assert num_placed + sum(each.num_unplaced for each in found) == num_reported(records)
    # Everything decoded more than a period after the clock was set is mapped.
    for record in records:
        if isinstance(record, CounterSample):
            decoded_ns = record.t_ns - error_ns - 1
            if not wall.is_set_within(decoded_ns - 2 * DECODE_NS, decoded_ns):
                (one,) = [each for each in found if each.record is record]
                assert one.num_unplaced == 0


@given(jumps=jumps(size=st.integers(0, 2 * MS)), error_ns=st.integers(0, 20_000))
def test_the_error_covers_a_clock_that_was_set_by_too_little_to_detect(
    jumps: list[tuple[int, int]], error_ns: int
) -> None:
    truth = train()
    records = reported(Wall(0.0, jumps), truth, error_ns=error_ns)
    assert hold_to_truth(placed(records), truth) > 0


def test_an_unset_clock_maps_every_window() -> None:
    truth = train()
    found = placed(reported(Wall(1e-4), truth, error_ns=500))
    assert hold_to_truth(found, truth) == len(truth)
    assert max(each.error_ns or 0 for each in found) < 500 + 1e-4 * DECODE_NS + 500 * 2 + 1


@pytest.mark.thorough
@pytest.mark.parametrize("lag_ms", [0, 30, 60])
@pytest.mark.parametrize("before_ms", [-40, -5, 5, 30])
@pytest.mark.parametrize("by_ms", [-70, -20, -1, 1, 20, 70])
def test_what_is_decoded_only_after_a_jump_is_not_taken_for_what_came_behind_it(
    lag_ms: int, before_ms: int, by_ms: int
) -> None:
    truth = train()
    jump = (START_NS + 5 * DECODE_NS - before_ms * MS, by_ms * MS)
    records = reported(Wall(0.0, [jump]), truth, lag_ns=lag_ms * MS, error_ns=100)
    found = placed(records)
    num_unplaced = sum(each.num_unplaced for each in found)
    assert hold_to_truth(found, truth) + num_unplaced == num_reported(records)
    assert 0 < num_unplaced <= 2 * DECODE_NS // LENGTH_NS


def test_a_stale_anchor_does_not_place_what_was_stamped_after_the_clock_was_set_back() -> None:
    truth = train()
    jumps = [(START_NS + DECODE_NS + 1, -DECODE_NS + LENGTH_NS), (START_NS + 2 * DECODE_NS + 1, MS)]
    records = anchored_late(reported(Wall(0.0, jumps), truth))
    assert 0 < hold_to_truth(placed(records), truth) < len(truth)


def test_an_anchor_that_comes_late_places_what_has_waited_for_it() -> None:
    truth = train()
    in_turn = reported(Wall(5e-5), truth, error_ns=100)
    expected, found = placed(in_turn), placed(anchored_late(in_turn))
    assert hold_to_truth(found, truth) == len(truth)
    for one, other in zip(expected, found, strict=True):
        assert one.window is not None
        assert other.window is not None
        assert (one.window.from_ns == other.window.from_ns).all()
        assert one.error_ns == other.error_ns


def test_what_no_anchor_comes_for_is_given_up_and_counted() -> None:
    truth = train()
    records = reported(Wall(), truth)
    lost = [one for one in records if isinstance(one, CounterSample)]
    found = placed([records[0], *lost])
    assert all(each.window is None for each in found)
    assert sum(each.num_unplaced for each in found) == len(truth)
    assert [each.record for each in found] == lost


def test_a_few_lost_anchors_widen_the_error_and_many_leave_nothing_to_place() -> None:
    truth, wall = train(), Wall(2e-4)
    records = reported(wall, truth, error_ns=1000)
    anchors = [one for one in records if isinstance(one, Clock)]
    some = [one for one in records if one not in anchors[2:4]]
    found = placed(some)
    assert hold_to_truth(found, truth) == len(truth)
    errors = {each.error_ns for each in found if each.error_ns is not None}
    assert max(errors) > 1000 + 2e-4 * 2 * DECODE_NS
    stamps = WallClockMapper()
    for at_ns in (START_NS, START_NS + 10_000 * MS):  # the drift in between may reach 2 ms
        real_ns = wall.real_ns(at_ns) + (5 * MS if at_ns > START_NS else 0)
        stamps.anchor(Clock(at_ns, real_ns, error_ns=10, host_ns=at_ns))
    (one,) = stamps.place(next(each for each in records if isinstance(each, CounterSample)))
    assert one.window is None
    assert one.num_unplaced > 0


@given(
    st.sampled_from(["real_ns", "host_ns", "error_ns", "t_ns"]),
    st.integers(-(1 << 63), (1 << 64) - 1),
)
def test_damaged_anchors_raise_nothing(name: str, value: int) -> None:
    records = reported(Wall(), train()[:400])
    fields = {"t_ns": START_NS, "real_ns": START_NS, "error_ns": 0, "host_ns": START_NS}
    bad = Clock(**{**fields, name: value})
    stamps = WallClockMapper()
    for record in (bad, *records, bad, *records):
        if isinstance(record, Clock):
            stamps.anchor(record)
        elif isinstance(record, CounterSample):
            for each in stamps.place(record):
                assert each.window is None or len(each.window.from_ns)


def test_stamps_of_our_own_clock_are_left_as_they_are() -> None:
    record = CounterSample(9, "GPU-1", 3, 8, "gpm", {"sm_active_share": 0.5})
    (one,) = WallClockMapper().place(record)
    assert one.window is record
    assert (one.num_unplaced, one.error_ns) == (0, None)
