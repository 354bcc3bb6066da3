"""Keyframes of engines with tens of thousands of requests in flight, or that never finish any."""

from __future__ import annotations

from pathlib import Path
from time import thread_time_ns

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferscope.fold.fold import Collector
from inferscope.probe import Probe
from inferscope.probe.log import _ROWS_AT_ONCE, _ROWS_PER_RECORD
from inferscope.probe.requests import MAX_LIVE, RequestTable
from inferscope.records import (
    RUNNING,
    WAITING,
    Clock,
    Keyframe,
    Live,
    Missed,
    ProbeHealth,
    Record,
    RequestIndex,
    RingOpened,
    Tick,
)
from tests.probe.fakes import FakeClock, make_probe, of, records

OPENED = RingOpened(1, 1, "engine", "core", 0, 1, "host", "boot", 1, 2)


def indices(live: Live) -> list[int]:
    return np.frombuffer(live.requests, "<u4").tolist()


def crowded(folder: Path, num: int) -> tuple[Probe, FakeClock, Path]:
    """Return a probe with `num` requests in flight, 100 of them admitted."""
    clock = FakeClock(step_ns=1000)
    probe = make_probe(folder, clock, capacity=8 << 20)
    for number in range(num):
        index = probe.queued(f"r{number}", prompt_tokens=1)
        if number % (num // 100) == 0:
            probe.admitted(index)
    path = probe.path
    assert path is not None
    return probe, clock, path


def plan(probe: Probe) -> None:
    probe.plan(1, start_ns=0, end_ns=1, waiting=0, running=1)


def keyframe(probe: Probe, clock: FakeClock) -> int:
    """Write a whole keyframe; return the number of calls it took."""
    clock.now_ns += 11 * 10**9
    plan(probe)
    num = 1
    while probe._log.is_listing:
        plan(probe)
        num += 1
    return num


def test_a_keyframe_of_many_requests_is_spread_over_calls(tmp_path: Path) -> None:
    num = 9000
    probe, clock, path = crowded(tmp_path, num)
    num_calls = keyframe(probe, clock)
    found = records(path)
    last = max(at for at, record in enumerate(found) if isinstance(record, Keyframe))
    parts: list[int] = [0]
    listed: list[int] = []
    for record in found[last:]:
        if isinstance(record, Live):
            parts[-1] += len(record.states)
            listed += indices(record)
            if len(listed) <= 100:  # what steps speak of comes first, and at once
                assert set(record.states) == {RUNNING}
        elif type(record).__name__ == "StepPlan":
            parts.append(0)
    assert max(parts) <= _ROWS_AT_ONCE
    assert num_calls >= (num - _ROWS_AT_ONCE) / _ROWS_PER_RECORD
    assert sorted(listed) == list(range(num))
    assert isinstance(found[-1], Clock)
    probe.close()


@pytest.mark.thorough
def test_no_call_takes_long_for_a_keyframe_of_a_full_table(tmp_path: Path) -> None:
    probe, clock, _ = crowded(tmp_path, MAX_LIVE)
    rounds = []
    for _ in range(4):
        clock.now_ns += 11 * 10**9
        took_ns = []
        while True:
            began_ns = thread_time_ns()
            plan(probe)
            took_ns.append(thread_time_ns() - began_ns)
            if not probe._log.is_listing:
                break
        rounds.append(took_ns)
    # Of each call the best round: the machine has other things to do. All was one call of 38 ms.
    assert len(rounds[0]) == len(rounds[1])
    best_ns = [min(of_call) for of_call in zip(*rounds, strict=True)]
    assert max(best_ns) < 0.25 * sum(best_ns)
    probe.close()


@pytest.mark.thorough
def test_a_reader_keeps_and_a_late_one_finds_all_that_is_in_flight(tmp_path: Path) -> None:
    probe, clock, path = crowded(tmp_path, 6000)
    keyframe(probe, clock)
    # While the next one is listed requests enter, are admitted and leave.
    clock.now_ns += 11 * 10**9
    plan(probe)
    num = 6000
    while probe._log.is_listing:
        probe.queued(f"r{num}", prompt_tokens=1)
        probe.finished(RequestIndex(num - 6000), "stop")
        probe.admitted(RequestIndex(num - 3000))
        num += 1
    assert num > 6005
    in_flight = {f"r{number}" for number in range(num - 6000, num)}
    found = records(path)
    keyframes = [at for at, record in enumerate(found) if isinstance(record, Keyframe)]
    for start, has_lost in ((0, False), (keyframes[-2], True), (keyframes[-1], True)):
        collector = Collector()
        collector.fold(1, OPENED)
        for at, record in enumerate(found[start:], start):
            if has_lost and at == keyframes[-1] + 1:
                collector.fold(-1, Missed(record.t_ns, 1, 3, "lapped"))
            collector.fold(1, record)
            if at == keyframes[-1] + 3:  # an anchor of the device's clock does not end it
                collector.fold(1, Clock(record.t_ns, 0, 5, 1, record.t_ns))
        (engine,) = collector.engines.values()
        engine_end(collector, found[-1])
        alive = {request.request_id for request in engine.lives.table.alive()}
        assert alive >= in_flight
        assert alive - in_flight <= {f"r{number}" for number in range(num - 6000)}
    probe.close()


def engine_end(collector: Collector, last: Record) -> None:
    """Fold a tick, so that the timeline is carried out."""
    collector.fold(-1, Tick(last.t_ns + 10**6, last.t_ns))


def test_an_idle_or_switched_off_engines_keyframe_is_ended_beside_it(tmp_path: Path) -> None:
    probe, clock, path = crowded(tmp_path, 6000)
    clock.now_ns += 11 * 10**9
    plan(probe)
    probe._life.want(is_on=False)
    plan(probe)
    assert not probe.on
    assert probe._log.is_listing
    for _ in range(10):
        clock.now_ns += 10**8
        probe._keeper.tend()
    found = records(path)
    last = max(at for at, record in enumerate(found) if isinstance(record, Keyframe))
    listed = [at for record in found[last:] if isinstance(record, Live) for at in indices(record)]
    assert sorted(listed) == list(range(6000))
    assert any(isinstance(record, Clock) for record in found[last:])
    probe.close()


moves = st.lists(
    st.tuples(st.sampled_from(["enter", "admit", "leave", "begin", "list"]), st.integers(0, 60)),
    max_size=120,
)


@settings(max_examples=150)
@given(moves=moves, num_at_once=st.sampled_from([0, 3, 4096]))
def test_a_list_names_all_that_is_in_flight_at_its_end(
    moves: list[tuple[str, int]], num_at_once: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("inferscope.probe.requests._MOST_NAMED_AT_ONCE", num_at_once)
        table, in_flight, listed = RequestTable(), set[int](), set[int]()
        for move, number in [*moves, ("begin", 0), *[("list", 7)] * 40]:
            if move == "enter":
                index = table.next_index()
                table.enter(index, "r", 0, 0)
                in_flight.add(index)
            elif move == "admit":
                table.change(RequestIndex(number), RUNNING, None, None)
            elif move == "leave":
                table.leave(RequestIndex(number))
                in_flight.discard(number)
            elif move == "begin":
                listed.clear()
                table.begin_list(1 << 30)
            elif not table.is_listed:
                live, num_rows = table.next_rows(0, number % 8 + 1)
                listed.update(indices(live))
                table.pass_over(num_rows)
                if table.is_listed:
                    assert listed >= in_flight
        assert table.is_listed
        assert table.num_live == len(in_flight)


def test_to_enter_takes_the_same_after_many_requests() -> None:
    def entering_ns(table: RequestTable) -> int:
        began_ns = thread_time_ns()
        for _ in range(5000):
            table.enter(table.next_index(), "r", 0, 0)
        return thread_time_ns() - began_ns

    table = RequestTable()
    table.enter(table.next_index(), "stays", 0, 0)
    for _ in range(200_000):  # and leave: there is nothing but a gap behind the first
        index = table.next_index()
        table.enter(index, "r", 0, 0)
        table.leave(RequestIndex(index))
    after_ns = min(entering_ns(table) for _ in range(4))
    assert table.num_live == 20_001
    for _ in range(MAX_LIVE):
        table.enter(table.next_index(), "r", 0, 0)
    full_ns = min(entering_ns(table) for _ in range(4))
    assert MAX_LIVE - 5000 < table.num_live <= MAX_LIVE
    # Walking over the gap took 100 ns for each that had left: thousands of times as long.
    new_ns = max(entering_ns(RequestTable()) for _ in range(4))
    assert after_ns < 20 * new_ns
    assert full_ns < 20 * new_ns


@pytest.mark.parametrize("event", ["tokenised", "first_byte", "last_byte"])
def test_an_event_that_changes_no_state_leaves_a_running_request_running(
    tmp_path: Path, event: str
) -> None:
    probe = make_probe(tmp_path, FakeClock())
    running, waiting = probe.queued("a", prompt_tokens=3), probe.queued("b", prompt_tokens=3)
    probe.admitted(running)
    for index in (running, waiting):
        {
            "tokenised": lambda index: probe.tokenised(index, 4),
            "first_byte": probe.first_byte,
            "last_byte": probe.last_byte,
        }[event](index)
    probe._log.restate(2_000_000_000)
    live = of(Live, tmp_path / "a.ring")[-1]
    assert sorted(live.states) == ([] if event == "last_byte" else [WAITING, RUNNING])
    probe.close()


def test_the_clock_of_a_keyframe_begun_late_is_right(tmp_path: Path) -> None:
    clock = FakeClock()
    probe = make_probe(tmp_path, clock)
    began_ns = clock.now_ns
    clock.now_ns += 2 * 10**9
    probe.queued("late", prompt_tokens=1)
    probe._log.restate(began_ns)  # by a thread that was held up since
    probe.close()
    clocks = of(Clock, tmp_path / "a.ring")
    assert {each.real_ns - each.t_ns for each in clocks} == {5}


def test_an_idle_engines_report_has_the_time_at_which_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One with an earlier time would come behind the reader's fold."""
    clock = FakeClock()
    probe = make_probe(tmp_path, clock)
    probe.queued("r", prompt_tokens=1)
    clock.now_ns += 10**9

    def read_slowly(now_ns: int) -> None:
        clock.now_ns += 700_000_000  # another thread has the interpreter's lock

    monkeypatch.setattr(probe._keeper, "_read_host", read_slowly)
    monkeypatch.setattr(probe._keeper._host, "is_due", lambda now_ns: True)
    probe._keeper.tend()
    assert of(ProbeHealth, tmp_path / "a.ring")[-1].t_ns == clock.now_ns
    probe.close()
