from __future__ import annotations

import pytest
from msgspec.structs import replace

from inferscope.fold.clocks import DeviceClock
from inferscope.fold.steps import rank_span
from inferscope.fold.view import snapshot
from inferscope.records import Clock, Emitted, EngineInfo, Live, RequestEvent, StepSlices, StepSpan
from tests.cost.shapes import LLAMA_8B
from tests.fold.scripts import MS, START_NS, Finals, Ring, Script, assert_all_closes


def two_ranks(script: Script) -> tuple[Ring, Ring, int]:
    """Open a core whose steps two worker ranks execute, with one request."""
    core = script.ring(ranks=2)
    first, second = script.ring("worker", 0, ranks=2), script.ring("worker", 1, ranks=2)
    mine = core.queued("a")
    script.at(1)
    core.admitted(mine)
    return first, second, mine


def test_the_ranks_of_a_step_are_waited_for_and_their_cost_is_summed() -> None:
    script = Script()
    first, second, mine = two_ranks(script)
    core = script.rings[0]
    script.at(2)
    core.plan(0)
    script.at(12)
    first.span(0, 2, 12)
    core.slices(0, [(mine, 8, 0)])
    core.emitted([mine])
    script.at(16)
    second.span(0, 3, 16)
    script.at(17)
    core.finished(mine)
    collector, finals = script.play(until_ms=400)
    final = finals.only()
    assert [(step.rank, step.measured_ns) for step in finals.steps] == [(0, 10 * MS), (1, 13 * MS)]
    assert final.prefill_ns == 23 * MS
    assert final.ledger_ns["rank_wait"] == 4 * MS
    assert_all_closes(collector, finals)
    assert snapshot(collector, window_ns=10**9, mode="live").engines[0].num_ranks_seen == 2


def test_a_killed_rank_delays_no_step() -> None:
    script = Script()
    first, second, mine = two_ranks(script)
    core = script.rings[0]
    for n in range(4):
        script.at(10 * n + 2)
        core.plan(n)
        script.at(10 * n + 10)
        first.span(n, 10 * n + 2, 10 * n + 10)
        if n < 2:
            second.span(n, 10 * n + 2, 10 * n + 10)
        core.slices(n, [(mine, 1, 8 + n)])
        core.emitted([mine])
    core.finished(mine)
    for second_s in range(1, 8):
        script.at(1000 * second_s)
        core.health()
        first.health()
    collector, finals = script.play()
    assert finals.only().finish == "stop"
    assert [step.step for step in finals.steps] == [0, 0, 1, 1, 2, 3]
    view = snapshot(collector, window_ns=10**9, mode="live").engines[0]
    assert (view.num_partial, view.num_ranks_seen, view.num_ranks) == (2, 1, 2)
    assert_all_closes(collector, finals)


@pytest.mark.parametrize("idle_ms", [1_000, 5_500, 9_900])
def test_the_first_step_after_an_idle_time_waits_for_its_span(idle_ms: int) -> None:
    """Serve an idle worker, which reports every 10 s, a first step longer than a Tick."""
    script = Script()
    core, worker = script.ring(), script.ring("worker")
    script.at(idle_ms)
    mine = core.queued("a")
    core.admitted(mine)
    core.plan(0)
    core.slices(0, [(mine, 8, 0)])
    for ms in range(100, 700, 100):
        script.at(idle_ms + ms)
        core.health()
    script.at(idle_ms + 700)
    worker.span(0, idle_ms + 1, idle_ms + 700)
    core.emitted([mine])
    core.finished(mine)
    collector, finals = script.play(until_ms=idle_ms + 1_500)
    assert collector.totals().num_unjoined == 0
    assert finals.only().prefill_ns == 699 * MS
    assert_all_closes(collector, finals)


