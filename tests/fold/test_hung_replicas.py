"""Replicas that hang in a step or run a long one, alone or together with a healthy replica."""

from __future__ import annotations

import pytest

from inferscope.attribution.blame_shares import BlameShare
from inferscope.fold import joins
from inferscope.fold.final_records import FinalRequest
from inferscope.fold.joins import OVERDUE_NS
from inferscope.records import LAST_BYTE, QUEUED
from tests.fold.scripts import MS, START_NS, Finals, Script, assert_all_closes

OVERDUE_MS = OVERDUE_NS / MS
ROUND_MS = 400
"""Time that each request of the healthy replica takes."""


class Pair:
    """Engine of two replicas; one of them begins a long step of one request at 10 ms."""

    def __init__(self) -> None:
        self.script = Script()
        self.late = self.script.ring("core", 0)
        self.other = self.script.ring("core", 1)
        self.other.keyframe(dp_rank=1)
        self.rows = [(self.late.queued(name), 8, 0) for name in ("late", "beside")]
        for row in self.rows:
            self.late.admitted(row[0])
        self.script.at(1)
        self.late.step(0, self.rows, start_ms=1, end_ms=9)
        self.script.at(10)
        self.late.plan(1)
        self.waiting = self.late.queued("waiting")

    def serve(self, until_ms: int) -> int:
        """Advance the clock; return how many requests the second replica finished meanwhile."""
        step = 0
        for ms in range(20, until_ms, ROUND_MS):
            self.script.at(ms)
            self.late.health(through_ns=self.script.now_ns - (ms - 10) * MS)
            self.other.health()
            request = self.other.queued(f"other {step}")
            self.other.admitted(request)
            self.other.step(step, [(request, 8, 0)], start_ms=ms, end_ms=ms + ROUND_MS // 2)
            self.other.finished(request)
            step += 1
        return step

    def end(self, at_ms: int) -> None:
        """End the long step of one request, and finish all three."""
        member, beside = self.rows
        self.late.script.at(at_ms)
        self.late.emitted([member[0]])
        self.late.slices(1, [(member[0], 1, 8)])
        self.late.span(1, 10, at_ms)
        self.late.admitted(self.waiting)
        self.late.step(
            2, [(member[0], 1, 9), (beside[0], 1, 8), (self.waiting, 8, 0)],
            start_ms=at_ms + 5, end_ms=at_ms + 25,
        )  # fmt: skip
        for request in (member[0], beside[0], self.waiting):
            self.late.finished(request)
        self.script.at(at_ms + 2000)
        for ring in (self.late, self.other):
            ring.health()


def of(finals: Finals, name: str) -> FinalRequest:
    (found,) = (final for final in finals.requests if final.request_id == name)
    return found


@pytest.mark.parametrize("until_ms", [25_000, 60_000])
def test_a_hung_replica_does_not_hold_back_the_requests_of_another(until_ms: int) -> None:
    pair = Pair()
    num_finished = pair.serve(until_ms)
    _, finals = pair.script.play()
    num_open = OVERDUE_MS / ROUND_MS + 1
    assert num_finished - num_open <= len(finals.requests) <= num_finished
    for final in finals.requests:
        # The request was computed in one step of 200 ms, independent of the other replica.
        ledger = final.ledger_ns
        assert ledger["prefill_own"] == pytest.approx(ROUND_MS // 2 * MS, rel=0.01), ledger


@pytest.mark.thorough
@pytest.mark.parametrize("took_ms", [3_000, 20_000, 45_000])
def test_a_long_step_that_ends_is_explained_as_if_all_had_waited_for_it(
    took_ms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair()
    num_finished = pair.serve(took_ms)
    pair.end(10 + took_ms)
    collector, finals = pair.script.play()
    assert_all_closes(collector, finals)
    assert collector.totals().num_unjoined == 0
    assert len(finals.requests) == num_finished + 3
    monkeypatch.setattr(joins, "OVERDUE_NS", 1 << 62)
    _, waited_for = pair.script.play()
    for final in finals.requests:
        expected = of(waited_for, final.request_id)
        assert final.ledger_ns == expected.ledger_ns
        assert final.ttft_ledger_ns == expected.ttft_ledger_ns
        assert final.prefill_ns == expected.prefill_ns


def test_a_request_that_ends_while_its_replica_hangs_has_a_whole_ledger() -> None:
    pair = Pair()
    pair.serve(30_000)
    pair.late.finished(pair.rows[1][0], "abort")
    pair.serve(31_000)
    pair.end(32_000)
    collector, finals = pair.script.play()
    assert_all_closes(collector, finals)


def test_the_requests_of_a_replica_that_hangs_and_is_killed_are_lost() -> None:
    pair = Pair()
    pair.serve(30_000)
    script, other = pair.script, pair.other
    for ms in range(30_000, 50_000, 1000):
        script.at(ms)
        other.health()
    collector, finals = script.play(until_ms=50_000)
    assert_all_closes(collector, finals)
    assert of(finals, "late").finish == "engine_lost"


class Alone:
    """Engine of one replica with a front end, in a long step of two requests since 10 ms.

    A client arrives every `ROUND_MS` and gives up soon; the core receives none of their requests.
    """

    def __init__(self) -> None:
        self.script = Script()
        self.core, self.front = self.script.ring("core"), self.script.ring("frontend", 1)
        self.names = ("member", "beside", "waiting", "admitted")
        self.front_indices = {name: self.front.received(name) for name in self.names}
        self.indices = {name: self.core.queued(name) for name in self.names}
        for name in self.names[:2]:
            self.core.admitted(self.indices[name])
        rows = [(self.indices[name], 8, 0) for name in self.names[:2]]
        self.core.step(0, rows, start_ms=1, end_ms=9)
        self.script.at(10)
        self.core.plan(1)
        self.script.at(11)
        self.core.admitted(self.indices["admitted"])
        self.script.at(15)
        indices = [self.front_indices[name] for name in self.names[:2]]
        self.front.emitted(indices)

    def hang(self, until_ms: int) -> int:
        """Advance the clock; return the number of clients that gave up meanwhile."""
        num = 0
        for ms in range(20, until_ms, ROUND_MS):
            self.script.at(ms)
            self.core.health(through_ns=START_NS + 10 * MS)
            gone = self.front.received(f"gone {num}")
            self.script.at(ms + 40)
            self.front.finished(gone, "client_cancel")
            self.front.event(gone, LAST_BYTE)
            self.front.health()
            num += 1
        return num

    def arrive(self, name: str, *, at_ms: int, written_ms: int) -> None:
        """Queue a request in the core during the step; its loop reports it after the step."""
        self.names += (name,)
        self.script.at(written_ms)
        self.indices[name] = self.core.enter(QUEUED, name, at_ms=at_ms, prompt_tokens=8)

    def end(self, at_ms: int) -> None:
        """End the step, and finish all requests."""
        core, rows = self.core, [(self.indices["member"], 1, 8), (self.indices["admitted"], 8, 0)]
        self.script.at(at_ms)
        core.emitted([row[0] for row in rows])
        core.slices(1, rows)
        core.span(1, 12, at_ms)
        self.arrive("late", at_ms=at_ms // 2, written_ms=at_ms)
        for name in ("waiting", "late"):
            core.admitted(self.indices[name])
        rows = [(self.indices[name], 8, 8 * (name == "beside")) for name in self.names[1:3]]
        rows += [(self.indices["admitted"], 1, 8), (self.indices["late"], 8, 0)]
        core.step(2, rows, start_ms=at_ms + 5, end_ms=at_ms + 25)
        for name in self.names:
            core.finished(self.indices[name])
            if name in self.front_indices:
                self.front.event(self.front_indices[name], LAST_BYTE)
        self.script.at(at_ms + 2000)
        for ring in (core, self.front):
            ring.health()


def test_an_engine_of_one_replica_that_hangs_does_not_hold_back_the_clients_that_give_up() -> None:
    engine = Alone()
    num_gone = engine.hang(60_000)
    collector, finals = engine.script.play()
    num_open = OVERDUE_MS / ROUND_MS + 3
    assert num_gone - num_open <= len(finals.requests) <= num_gone
    (fold,) = collector.engines.values()
    assert len(list(fold.lives.table.alive())) <= num_open + len(engine.names)
    assert_all_closes(collector, finals)


@pytest.mark.parametrize("took_ms", [3_000, 20_000, 45_000])
def test_a_long_step_of_the_only_replica_is_explained_as_if_all_had_waited_for_it(
    took_ms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch_ms = 2
    engine = Alone()
    num_gone = engine.hang(took_ms)
    engine.end(took_ms + 10)
    collector, finals = engine.script.play()
    assert_all_closes(collector, finals)
    assert collector.totals().num_unjoined == 0
    assert len(finals.requests) == num_gone + len(engine.names)
    monkeypatch.setattr(joins, "OVERDUE_NS", 1 << 62)
    _, waited_for = engine.script.play()
    for final in finals.requests:
        expected = of(waited_for, final.request_id)
        for ledger, waited in (
            (final.ledger_ns, expected.ledger_ns),
            (final.ttft_ledger_ns, expected.ttft_ledger_ns),
        ):
            # Until its end is known, a step counts as busy from its plan, not from its launch.
            for cause in {*ledger, *waited}:
                assert abs(ledger.get(cause, 0) - waited.get(cause, 0)) <= launch_ms * MS
            if "queue" not in ledger:
                assert ledger == waited
        assert final.prefill_ns == expected.prefill_ns


def test_the_queue_behind_a_long_step_is_blamed_on_the_request_that_runs() -> None:
    script = Script()
    core = script.ring()
    runs = core.queued("runs")
    core.admitted(runs)
    core.step(0, [(runs, 8, 0)], start_ms=1, end_ms=10)
    script.at(10.5)
    waits = core.queued("waits")
    script.at(11)
    core.plan(1)
    core.slices(1, [(runs, 1, 8)])
    for ms in range(500, 15_000, 500):
        script.at(ms)
        core.health(through_ns=START_NS + 11 * MS)
    script.at(15_000)
    core.span(1, 11, 15_000)
    core.emitted([runs])
    script.at(15_001)
    core.admitted(waits)
    core.finished(waits)
    collector, finals = script.play(until_ms=17_000)
    final = of(finals, "waits")
    assert final.ledger_ns["queue"] == 14_989 * MS
    assert final.blame == (BlameShare("queue", "runs", 14_989 * MS),)
    assert_all_closes(collector, finals)


def test_requests_of_a_step_that_never_ends_are_final_when_they_fail() -> None:
    engine = Alone()
    script, core = engine.script, engine.core
    script.at(20)
    core.finished(engine.indices["member"], "error")
    core.finished(engine.indices["waiting"], "abort")
    for name in ("member", "waiting"):
        engine.front.event(engine.front_indices[name], LAST_BYTE)
    for ms in range(100, 15_000, 100):
        script.at(ms)
        core.health(through_ns=START_NS + 10 * MS)
        engine.front.health()
    collector, finals = script.play()
    assert {final.request_id for final in finals.requests} == {"member", "waiting"}
    assert_all_closes(collector, finals)


@pytest.mark.thorough
@pytest.mark.parametrize("changes", [("preempted",), ("preempted", "resumed"), ("admitted",)])
def test_a_request_that_stops_or_begins_to_run_in_a_long_step_is_explained_as_by_waiting(
    changes: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair()
    for ms, change in zip((12_000, 17_000), changes, strict=False):
        pair.script.at(ms)
        getattr(pair.late, change)(pair.waiting if change == "admitted" else pair.rows[1][0])
    pair.serve(30_000)
    pair.end(30_010)
    pair.script.entries.sort(key=lambda ledger: ledger[1].t_ns)
    collector, finals = pair.script.play()
    assert_all_closes(collector, finals)
    monkeypatch.setattr(joins, "OVERDUE_NS", 1 << 62)
    _, waited_for = pair.script.play()
    for final in finals.requests:
        assert final.ledger_ns == of(waited_for, final.request_id).ledger_ns


def test_a_request_that_hangs_is_slowed_down_as_long_as_nothing_else_is_known() -> None:
    engine = Alone()
    engine.hang(30_000)
    collector, _ = engine.script.play()
    (fold,) = collector.engines.values()
    request = fold.lives.table.by_id["admitted"]
    ledger_ns = fold.lives.ledger_of(request, fold.now_ns, unfolded=fold.unfolded)
    assert sum(ledger_ns.values()) > 19_000 * MS
    assert ledger_ns["slowdown"] == pytest.approx(sum(ledger_ns.values()), rel=0.01)
    (device,) = collector.devices()
    assert device.wall_ns < 20 * MS  # its state during the hung step is unknown
