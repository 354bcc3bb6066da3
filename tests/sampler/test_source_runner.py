from __future__ import annotations

import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferscope.records import Clock, CounterSample, Keyframe, ProbeHealth
from inferscope.ring.reader import RingReader
from inferscope.sampler.source import Unavailable
from inferscope.sampler.source_runner import (
    FIRST_BACKOFF_NS,
    LONGEST_BACKOFF_NS,
    STUCK_NS,
    SourceRunner,
)
from tests.probe.fakes import FakeClock, of, records
from tests.sampler.toy_source import PERIOD, ToySource, make_tape


class Stage:
    """A source, its turns, and the logged lines."""

    def __init__(self, folder: Path) -> None:
        self.clock = FakeClock()
        self.lines: list[str] = []
        self.source = ToySource()
        self.tape, self.path = make_tape(folder, self.clock)
        self.turns = SourceRunner(
            self.source, self.tape, clock=self.clock, log_line=self.lines.append
        )

    def until(self, end_ns: int) -> None:
        """Take all turns that are due, each on time."""
        while self.clock.now_ns < end_ns:
            self.clock.now_ns = max(self.clock.now_ns, self.turns.turn(self.clock.now_ns))

    def samples(self) -> list[CounterSample]:
        return of(CounterSample, self.path)


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


def test_reads_follow_each_other_without_drift(stage: Stage) -> None:
    began_ns = stage.clock.now_ns
    stage.until(began_ns + 50 * PERIOD)
    windows = [(one.start_ns, one.end_ns) for one in stage.samples() if one.values]
    assert windows == [
        (began_ns + i * PERIOD, began_ns + (i + 1) * PERIOD) for i in range(len(windows))
    ]
    assert len(windows) == 49


@given(late_ns=st.lists(st.integers(0, 5 * PERIOD), min_size=1, max_size=20))
def test_late_turns_leave_the_schedule_as_it_was(
    late_ns: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    stage = Stage(tmp_path_factory.mktemp("late"))
    began_ns = stage.clock.now_ns
    for late in late_ns:
        due_ns = stage.turns.turn(stage.clock.now_ns)
        assert due_ns > stage.clock.now_ns
        assert due_ns - stage.clock.now_ns <= PERIOD
        assert (due_ns - began_ns) % PERIOD == 0
        stage.clock.now_ns = due_ns + late


def test_lost_source_is_reported_once_closed_and_retried(stage: Stage) -> None:
    stage.until(stage.clock.now_ns + 5 * PERIOD)
    stage.source.lost = "the driver is gone."
    lost_ns = stage.clock.now_ns
    stage.until(lost_ns + 60_000_000_000)
    assert stage.lines == ["toy: the driver is gone."]
    assert stage.source.num_closed > 3
    stage.source.lost = ""
    stage.until(stage.clock.now_ns + LONGEST_BACKOFF_NS + 3 * PERIOD)
    assert stage.lines[1:] == ["toy: available again"]
    news = [one for one in stage.samples() if not one.values]
    assert [one.reason or "open" for one in news] == ["open", "the driver is gone.", "open"]
    assert [one.values for one in stage.samples()][-1] == {"busy_share": 0.5}  # and no NaN


def test_a_source_is_asked_ever_more_seldom_but_never_given_up(stage: Stage) -> None:
    stage.source.lost = "nothing here."
    waits_ns = []
    for _ in range(8):
        due_ns = stage.turns.turn(stage.clock.now_ns)
        waits_ns.append(due_ns - stage.clock.now_ns)
        stage.clock.now_ns = due_ns
    assert waits_ns[:3] == [FIRST_BACKOFF_NS, 2 * FIRST_BACKOFF_NS, 4 * FIRST_BACKOFF_NS]
    assert waits_ns[-1] == LONGEST_BACKOFF_NS


def test_changed_reason_is_reported(stage: Stage) -> None:
    for reason in ("one.", "one.", "another."):
        stage.source.lost = reason
        stage.clock.now_ns = stage.turns.turn(stage.clock.now_ns)
    assert stage.lines == ["toy: one.", "toy: another."]


def test_a_fault_of_ours_ends_one_source_and_no_more(stage: Stage) -> None:
    stage.until(stage.clock.now_ns + 2 * PERIOD)
    stage.source.broken = True
    stage.until(stage.clock.now_ns + 2 * PERIOD)
    assert stage.lines == ["toy: failed: ZeroDivisionError: a fault of ours"]


def test_hung_call_is_reported_by_the_check(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    entered, let_go = threading.Event(), threading.Event()

    def hang(now_ns: int) -> list[CounterSample]:
        entered.set()
        let_go.wait(30)
        raise Unavailable("at last.")

    stage.source.open = hang  # type: ignore[method-assign]
    stage.turns.start()
    try:
        assert entered.wait(30)
        stage.turns.check_hung(stage.clock.now_ns)
        assert stage.lines == []
        stage.clock.now_ns += STUCK_NS
        for _ in range(3):
            stage.turns.check_hung(stage.clock.now_ns)
        assert stage.lines == ["toy: no answer for 5 s: the driver or its device hangs."]
        assert [one.reason for one in stage.samples()] == [stage.lines[0].removeprefix("toy: ")]
    finally:
        stage.turns.request_stop()
        let_go.set()
        stage.turns.wait(30)


def test_keyframes_restate_what_sources_reported(stage: Stage) -> None:
    stage.tape.tend(cost_ns=1)
    stage.turns.turn(stage.clock.now_ns)
    stage.source.lost = "gone."
    stage.turns.turn(stage.clock.now_ns + PERIOD)
    stage.clock.now_ns += 11_000_000_000
    stage.tape.tend(cost_ns=2)
    reader = RingReader(stage.path)
    reader.skip_to_last_keyframe()
    reader.close()
    written = records(stage.path)
    last = max(i for i, record in enumerate(written) if isinstance(record, Keyframe))
    restated = [record for record in written[last:] if isinstance(record, CounterSample)]
    assert {(one.device_uuid, one.reason) for one in restated} == {("GPU-1", ""), ("", "gone.")}
    assert any(isinstance(record, Clock) for record in written[last:])


def test_a_ring_states_how_far_its_sources_are_and_what_they_cost(stage: Stage) -> None:
    stage.until(stage.clock.now_ns + 5 * PERIOD)
    stage.tape.tend(cost_ns=77)
    stage.tape.close(cost_ns=78)
    first, last = of(ProbeHealth, stage.path)[-2:]
    newest = max(one.end_ns for one in stage.samples() if one.values)
    assert (first.cost_ns, last.cost_ns) == (77, 78)
    assert first.complete_through_ns == newest
    times = [record.t_ns for record in records(stage.path)]
    assert times == sorted(times)
    reader = RingReader(stage.path)
    assert reader.heartbeat_ns() == 0  # its last record is written
    reader.close()