def test_a_worker_that_died_while_idle_holds_up_a_step_for_its_time() -> None:
    script = Script()
    core, worker = script.ring(), script.ring("worker")
    mine = core.queued("a")
    core.admitted(mine)
    core.plan(0)
    worker.span(0, 1, 9)
    script.at(10)
    core.slices(0, [(mine, 8, 0)])
    core.emitted([mine])
    for second_s in range(1, 8):
        script.at(1_000 * second_s)
        core.health()
    core.plan(1)
    core.slices(1, [(mine, 1, 8)])
    core.finished(mine)
    for second_s in range(8, 14):
        script.at(1_000 * second_s)
        core.health()
    collector, finals = script.play()
    assert finals.only().finish == "stop"
    assert [step.step for step in finals.steps] == [0]
    assert_all_closes(collector, finals)


def test_the_slices_of_a_long_step_in_a_worker_are_waited_for() -> None:
    script = Script()
    core, worker = script.ring(), script.ring("worker")
    mine = core.queued("a")
    core.admitted(mine)
    script.at(2)
    core.plan(0)
    for ms in range(100, 1_500, 100):
        script.at(ms)
        core.health()  # it has no spans of its own: no step is open here
        worker.health(through_ns=START_NS + 3 * MS)
    script.at(1_500)
    worker.span(0, 3, 1_500)
    script.at(1_502)
    core.slices(0, [(mine, 8, 0)])
    core.emitted([mine])
    core.finished(mine)
    collector, finals = script.play(until_ms=2_500)
    assert collector.totals().num_unjoined == 0
    assert finals.only().prefill_ns == 1_497 * MS
    assert_all_closes(collector, finals)


def test_a_span_that_comes_after_its_step_was_split_is_counted_and_blocks_nothing() -> None:
    script = Script()
    core, silent = script.ring(), script.ring(rank=1)
    mine = core.queued("a")
    core.admitted(mine)
    core.step(0, [(mine, 8, 0)], start_ms=1, end_ms=9)
    script.at(9.5)
    silent.span(0, 1, 9)
    script.at(10)
    core.finished(mine)
    core.health()
    collector, finals = script.play_in_report_order()
    assert collector.num_unjoined == 1
    assert finals.only().finish == "stop"


def test_a_step_that_is_planned_and_never_run_does_not_stop_the_clock() -> None:
    script = Script()
    core = script.ring()
    mine = core.queued("a")
    core.admitted(mine)
    script.at(1)
    core.plan(0)
    script.at(2)
    core.finished(mine, "error")
    for tenth in range(1, 20):
        script.at(100 * tenth)
        core.health()
    collector, finals = script.play()
    assert finals.only().finish == "error"
    assert collector.num_unjoined == 0
    assert_all_closes(collector, finals)


def test_step_with_a_dropped_span_is_skipped_by_the_next() -> None:
    script = Script()
    core = script.ring()
    mine = core.queued("a")
    core.admitted(mine)
    core.step(0, [(mine, 8, 0)], start_ms=1, end_ms=9)
    script.at(10)
    core.plan(1)
    script.at(18)
    core.slices(1, [(mine, 1, 8)])
    core.emitted([mine])
    core.step(2, [(mine, 1, 9)], start_ms=20, end_ms=28)
    core.finished(mine)
    core.health()
    collector, finals = script.play(until_ms=400)
    assert [step.step for step in finals.steps] == [0, 2]
    assert collector.num_unjoined == 1
    assert finals.only().output_tokens == 3
    assert_all_closes(collector, finals)


def test_step_with_lost_slices_is_skipped_by_the_next() -> None:
    script = Script()
    core = script.ring()
    mine = core.queued("a")
    core.admitted(mine)
    core.step(0, [(mine, 8, 0)], start_ms=1, end_ms=9)
    script.at(18)
    core.span(1, 10, 18)
    core.step(2, [(mine, 1, 9)], start_ms=20, end_ms=28)
    core.finished(mine)
    core.health()
    collector, finals = script.play()
    collector.end()
    assert [step.step for step in finals.steps] == [0, 2]
    assert collector.num_unjoined == 1
    assert_all_closes(collector, finals)


def test_a_digest_that_differs_is_never_joined() -> None:
    script = Script()
    core = script.ring()
    mine = core.queued("a")
    script.at(10)
    core.span(0, 1, 10, digest=5)
    core.slices(0, [(mine, 8, 0)])
    core.health()
    collector, finals = script.play(until_ms=300)
    assert not finals.steps
    assert collector.num_unjoined == 1
    assert_all_closes(collector, finals)


