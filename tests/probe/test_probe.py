from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

import pytest

from inferscope.probe import NO_REQUEST, EngineInfo, Probe
from inferscope.probe.budget import WINDOW_NS
from inferscope.probe.requests import MAX_LIVE, RequestTable
from inferscope.records import (
    CLOSED,
    FAILED,
    OFF,
    ON,
    OVER_BUDGET,
    RUNNING,
    UNSUPPORTED,
    Clock,
    Emitted,
    Keyframe,
    Live,
    ProbeHealth,
    RequestEvent,
    StepPlan,
    StepSlices,
    StepSpan,
    Transfer,
)
from inferscope.ring.control import SWITCHED_OFF, SWITCHED_ON, control_path, open_control, switch
from inferscope.ring.layout import MIN_CAPACITY
from inferscope.ring.reader import RingReader
from tests.probe.fakes import (
    FakeClock,
    do_step,
    everything,
    make_probe,
    make_ring,
    of,
    records,
    tokens_signed,
)
from tests.probe.test_timers import made

MS = 1_000_000


def switched_probe(folder: Path, clock: FakeClock) -> Probe:
    ring = make_ring(folder, capacity=1 << 20)
    return Probe(ring, open_control(ring.path), EngineInfo(0, "test"), clock=clock)


def path_of(probe: Probe) -> Path:
    assert probe.path is not None
    return probe.path


def tend(probe: Probe, clock: FakeClock, after_ns: int = 100 * MS) -> None:
    clock.now_ns += after_ns
    probe._keeper.tend()


def test_a_step_leaves_its_five_facts_and_they_agree(tmp_path: Path) -> None:
    clock = FakeClock(step_ns=1000)
    probe = make_probe(tmp_path, clock)
    index = probe.queued("r", prompt_tokens=3, external_id="client's")
    probe.admitted(index, cached_tokens=2)
    do_step(probe, 5, [index])
    probe.finished(index, "stop")
    probe.close()
    kinds = [type(record) for record in records(path_of(probe))]
    assert kinds[:4] == [Keyframe, EngineInfo, Live, Clock]
    for kind in (StepPlan, StepSpan, StepSlices, Emitted):
        assert kinds.count(kind) == 1
    (span,), (slices,) = of(StepSpan, path_of(probe)), of(StepSlices, path_of(probe))
    assert span.digest == slices.digest != 0
    assert span.launch_start_ns < span.ready_ns
    assert of(ProbeHealth, path_of(probe))[-1].state == CLOSED


def test_time_never_runs_backwards_in_a_ring(tmp_path: Path) -> None:
    clock = FakeClock()
    probe = make_probe(tmp_path, clock)
    for at in (100, -50, 70, -200):
        clock.now_ns += at
        index = probe.queued("r", prompt_tokens=1, at_ns=clock.now_ns - 10**6)
        probe.first_byte(index, at_ns=-5)
        do_step(probe, at, [index])
    probe.close()
    times = [record.t_ns for record in records(path_of(probe))]
    assert times == sorted(times)
    assert [event.at_ns for event in of(RequestEvent, path_of(probe))].count(-5) == 4


def test_a_keyframe_that_takes_long_does_not_move_the_wall_clock(tmp_path: Path) -> None:
    clock = FakeClock(step_ns=10_000_000)
    probe = make_probe(tmp_path, clock)
    do_step(probe, 1, [probe.queued("r", prompt_tokens=1)])
    path = path_of(probe)
    probe.close()
    found = of(Clock, path)
    assert found
    assert {each.real_ns - each.at_ns for each in found} == {5}


