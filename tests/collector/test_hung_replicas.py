"""A replica that hangs in a step, or takes long to end one, while another continues to serve."""

from __future__ import annotations

import pytest

from inferscope.collector import joins
from inferscope.collector.finals import FinalRequest
from inferscope.collector.joins import OVERDUE_NS
from tests.collector.scripts import MS, Finals, Script, assert_all_closes

OVERDUE_MS = OVERDUE_NS / MS
ROUND_MS = 400
"""Time that each request of the healthy replica takes."""


class Pair:
    """Two replicas of an engine, of which one begins a long step of one request at 10 ms."""

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
        # A request that a step of 200 ms has served, whatever the other replica did.
        ledger = final.ledger_ns
        assert ledger["prefill_own"] == pytest.approx(ROUND_MS // 2 * MS, rel=0.01), ledger


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