def test_replicas_count_their_own_steps() -> None:
    script = Script()
    cores = [script.ring(rank=rank) for rank in range(2)]
    mine = []
    for dp_rank, core in enumerate(cores):
        core.keyframe(dp_rank=dp_rank)
        mine.append(core.queued(str(dp_rank)))
        core.admitted(mine[-1])
    for n in range(3):
        for dp_rank, core in enumerate(cores):
            rows = [(mine[dp_rank], 1 + dp_rank, 8 + 2 * n)]
            core.step(n, rows, start_ms=10 * n + 1 + dp_rank, end_ms=10 * n + 9 + dp_rank)
    for dp_rank, core in enumerate(cores):
        core.finished(mine[dp_rank])
    collector, finals = script.play(until_ms=300)
    assert collector.num_unjoined == 0
    assert sorted((step.dp_rank, step.step) for step in finals.steps) == [
        (dp_rank, n) for dp_rank in range(2) for n in range(3)
    ]
    assert_all_closes(collector, finals)


def test_a_dummy_step_waits_for_all_ranks_too() -> None:
    script = Script()
    core, worker = script.ring(), script.ring(role="worker", rank=1)
    mine = core.queued("a")
    core.admitted(mine)
    core.step(0, [(mine, 8, 0)], start_ms=1, end_ms=9)
    script.at(9.5)
    worker.span(0, 1, 9)
    script.at(20)
    core.span(1, 12, 20, dummy=True)
    script.at(21)
    worker.span(1, 12, 19, dummy=True)
    script.at(30)
    core.span(2, 22, 30)
    worker.span(2, 22, 30)
    core.slices(2, [(mine, 1, 8)])
    core.emitted([mine])
    core.finished(mine)
    core.health()
    worker.health()
    collector, finals = script.play(until_ms=300)
    assert collector.num_unjoined == 0
    assert [(step.step, step.rank) for step in finals.steps] == [
        (step, rank) for step in range(3) for rank in range(2)
    ]
    assert [step.unattributed_ns for step in finals.steps[2:4]] == [8 * MS, 7 * MS]


def test_dummy_steps_and_padding_are_rows_of_their_own() -> None:
    script = Script()
    core = script.ring()
    mine = core.queued("a")
    core.admitted(mine)
    core.step(0, [(mine, 8, 0)], start_ms=1, end_ms=9)
    script.at(20)
    core.span(1, 12, 20, dummy=True)
    script.at(30)
    core.span(2, 22, 30, padded_tokens=64)
    core.slices(2, [(mine, 1, 8)])
    core.emitted([mine])
    core.finished(mine)
    core.health()
    collector, finals = script.play(until_ms=300)
    assert [step.unattributed_ns for step in finals.steps] == [0, 8 * MS, 0]
    assert finals.steps[2].padding_ns > 0
    device = collector.devices()[0]
    assert device.seconds_by_ns["unattributed"] == 8 * MS
    assert device.seconds_by_ns["padding"] == finals.steps[2].padding_ns
    assert finals.only().ledger_ns["not_scheduled"] == 8 * MS
    assert_all_closes(collector, finals)


def test_steps_that_overlap_and_come_unannounced_still_sum_to_the_wall() -> None:
    script = Script()
    core = script.ring()
    mine = core.queued("a")
    core.admitted(mine)
    for n in range(6):  # each is launched while the previous one still runs
        script.at(20 + 10 * n)
        core.span(n, 10 * n, 20 + 10 * n)
        core.slices(n, [(mine, 1, 8 + n)])
        core.emitted([mine])
        if n == 3:
            core.health()
    core.finished(mine)
    collector, finals = script.play(until_ms=2_000)
    device = collector.devices()[0]
    assert device.seconds_by_ns["decode"] == 70 * MS
    assert sum(step.measured_ns for step in finals.steps) == 120 * MS
    assert_all_closes(collector, finals)