def test_no_request_is_accepted_everywhere(tmp_path: Path) -> None:
    probe = make_probe(tmp_path, FakeClock())
    probe.tokenised(NO_REQUEST, 3)
    probe.admitted(NO_REQUEST)
    probe.preempted(NO_REQUEST)
    probe.resumed(NO_REQUEST)
    probe.transferred(NO_REQUEST, 9, start_ns=0, end_ns=1, peer="p")
    probe.first_byte(NO_REQUEST)
    probe.last_byte(NO_REQUEST)
    probe.finished(NO_REQUEST, "stop")
    do_step(probe, 1, [NO_REQUEST])
    assert probe.on
    assert not of(RequestEvent, path_of(probe))
    assert not of(Transfer, path_of(probe))


def test_an_adapter_is_recorded_by_either_side(tmp_path: Path) -> None:
    probe = make_probe(tmp_path, FakeClock())
    probe.received("a", adapter="sql")
    probe.queued("a", prompt_tokens=1, adapter="legal" * 100)
    probe.close()
    first, second = (event.adapter for event in of(RequestEvent, path_of(probe)))
    assert first == "sql"
    assert len(second) == 128


def test_a_transfer_names_both_ends(tmp_path: Path) -> None:
    probe = make_probe(tmp_path, FakeClock())
    index, long = probe.queued("mine", prompt_tokens=1), "theirs" * 100
    probe.transferred(index, 4096, start_ns=5, end_ns=9, peer="x" * 1000, peer_request_id=long)
    probe.queued(long, prompt_tokens=1)
    probe.close()
    (transfer,) = of(Transfer, path_of(probe))
    assert (transfer.index, transfer.num_bytes, transfer.start_ns, transfer.end_ns) == (
        index,
        4096,
        5,
        9,
    )
    assert len(transfer.peer) == 128
    # What is cut is cut as that engine's own probe cuts it: the two still are the same.
    assert transfer.peer_request_id == of(RequestEvent, path_of(probe))[-1].request_id


def test_a_pause_is_recorded_at_once_and_by_every_keyframe_until_its_end(tmp_path: Path) -> None:
    clock = FakeClock()
    probe = switched_probe(tmp_path, clock)
    path = path_of(probe)
    probe.unpaused()  # it was not paused
    assert [keyframe.paused_ns for keyframe in of(Keyframe, path)] == [None]
    clock.now_ns += 5 * MS
    since_ns = clock.now_ns
    probe.paused()
    probe.paused()
    tend(probe, clock, 11_000 * MS)  # a keyframe is due
    switch(path, to=SWITCHED_OFF)
    for _ in range(2):
        tend(probe, clock)
    probe.unpaused()  # recorded when the probe is switched on again
    switch(path, to=SWITCHED_ON)
    for _ in range(2):
        tend(probe, clock)
    keyframes = of(Keyframe, path)
    assert [keyframe.state for keyframe in keyframes] == [ON, ON, ON, OFF, ON]
    assert [keyframe.paused_ns for keyframe in keyframes] == [None, *[since_ns] * 3, None]


def test_a_disabled_probe_accepts_every_call() -> None:
    probe = Probe.disabled()
    index = probe.received("r")
    assert index == NO_REQUEST
    do_step(probe, 1, [index])
    probe.paused()
    probe.unpaused()
    probe.finished(index, "stop")
    probe.close()
    probe.close()


def test_texts_that_clients_choose_cannot_switch_the_probe_off(tmp_path: Path) -> None:
    probe = make_probe(tmp_path, FakeClock())
    for bad in ("\ud800", "x" * 1_000_000, "é" * 100, ""):
        index = probe.received(bad, external_id=bad, trace=bad, attributes={bad: bad})
        probe.queued(bad, prompt_tokens=1, parent=bad, external_id=bad)
        probe.finished(index, bad)
    probe.queued(7, prompt_tokens=1, at_ns=1.5e9)  # type: ignore[arg-type]
    assert probe.on
    events = of(RequestEvent, path_of(probe))
    assert len(events) == 13
    assert events[-1].at_ns == 1_500_000_000
    assert all(len((event.external_id or "").encode()) <= 128 for event in events)


