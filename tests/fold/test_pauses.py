"""Paused engines: the requests that wait for the end of the pause, and the device's idle time."""

from __future__ import annotations

import pytest

from inferscope.fold.snapshots import EngineView
from inferscope.fold.view import snapshot
from inferscope.records import WAITING
from tests.fold.scripts import MS, START_NS, Finals, Script, assert_all_closes


def folded(script: Script, *, until_ms: float) -> tuple[EngineView, Finals]:
    collector, finals = script.play(until_ms=until_ms)
    assert_all_closes(collector, finals)
    (view,) = snapshot(collector, window_ns=10**11, mode="live").engines
    return view, finals


def frozen() -> Script:
    """One request decodes, one waits, one was preempted; all are frozen from 40 ms to 2 s."""
    script = Script()
    core = script.ring()
    names = "decodes", "held", "waits"
    decodes, held, waits = (core.queued(name) for name in names)
    core.admitted(decodes)
    core.admitted(held)
    core.step(0, [(decodes, 8, 0), (held, 8, 0)], start_ms=2, end_ms=12)
    script.at(20)
    core.preempted(held)
    core.step(1, [(decodes, 1, 8)], start_ms=22, end_ms=30)
    script.at(40)
    core.keyframe(paused_ms=40)
    script.at(1000)
    core.keyframe(paused_ms=40)
    script.at(2000)
    core.keyframe()
    script.at(2005)
    core.resumed(held)
    core.admitted(waits)
    rows = [(decodes, 1, 9), (held, 9, 0), (waits, 8, 0)]
    core.step(2, rows, start_ms=2010, end_ms=2030)
    script.at(2031)
    for index in (decodes, held, waits):
        core.finished(index)
    return script


def test_requests_that_wait_for_the_end_of_a_pause_have_cause_paused() -> None:
    view, finals = folded(frozen(), until_ms=2300)
    ledgers = {final.request_id: final.ledger_ns for final in finals.requests}
    assert ledgers["decodes"]["paused"] == 1960 * MS
    assert ledgers["decodes"]["cpu_gap"] == (2 + 10 + 10 + 10) * MS
    assert ledgers["held"]["paused"] == 1960 * MS
    assert ledgers["held"]["preempted"] == (20 + 5) * MS
    assert ledgers["waits"]["paused"] == 1960 * MS
    assert ledgers["waits"]["queue"] == (10 + 8) * MS
    assert ledgers["waits"]["queue_idle"] == (2 + 10 + 10 + 5) * MS
    assert not view.is_paused


def test_the_device_of_a_paused_engine_has_no_work() -> None:
    view, _ = folded(frozen(), until_ms=2300)
    assert view.device_total_ns["idle_no_work"] == 1960 * MS + view.wall_total_ns - 2031 * MS
    assert view.device_total_ns["idle_host_gap"] == (2 + 10 + 10 + 10 + 1) * MS


def test_request_that_runs_to_completion_in_a_pause_has_no_paused_time() -> None:
    script = Script()
    core = script.ring()
    first = core.queued("first")
    core.admitted(first)
    core.step(0, [(first, 8, 0)], start_ms=0, end_ms=10)
    script.at(15)
    core.keyframe(paused_ms=15)
    script.at(20)
    later = core.queued("later")
    core.step(1, [(first, 1, 8)], start_ms=25, end_ms=45)
    core.finished(first)
    assert folded(script, until_ms=300)[0].is_paused
    script.at(800)
    core.keyframe()
    core.admitted(later)
    core.step(2, [(later, 8, 0)], start_ms=800, end_ms=810)
    core.finished(later)
    _, finals = folded(script, until_ms=1200)
    ledgers = {final.request_id: final.ledger_ns for final in finals.requests}
    assert "paused" not in ledgers["first"]
    assert ledgers["first"]["cpu_gap"] == 15 * MS
    assert ledgers["later"]["paused"] == 780 * MS
    assert "queue" not in ledgers["later"]