def test_a_step_that_began_before_the_fold_did_still_sums_to_the_wall() -> None:
    script = Script()
    script.at(50)
    core = script.ring()
    mine = core.queued("a")
    script.at(60)
    core.span(7, 20, 60)
    core.slices(7, [(mine, 1, 8)])
    core.health()
    collector, finals = script.play(until_ms=400)
    assert collector.devices()[0].seconds_by_ns["decode"] == 10 * MS
    assert_all_closes(collector, finals)


def test_a_device_span_lies_between_launch_and_readiness_on_any_clock() -> None:
    clock = DeviceClock()
    span = StepSpan(100 * MS, 0, 0, 10 * MS, 11 * MS, 50 * MS, 1_000 * MS, 1_020 * MS)
    run = rank_span(span, clock, ring=1, rank=0)  # before the first anchor: up to readiness
    assert (run.clock, run.measured_ns, run.end_ns) == ("device", 20 * MS, 50 * MS)
    clock.anchor(1_000 * MS, 25 * MS, 0)
    assert rank_span(span, clock, ring=1, rank=0).start_ns == 25 * MS
    for wrong_ns, start_ns in ((5 * MS, 10 * MS), (45 * MS, 30 * MS)):
        clock = DeviceClock()
        clock.anchor(1_000 * MS, wrong_ns, 0)
        assert rank_span(span, clock, ring=1, rank=0).start_ns == start_ns
    nonsense = replace(span, device_end_ns=10**18)
    assert rank_span(nonsense, clock, ring=1, rank=0).clock == "host"


def test_device_time_follows_a_clock_that_drifts() -> None:
    clock = DeviceClock()
    for n in range(100):  # 100 ppm fast, and anchored every 2 s
        clock.anchor(round(n * 2e9 * 1.0001), round(n * 2e9), 0)
    assert clock.host_ns(round(197.3e9 * 1.0001)) == round(197.3e9)
    assert clock.host_ns(round(199e9 * 1.0001)) == round(199e9)
    clock.anchor(0, 10**15, 0)
    assert clock.host_ns(round(199e9 * 1.0001)) == round(199e9)


def test_malformed_columns_and_unknown_reasons_are_counted() -> None:
    script = Script()
    core = script.ring()
    mine = core.queued("a")
    core.admitted(mine)
    t_ns = script.now_ns
    three = b"\1\0\0"
    for record in (
        Emitted(t_ns, three, three),
        Emitted(t_ns, b"\0" * 4, b"\1\0\0\0" * 2),
        Emitted(t_ns, b"\0" * 4, b""),
        StepSlices(t_ns, 0, 0, three, b"", b"", b""),
        StepSpan(t_ns, 0, 0, t_ns, t_ns, t_ns),
        StepSlices(t_ns, 1, 0, b"\0" * 4, b"\1", b"\1\0\0\0" * 2, b""),
        StepSpan(t_ns, 1, 0, t_ns, t_ns, t_ns),
        Live(t_ns, three, b"", b"", b"", b"", ()),
        Live(t_ns, b"\0" * 4, b"", b"", b"", b"", ("a", "b")),
        RequestEvent(t_ns, mine, 77, t_ns),
        RequestEvent(t_ns, 99, 8, t_ns, reason="stop"),
        RequestEvent(t_ns, -5, 2, t_ns, "minus"),
        RequestEvent(t_ns, 1 << 70, 2, t_ns, "large"),
        RequestEvent(t_ns, mine, 3, 1 << 63),
        Clock(t_ns, 0, 5, 0, 1 << 63),
        Emitted(1 << 63, b"", b""),
        StepSpan(t_ns, 5, 0, -(1 << 62), 0, 1 << 63, 1 << 62, 1 << 63),
    ):
        core.write(record)
    core.step(
        6, [(mine, 8, 0), (mine, 0, 8), (mine, 4_000_000_000, 4_000_000_000)], start_ms=1, end_ms=9
    )
    core.finished(mine, "an unknown reason")
    core.health()
    collector, finals = script.play_in_report_order()
    assert finals.only().finish == "error"
    assert collector.num_unjoined >= 6
    assert collector.num_unknown == 1
    assert_all_closes(collector, finals)


_MOST = 2**32 - 1