def test_a_record_too_large_for_its_ring_is_left_out_and_reported_and_the_probe_goes_on(
    tmp_path: Path,
) -> None:
    clock = FakeClock()
    probe = make_probe(tmp_path, clock, capacity=MIN_CAPACITY)
    reader = RingReader(path_of(probe))
    many = list(range(3000))
    do_step(probe, 1, many)
    do_step(probe, 2, [1])
    clock.now_ns += 200 * MS
    do_step(probe, 3, [1])
    assert probe.on
    seen = everything(reader)
    assert sum(getattr(item, "num_frames", 1) for item in seen) == probe._log.ring.sequence  # type: ignore[union-attr]
    health = next(r for item in reversed(seen) if isinstance(r := _decoded(item), ProbeHealth))
    assert "2 records left out: Emitted" in health.message
    assert "INFERSCOPE_RING_MB" in health.message


def _decoded(item: object) -> object:
    from inferscope.records import decode
    from inferscope.ring.reader import Frame

    return decode(item.code, item.payload) if isinstance(item, Frame) else None


def test_a_small_ring_with_many_requests_keeps_whole_keyframes(tmp_path: Path) -> None:
    clock = FakeClock()
    probe = make_probe(tmp_path, clock, capacity=MIN_CAPACITY)
    indices = [probe.queued(f"request-{i:032}", prompt_tokens=9) for i in range(3000)]
    for step in range(300):
        clock.now_ns += 10 * MS
        do_step(probe, step, indices[-8:])
    assert probe.on
    found = records(path_of(probe))
    assert isinstance(found[0], Keyframe)
    live = [record for record in found if isinstance(record, Live)]
    assert "request-" + f"{2999:032}" in live[0].request_ids + live[1].request_ids
    assert sum(isinstance(record, Keyframe) for record in found) <= 4
    assert sum(isinstance(record, StepSlices) for record in found) > 30


@pytest.mark.thorough
def test_a_million_requests_that_never_finish_take_bounded_memory_and_time() -> None:
    table = RequestTable()
    for i in range(1_000_000):
        table.enter(table.next_index(), "r", i, 1)
    assert 0.98 * MAX_LIVE < table.num_live <= MAX_LIVE
    table.begin_list(64 << 20)
    kept, num_rows = table.next_rows(0, MAX_LIVE)
    assert len(kept.request_ids) == num_rows == table.num_live
    assert kept.requests[-4:] == (999_999).to_bytes(4, "little")


def test_switched_off_and_on_again_in_the_midst_of_a_step(tmp_path: Path) -> None:
    clock = FakeClock()
    probe = switched_probe(tmp_path, clock)
    index = probe.queued("r", prompt_tokens=1)
    do_step(probe, 1, [index])
    probe.start(2)
    switch(path_of(probe), to=SWITCHED_OFF)
    tend(probe, clock)  # within a step: it waits for the step's end
    assert probe.on
    probe.stop(2)
    probe.slices(2, requests=[index], phases=[1], tokens=[1], contexts=[1])
    probe.plan(3, start_ns=0, end_ns=0, waiting=0, running=1)
    assert not probe.on
    probe.start(3)
    probe.admitted(index)
    switch(path_of(probe), to=SWITCHED_ON)
    tend(probe, clock)
    assert probe.on
    probe.stop(3)  # of a step whose start was not seen: neither its span nor its slices
    probe.slices(3, requests=[index], phases=[1], tokens=[1], contexts=[1])
    do_step(probe, 4, [index])
    spans = [span.step for span in of(StepSpan, path_of(probe))]
    assert spans == [1, 2, 4]
    assert [keyframe.state for keyframe in of(Keyframe, path_of(probe))] == [ON, OFF, ON]
    tend(probe, clock)
    assert RingReader(path_of(probe)).pending_ns() == 0
    last = of(Live, path_of(probe))[-1]
    assert last.states == bytes([RUNNING])  # admitted while the probe was off