def test_request_aborted_in_a_pause_has_paused_time() -> None:
    script = Script()
    core = script.ring()
    runs, waits = core.queued("runs"), core.queued("waits")
    core.admitted(runs)
    core.step(0, [(runs, 8, 0)], start_ms=0, end_ms=10)
    script.at(11)
    core.keyframe(paused_ms=11)
    script.at(500)
    core.finished(runs, "client_cancel")
    core.finished(waits, "client_cancel")
    _, finals = folded(script, until_ms=900)
    assert [final.ledger_ns["paused"] for final in finals.requests] == [489 * MS] * 2


def test_a_reader_that_comes_in_the_middle_of_a_pause_knows_of_it() -> None:
    script = Script()
    core = script.ring()
    core._ids[0] = "waits"
    script.at(5)
    core.keyframe(paused_ms=-60_000, listed=False)
    core.live([0], state=WAITING)
    assert folded(script, until_ms=300)[0].is_paused
    script.at(400)
    core.keyframe()
    core.admitted(0)
    core.step(0, [(0, 8, 0)], start_ms=400, end_ms=410)
    core.finished(0)
    _, finals = folded(script, until_ms=700)
    assert finals.only().joined_late
    assert finals.only().ledger_ns["paused"] == 395 * MS


def test_a_front_end_that_admits_no_request_counts_as_paused() -> None:
    script = Script()
    front, core = script.ring("frontend"), script.ring()
    front.keyframe(paused_ms=0)
    script.at(10)
    held = front.received("held")
    assert folded(script, until_ms=300)[0].is_paused
    script.at(600)
    front.keyframe()
    script.at(602)
    index = core.queued("held")
    core.admitted(index)
    core.step(0, [(index, 8, 0)], start_ms=602, end_ms=610)
    core.finished(index)
    front.last_byte(held)
    _, finals = folded(script, until_ms=900)
    assert finals.only().ledger_ns["paused"] == 590 * MS
    assert finals.only().ledger_ns["frontend"] == 2 * MS


@pytest.mark.parametrize("is_core_first", [False, True])
def test_request_reported_after_its_pause_has_paused_time(is_core_first: bool) -> None:
    script = Script()
    front, core = script.ring("frontend"), script.ring()
    script.at(5)
    front.keyframe(paused_ms=5)
    script.at(600)
    front.keyframe()
    script.at(602)
    held = -1 if is_core_first else front.received("held", at_ms=2)
    script.at(603)
    index = core.queued("held")
    if is_core_first:
        script.at(604)
        held = front.received("held", at_ms=2)
    script.at(605)
    core.admitted(index)
    core.step(0, [(index, 8, 0)], start_ms=605, end_ms=610)
    core.finished(index)
    front.last_byte(held)
    _, finals = folded(script, until_ms=900)
    assert finals.only().ledger_ns["paused"] == 595 * MS
    assert finals.only().ledger_ns["frontend"] == 6 * MS


def test_one_replica_of_two_that_is_paused_is_no_pause_of_the_engine() -> None:
    script = Script()
    one, other = script.ring(), script.ring(rank=1)
    one.keyframe(paused_ms=0)
    assert not folded(script, until_ms=300)[0].is_paused
    script.at(310)
    other.keyframe(dp_rank=1, paused_ms=310)
    assert folded(script, until_ms=600)[0].is_paused


def test_an_engine_that_is_started_again_is_paused_no_more() -> None:
    script = Script()
    core = script.ring()
    core.queued("in vain")
    core.keyframe(paused_ms=0)
    script.at(20_000)
    script.ring()
    view, finals = folded(script, until_ms=20_500)
    assert not view.is_paused
    assert finals.only().finish == "engine_lost"
    assert view.device_total_ns["idle_no_work"] == view.through_ns - START_NS


def test_cores_of_a_larger_run_before_do_not_keep_an_engine_from_being_paused() -> None:
    script = Script()
    for rank in (0, 1):
        script.ring("core", rank).keyframe(dp_rank=rank)
    script.at(30_000)
    core = script.ring()
    script.at(40_000)
    core.keyframe(paused_ms=40_000)
    assert folded(script, until_ms=40_300)[0].is_paused