@pytest.mark.parametrize(
    ("rows", "columns", "is_joined"),
    [
        ([(0, _MOST, 0), (1, 1, 8)], {}, False),
        ([(0, _MOST, _MOST), (1, _MOST, _MOST)], {}, False),
        ([(0, 8, _MOST), (1, 1, _MOST)], {}, True),
        ([(0, 8, 0), (1, 4, 8)], {"proposed": b"\1\2\3", "phases": b"\1\2"}, True),
        ([(0, 8, 0), (1, 4, 8)], {"proposed": b"\1\2\3\4", "accepted": b"\1"}, True),
        ([(0, 8, 0), (1, 4, 8)], {"phases": b"\xc8\xff", "flags": b"\xff\xff"}, True),
        ([(0, 0, 0), (1, 0, 0)], {"sampled": b"\xff" * 4}, True),
    ],
)
def test_impossible_step_changes_no_other_request(
    rows: list[tuple[int, int, int]], columns: dict[str, bytes], is_joined: bool
) -> None:
    script = Script()
    core = script.ring()
    core.write(EngineInfo(script.now_ns, "made-up", shape=LLAMA_8B, device="gpu"))
    parts = (("system", 4), ("user", 2**62))
    mine, other = core.queued("a", prompt_parts=parts), core.queued("b")
    core.admitted(mine)
    core.admitted(other)
    script.at(9)
    core.span(0, 1, 9)
    core.slices(0, rows)
    number, slices = script.entries[-1]
    assert isinstance(slices, StepSlices)
    script.entries[-1] = number, replace(slices, **columns)
    core.finished(mine)
    core.finished(other)
    collector, finals = script.play()
    assert_all_closes(collector, finals)
    assert collector.num_unjoined == (not is_joined)
    for final in finals.requests:
        assert final.prefill_flops is not None
        assert final.decode_flops is not None
        assert min(final.prefill_flops, final.decode_flops) >= 0


def test_a_fold_of_nothing_has_a_snapshot() -> None:
    collector, _ = Script().play(until_ms=1)
    assert snapshot(collector, window_ns=10**10, mode="live").engines == ()
    script = Script()
    script.ring()
    collector = script.play()[0]
    view = snapshot(collector, window_ns=10**10, mode="live").engines[0]
    assert view.ttft.num == 0
    assert not collector.devices()


def test_windows_survive_idle_gaps() -> None:
    script = Script()
    core = script.ring()
    for hour in range(3):
        script.at(3_600_000 * hour)
        mine = core.queued(f"{hour}")
        core.admitted(mine)
        start_ms = 3_600_000 * hour + 1
        core.step(hour, [(mine, 8, 0)], start_ms=start_ms, end_ms=start_ms + 8)
        core.finished(mine)
        core.health()
    collector, finals = script.play(until_ms=2 * 3_600_000 + 400)
    assert_all_closes(collector, finals)
    view = snapshot(collector, window_ns=60 * 10**9, mode="live").engines[0]
    assert (view.num_finished, view.ttft.num) == (3, 1)
    later, _ = script.play(until_ms=3 * 3_600_000)
    assert snapshot(later, window_ns=60 * 10**9, mode="live").engines[0].ttft.num == 0


def test_rings_in_another_order_give_the_same_steps() -> None:
    def finals_of(order: list[int]) -> Finals:
        script = Script()
        rings = {rank: script.ring("worker", rank, ranks=3) for rank in order}
        core = script.ring(ranks=3)
        mine = core.queued("a")
        core.admitted(mine)
        for n in range(3):
            script.at(10 * n + 9)
            for rank in order:
                rings[rank].span(n, 10 * n + 1, 10 * n + 7 + rank)
            core.slices(n, [(mine, 1, 8 + n)])
            core.emitted([mine])
        core.finished(mine)
        return script.play(until_ms=1_000)[1]

    one, other = finals_of([0, 1, 2]), finals_of([2, 0, 1])
    assert [(s.rank, s.step, s.start_ns, s.shares_ns.tolist()) for s in one.steps] == [
        (s.rank, s.step, s.start_ns, s.shares_ns.tolist()) for s in other.steps
    ]
    assert one.only().ledger_ns == other.only().ledger_ns
    assert START_NS
