"""Recent steps and sums by kind, against the JSON Lines export of the same recording."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest

from inferscope.fold import ALL, FOR_SCREEN, EngineView, Retention, snapshot
from inferscope.fold.snapshots import KindSums
from tests.fold.scripts import MS, Script
from tests.recorded import recorded

HOUR_NS = 3_600_000_000_000


def folded() -> tuple[EngineView, list[dict[str, Any]]]:
    look, exported = recorded()
    return look.engines[0], exported


def rows(kind: str) -> list[dict[str, Any]]:
    return [row for row in folded()[1] if row["kind"] == kind]


@pytest.mark.thorough
def test_each_step_equals_its_exported_row() -> None:
    view, _ = folded()
    exported = {(row["dp_rank"], row["step"], row["rank"]): row for row in rows("step")}
    assert len(view.steps) == len(exported) > 2000
    for step in view.steps:
        (rank,) = step.ranks
        row = exported[step.dp_rank, step.step, rank.rank]
        names = ("start_ns", "end_ns", "measured_ns", "padding_ns", "unattributed_ns")
        assert {name: getattr(rank, name) for name in names} == {n: row[n] for n in names}
        assert (step.mode, step.is_cold, step.clock) == (row["mode"], row["cold"], row["clock"])
        columns = (step.request_ids, step.phases, step.tokens, step.contexts, step.shares_ns[0])
        assert list(zip(*columns, strict=True)) == [
            (share["request"], share["phase"], share["tokens"], share["context"], share["ns"])
            for share in row["shares"]
        ]
        by_phase: dict[str, int] = defaultdict(int)
        tokens: dict[str, int] = defaultdict(int)
        for share in row["shares"]:
            by_phase[share["phase"]] += share["ns"]
            tokens[share["phase"]] += share["tokens"]
        assert (rank.prefill_ns, rank.decode_ns) == (by_phase["prefill"], by_phase["decode"])
        assert (step.prefill_tokens, step.decode_tokens) == (tokens["prefill"], tokens["decode"])
        phases = {share["phase"] for share in row["shares"]}
        assert step.kind == ("mixed" if len(phases) == 2 else min(phases))
        parts = rank.prefill_ns + rank.decode_ns + rank.padding_ns + rank.unattributed_ns
        assert parts == rank.measured_ns == step.measured_ns


@pytest.mark.thorough
def test_host_gaps_sum_to_the_devices_and_steps_are_in_the_order_of_time() -> None:
    view, _ = folded()
    (device,) = rows("device")
    after_last_ns = device["ns_by"]["idle_host_gap"] - sum(s.host_gap_ns for s in view.steps)
    assert 0 <= after_last_ns < MS, "a request's delivery after the last step"
    starts = [step.start_ns for step in view.steps]
    assert starts == sorted(starts)
    for before, after in zip(view.steps, view.steps[1:], strict=False):
        assert after.host_gap_ns <= after.start_ns - before.end_ns


def test_work_of_the_steps_sums_to_the_work_of_the_requests() -> None:
    view, _ = folded()
    total: dict[str, int] = defaultdict(int)
    for row in rows("request"):
        for phase in row["by_phase"].values():
            for name in ("flops", "hbm_read_bytes", "hbm_write_bytes", "tokens"):
                total[name] += phase[name]
    steps = view.steps
    assert total == {
        "flops": sum(step.flops or 0 for step in steps),
        "hbm_read_bytes": sum(step.read_bytes or 0 for step in steps),
        "hbm_write_bytes": sum(step.write_bytes or 0 for step in steps),
        "tokens": sum((step.prefill_tokens or 0) + (step.decode_tokens or 0) for step in steps),
    }


def test_sums_by_kind_are_those_of_the_warm_steps_of_that_kind() -> None:
    view, _ = folded()
    assert set(view.kinds) == {"prefill", "decode", "mixed"}
    for kind, seconds in view.kinds.items():
        warm = [step for step in view.steps if step.kind == kind and not step.is_cold]
        assert len(warm) > 50
        sums = KindSums(
            *(sum(getattr(each, name) for each in seconds) for name in KindSums.__struct_fields__)
        )
        assert sums.steps == len(warm)
        assert sums.wall_ns == sums.device_ns == sum(step.measured_ns for step in warm)
        assert sums.flops == sum(step.flops or 0 for step in warm)
        assert sums.read_bytes == sum(step.read_bytes or 0 for step in warm)
        assert sums.write_bytes == sum(step.write_bytes or 0 for step in warm)
        assert sums.prefill_tokens == sum(step.prefill_tokens or 0 for step in warm)
        assert sums.decode_tokens == sum(step.decode_tokens or 0 for step in warm)
        assert sums.requests == sum(step.num_requests for step in warm)
        whole_bytes = (view.weight_bytes or 0) * sums.steps
        if kind == "prefill":  # a chunk that is not the last one reads no lm_head
            assert 0.5 * whole_bytes < sums.weight_bytes < whole_bytes
        else:
            assert sums.weight_bytes == whole_bytes
        assert 0 < sums.kv_bytes < sums.read_bytes - sums.weight_bytes


def decoding(num_steps: int) -> Script:
    """Return a script of one request that decodes."""
    script = Script()
    core = script.ring()
    mine = core.queued("a")
    core.admitted(mine)
    for step in range(num_steps):
        script.at(10 * step + 2)
        core.plan(step)
        script.at(10 * step + 8)
        core.span(step, 10 * step + 2, 10 * step + 8)
        core.slices(step, [(mine, 1, 8 + step)])
    core.finished(mine)
    return script


@pytest.mark.parametrize(("keep", "has_steps"), [(ALL, True), (FOR_SCREEN, False)])
def test_steps_need_a_reader_that_keeps_them_and_asks(keep: Retention, has_steps: bool) -> None:
    collector, _ = decoding(5).play(until_ms=400, keep=keep)
    look = snapshot(collector, window_ns=HOUR_NS, mode="live", has_steps=has_steps)
    assert (look.engines[0].steps, look.engines[0].kinds) == ((), {})
    assert look.engines[0].num_finished == 1


@pytest.mark.parametrize(("most_steps", "most_rows"), [(7, 100), (100, 7)])
def test_the_number_of_steps_and_of_their_slices_is_bounded(
    monkeypatch: pytest.MonkeyPatch, most_steps: int, most_rows: int
) -> None:
    monkeypatch.setattr("inferscope.fold.recent_steps.MOST_ROWS", most_rows)
    collector, _ = decoding(20).play(until_ms=400, keep=Retention(steps=most_steps))
    look = snapshot(collector, window_ns=HOUR_NS, mode="live", has_steps=True)
    assert [step.step for step in look.engines[0].steps] == list(range(13, 20))
    again = snapshot(collector, window_ns=HOUR_NS, mode="live", has_steps=True)
    assert again.engines[0].steps[0] is look.engines[0].steps[0], "views are shared"


def test_a_step_of_two_ranks_has_the_time_of_both() -> None:
    script = Script()
    core = script.ring(ranks=2)
    first, second = script.ring("worker", 0, ranks=2), script.ring("worker", 1, ranks=2)
    mine = core.queued("a")
    script.at(1)
    core.admitted(mine)
    script.at(2)
    core.plan(0)
    script.at(12)
    first.span(0, 2, 12)
    core.slices(0, [(mine, 8, 0)])
    script.at(16)
    second.span(0, 3, 16)
    script.at(17)
    core.finished(mine)
    collector, finals = script.play(until_ms=400, keep=FOR_SCREEN)
    view = snapshot(collector, window_ns=HOUR_NS, mode="live", has_steps=True).engines[0]
    (step,) = view.steps
    assert [(rank.rank, rank.measured_ns) for rank in step.ranks] == [(0, 10 * MS), (1, 13 * MS)]
    assert (step.measured_ns, step.device_ns) == (13 * MS, 23 * MS)
    assert (step.start_ns, step.end_ns) == (finals.steps[0].start_ns, finals.steps[1].end_ns)
    assert (step.kind, step.request_ids, step.tokens) == ("prefill", ("a",), (8,))
    assert [list(of) for of in step.shares_ns] == [each.shares_ns.tolist() for each in finals.steps]
    assert sum(second.device_ns for second in view.kinds["prefill"]) == 23 * MS