def test_writing_the_control_file_by_hand_does_no_harm(tmp_path: Path) -> None:
    clock = FakeClock()
    probe = switched_probe(tmp_path, clock)
    control_path(path_of(probe)).write_bytes(b"")  # a mapped byte would be SIGBUS now
    tend(probe, clock)
    assert probe.on
    control_path(path_of(probe)).write_text("0\n")
    tend(probe, clock)
    assert not probe.on
    control_path(path_of(probe)).write_text("1\n")
    tend(probe, clock)
    assert probe.on


def test_the_heart_beats_on_when_the_probe_is_off_or_has_failed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = FakeClock()
    probe = make_probe(tmp_path, clock)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            probe.fail(ValueError("lost count"))
        probe._life.write_messages()
    assert not probe.on
    assert len([r for r in caplog.records if "failed" in r.message]) == 1
    assert of(ProbeHealth, path_of(probe))[-1].state == FAILED
    tend(probe, clock)
    assert RingReader(path_of(probe)).heartbeat_ns() == clock.now_ns


def test_closing_twice_is_closing_once_and_ends_the_heartbeat(tmp_path: Path) -> None:
    clock = FakeClock()
    probe = switched_probe(tmp_path, clock)
    probe.start(1)
    probe.close()
    probe.close()
    tend(probe, clock)
    do_step(probe, 2, [1])
    probe.finished(probe.queued("late", prompt_tokens=1), "stop")
    assert RingReader(path_of(probe)).heartbeat_ns() == 0
    assert RingReader(path_of(probe)).pending_ns() == 0
    assert [health.state for health in of(ProbeHealth, path_of(probe))] == [CLOSED]


def test_spans_are_fetched_even_if_an_engine_never_reports_its_slices(tmp_path: Path) -> None:
    clock = FakeClock()
    probe = make_probe(tmp_path, clock)
    for step in range(100):
        probe.start(step, dummy=True)
        clock.now_ns += MS
        probe.stop(step)
    tend(probe, clock)
    assert [span.step for span in of(StepSpan, path_of(probe))] == list(range(100))
    assert all(span.digest == 0 for span in of(StepSpan, path_of(probe)))


@pytest.mark.parametrize("num_late", [0, 1, 2, 5])
def test_of_a_device_that_is_steps_late_each_span_is_signed_as_its_own_step(
    tmp_path: Path, num_late: int
) -> None:
    clock, _, timer = made(lag_ns=num_late * 5 * MS + MS)
    probe = make_probe(tmp_path, clock, timer=timer)
    steps = range(20)
    for step in steps:
        probe.start(step)
        clock.now_ns += 5 * MS
        probe.stop(step)
        probe.sign(step, requests=[0, 1], tokens=[step + 1, 1], prefill_tokens=step + 1)
    tend(probe, clock)
    assert tokens_signed(path_of(probe)) == {step: (step + 1, 1) for step in steps}
    worker = make_probe(tmp_path, clock, name="core")
    for step in steps:
        worker.slices(step, requests=[0, 1], phases=[0, 1], tokens=[step + 1, 1], contexts=[0, 8])
    digests = [slices.digest for slices in of(StepSlices, path_of(worker))]
    assert [span.digest for span in of(StepSpan, path_of(probe))] == digests


def test_signatures_of_steps_that_get_no_span_are_bounded_and_forgotten_when_switched(
    tmp_path: Path,
) -> None:
    probe = switched_probe(tmp_path, FakeClock())
    for step in range(1000):
        probe.sign(step, requests=[0], tokens=[1])
    assert list(probe._spans._signed) == list(range(1000 - 64, 1000))
    switch(path_of(probe), to=SWITCHED_OFF)
    probe._keeper.tend()
    assert not probe._spans._signed


def test_a_rank_without_requests_reports_throughout_a_long_step(tmp_path: Path) -> None:
    clock = FakeClock()
    probe = make_probe(tmp_path, clock)
    probe.start(0)
    for _ in range(5):
        tend(probe, clock)
    assert len(of(ProbeHealth, path_of(probe))) == 5
    probe.stop(0)
    for _ in range(5):
        tend(probe, clock)
    assert len(of(ProbeHealth, path_of(probe))) == 6


def test_two_threads_may_call_one_probe(tmp_path: Path) -> None:
    probe = make_probe(tmp_path, FakeClock(step_ns=10), capacity=8 << 20)
    is_over = threading.Event()

    def requests() -> None:
        while not is_over.is_set():
            probe.finished(probe.queued("r", prompt_tokens=1), "stop")

    def idle() -> None:
        while not is_over.is_set():
            probe._spans.last_step_ns = -(10**12)
            probe._log.keyframe_due_ns = 0
            probe._keeper.tend()

    threads = [threading.Thread(target=work) for work in (requests, requests, idle)]
    for thread in threads:
        thread.start()
    for step in range(150):
        do_step(probe, step, [1, 2, 3])
    is_over.set()
    for thread in threads:
        thread.join()
    assert probe.on
    times = [record.t_ns for record in records(path_of(probe))]
    assert times == sorted(times)


def test_over_its_budget_the_probe_sheds_plans_then_stops_and_reports_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = FakeClock(step_ns=3 * MS)  # every look at the clock costs: the probe is all there is
    probe = switched_probe(tmp_path, clock)
    num_steps = 0
    while probe.on and num_steps < 10_000:
        do_step(probe, num_steps, [1])
        num_steps += 1
    assert not probe.on
    reports = of(ProbeHealth, path_of(probe))
    shed = [report for report in reports if "left out" in report.message]
    assert shed[0].t_ns - 1_000_000_000 >= 2 * WINDOW_NS
    assert shed[0].state == ON
    assert "% of wall time" in shed[0].message
    assert reports[-1].state == OVER_BUDGET
    assert reports[-1].t_ns - shed[0].t_ns >= 2 * WINDOW_NS - 10**9
    assert of(Keyframe, path_of(probe))[-1].state == OVER_BUDGET
    plans, slices = of(StepPlan, path_of(probe)), of(StepSlices, path_of(probe))
    assert plans[-1].step < slices[-1].step
    steps = [emitted.step for emitted in of(Emitted, path_of(probe))]
    assert [record.step for record in slices[:-1]] == steps
    tend(probe, clock)
    assert not probe.on  # the byte says on, as it always did
    switch(path_of(probe), to=SWITCHED_OFF)
    tend(probe, clock)
    switch(path_of(probe), to=SWITCHED_ON)
    tend(probe, clock)
    assert probe.on
    probe._life.write_messages()
    assert len([r for r in caplog.records if "INFERSCOPE_BUDGET" in r.message]) == 2


def test_a_probe_within_its_budget_keeps_every_record(tmp_path: Path) -> None:
    clock = FakeClock(step_ns=1000)
    probe = make_probe(tmp_path, clock, capacity=8 << 20)
    for step in range(3000):
        clock.now_ns += 10 * MS
        do_step(probe, step, [1])
    assert [plan.step for plan in of(StepPlan, path_of(probe))] == list(range(3000))
    assert of(ProbeHealth, path_of(probe))[-1].message == ""
    assert 0 < of(ProbeHealth, path_of(probe))[-1].cost_ns < 30_000_000_000 * 0.01


@pytest.mark.process
def test_a_forked_child_is_silent_until_it_opens_its_own_ring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFERSCOPE_DIR", str(tmp_path))
    monkeypatch.setenv("INFERSCOPE_RING_MB", "1")
    monkeypatch.setenv("INFERSCOPE_ENGINE_ID", "fork")
    probe = Probe.open(EngineInfo(0, "test"))
    out, back = os.pipe()
    before = probe._log.ring.sequence  # type: ignore[union-attr]
    pid = os.fork()
    if pid == 0:
        try:
            silent = not probe.on and probe.path is None
            do_step(probe, 1, [1])
            probe.close()
            own = Probe.open(EngineInfo(0, "child"))
            do_step(own, 1, [1])
            os.write(back, bytes([silent, own.on, own.path != path_of(own).parent]))
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(out, 3) == b"\1\1\1"
    os.close(out)
    os.close(back)
    assert probe.on
    assert probe._log.ring.sequence >= before  # type: ignore[union-attr]
    rings = sorted(path.name for path in (tmp_path / "fork").glob("*.ring"))
    assert len(rings) == 2
    parent = list((tmp_path / "fork").glob(f"*-{os.getpid()}.ring"))
    assert [info.engine for info in of(EngineInfo, parent[0])] == ["test"]
    probe.close()


@pytest.mark.process
def test_a_child_that_is_forked_within_a_heartbeat_does_not_keep_the_parents_ring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFERSCOPE_DIR", str(tmp_path))
    monkeypatch.setenv("INFERSCOPE_RING_MB", "1")
    probe = Probe.open(EngineInfo(0, "test"))
    ring = probe._log.ring
    assert ring is not None
    handle = ring._file
    holds, may_end = threading.Event(), threading.Event()

    def use() -> None:
        with ring._in_use:
            holds.set()
            may_end.wait(60)

    other = threading.Thread(target=use)
    other.start()
    holds.wait(60)
    out, back = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            try:
                os.fstat(handle)
            except OSError:
                os.write(back, b"closed")
        finally:
            os._exit(0)
    os.close(back)
    os.waitpid(pid, 0)
    may_end.set()
    other.join()
    assert os.read(out, 9) == b"closed"
    os.close(out)
    probe.close()


def test_what_is_unsupported_is_in_every_report_and_recording_goes_on(tmp_path: Path) -> None:
    clock = FakeClock(step_ns=1000)
    probe = make_probe(tmp_path, clock)
    for number in range(20):
        probe.unsupported(f"feature {number % 10}: it is missing")
    do_step(probe, 0, [1])
    assert probe.on
    path = path_of(probe)
    last = of(ProbeHealth, path)[-1]
    assert last.unsupported == tuple(f"feature {n}: it is missing" for n in range(8))
    assert len(of(StepSpan, path)) == 1


def test_a_probe_that_can_observe_nothing_reports_that_until_its_process_ends(
    tmp_path: Path,
) -> None:
    clock = FakeClock(step_ns=1000)
    probe = switched_probe(tmp_path, clock)
    probe.unsupported("the scheduler: its class is missing", is_everything=True)
    assert not probe.on
    do_step(probe, 0, [1])
    probe._life.want(is_on=True)
    num_before = len(of(Keyframe, path := probe.path or tmp_path))
    for _ in range(3):
        clock.now_ns += 10_000_000_000
        probe._keeper.tend()
    assert not probe.on
    keyframes = of(Keyframe, path)[num_before:]
    assert [each.state for each in keyframes] == [UNSUPPORTED] * 3
    reports = of(ProbeHealth, path)
    assert reports[-1].state == UNSUPPORTED
    assert reports[-1].unsupported == ("the scheduler: its class is missing",)
    assert not of(StepSpan, path)
    probe.close()
    assert of(Keyframe, path)[-1].state == UNSUPPORTED
    assert of(ProbeHealth, path)[-1].state == CLOSED


def test_steps_counted_anew_after_switching_on_have_their_slices(tmp_path: Path) -> None:
    clock = FakeClock()
    probe = make_probe(tmp_path, clock)
    for step in range(5):
        do_step(probe, step, [0])
    for is_on in (False, True):  # while no step runs
        clock.now_ns += 10**9
        probe._life.want(is_on=is_on)
        probe._keeper.tend()
        assert probe.on is is_on
    for step in range(5):
        do_step(probe, step, [0])
        probe.sign(step, requests=[0], tokens=[1])
    probe.close()
    path = tmp_path / "a.ring"
    assert [slices.step for slices in of(StepSlices, path)] == [*range(5), *range(5)]
    assert [span.digest > 0 for span in of(StepSpan, path)] == [True] * 10
