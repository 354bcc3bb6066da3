"""Restarted processes: their devices, whose time is counted once."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferscope.fold import rings
from inferscope.fold.final_records import SEVERAL_CORES
from inferscope.fold.fold import Collector
from inferscope.fold.view import snapshot
from inferscope.records import CLOSED, ON, EngineInfo
from tests.fold.scripts import MS, Finals, Ring, Script, assert_all_closes
from tests.fold.trains import PREFILL, Train


def serve(core: Ring, name: str, *, from_ms: float, num_steps: int, first_step: int = 0) -> None:
    core.script.at(from_ms)
    mine = core.queued(name)
    core.admitted(mine)
    for n in range(num_steps):
        rows = [(mine, 1, 8 + n) if n else (mine, 8, 0)]
        start_ms = from_ms + 10 * n
        core.step(first_step + n, rows, start_ms=start_ms, end_ms=start_ms + 8)
    core.finished(mine)
    core.health()


@pytest.mark.parametrize("num_lives", [1, 2, 3])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_rank_that_is_started_again_is_one_device(num_lives: int, num_ranks: int) -> None:
    script = Script()
    for life in range(num_lives):
        script.at(1000 * life)
        cores = [script.ring(rank=rank) for rank in range(num_ranks)]
        for core in cores:
            core.keyframe(dp_rank=core.rank)
            serve(core, f"{life}-{core.rank}", from_ms=1000 * life + 10, num_steps=5)
    collector, finals = script.play(until_ms=1000 * num_lives)
    (engine,) = snapshot(collector, window_ns=10**9, mode="live").engines
    names = ["gpu"] if num_ranks == 1 else ["gpu#0", "gpu#1"]
    assert [device.device for device in engine.devices] == names
    for device in engine.devices:
        busy_ns = device.seconds_by_ns["prefill"] + device.seconds_by_ns["decode"]
        assert busy_ns == num_lives * 5 * 8 * MS
        assert device.wall_ns == 1000 * num_lives * MS
    assert engine.num_ranks_seen == num_ranks
    assert engine.num_replaced == (num_lives - 1) * num_ranks
    assert len(finals.requests) == num_lives * num_ranks
    assert_all_closes(collector, finals)


@pytest.mark.parametrize("prefix", ["", "GPU-"])
def test_devices_that_have_ids_are_called_as_their_driver_calls_them(prefix: str) -> None:
    script = Script()
    ids = [f"6f2a1c3e-58d4-4b7a-9c1e-2f0d3b5a7e9{n}" for n in (0, 1, 1)]
    cores = [script.ring(rank=rank) for rank in range(3)]
    for core, uuid in zip(cores, ids, strict=True):
        own = (0, 0, core.rank, 0)
        core.write(
            EngineInfo(script.now_ns, "made-up", ranks=own, device="gpu", device_uuid=prefix + uuid)
        )
    for core in cores:
        serve(core, f"r{core.rank}", from_ms=10, num_steps=2)
    collector, _ = script.play(until_ms=1000)
    names = [device.device for device in collector.devices()]
    assert names == [f"GPU-{ids[0]}", f"GPU-{ids[1]}#1", f"GPU-{ids[2]}#2"]


def test_two_at_once_under_one_name_are_one_device_and_have_no_ledgers() -> None:
    script = Script()
    one, other = script.ring(), script.ring()
    for n in range(4):
        serve(one, f"a{n}", from_ms=100 * n, num_steps=3, first_step=3 * n)
        serve(other, f"b{n}", from_ms=100 * n + 30, num_steps=3, first_step=100 + 3 * n)
    collector, finals = script.play(until_ms=8000)
    (device,) = collector.devices()
    assert device.seconds_by_ns["prefill"] + device.seconds_by_ns["decode"] == 2 * 4 * 3 * 8 * MS
    assert device.wall_ns == 2 * 8000 * MS
    assert {final.ledger_missing for final in finals.requests} == {SEVERAL_CORES}
    assert_all_closes(collector, finals)


@pytest.mark.parametrize("restart_ms", [None, 2550])
def test_what_others_use_of_a_device_goes_on_over_a_restart(restart_ms: int | None) -> None:
    train = Train()
    for step in range(20):
        at = 200 + 200 * step
        if restart_ms == at - 50:
            train.script.at(restart_ms)
            train.core = train.script.ring()
            train.introduce(0)
        request = train.ask(f"r{step}", at)
        train.run(step, [(request, 64, 0)], at, at + 100, PREFILL)
        train.core.finished(request)
    for at in range(0, 4200, 100):
        values = {"energy_uj": 100e3, "foreign_busy_share": 0.2}
        train.count(at, at + 100, values, source="nvml")
    collector, _ = train.play()
    (device,) = collector.devices()
    idle_windows_ns = 22 * 100 * MS
    assert device.seconds_by_ns["foreign"] == pytest.approx(0.2 * idle_windows_ns, rel=0.1)


@pytest.mark.parametrize("num_lives", [1, 3])
def test_a_process_that_was_replaced_is_missing_from_no_later_step(num_lives: int) -> None:
    script = Script()
    for life in range(num_lives):
        script.at(20_000 * life)
        core = script.ring()
        mine = core.queued(f"r{life}")
        core.admitted(mine)
        for n in range(5):  # each is running at a Tick
            start_ms = 20_000 * life + 10 + 300 * n
            rows = [(mine, 1, 8 + n) if n else (mine, 8, 0)]
            core.step(n, rows, start_ms=start_ms, end_ms=start_ms + 290)
        core.finished(mine)
        core.health()
    collector, finals = script.play(until_ms=20_000 * num_lives)
    assert len(finals.steps) == 5 * num_lives
    assert collector.engines["engine"].num_partial == 0


@dataclass
class Life:
    """Lifetime of one process."""

    role: str
    rank: int
    gap_ms: int
    """Time since the start of the previous process, of any role and rank."""
    lasts_ms: int
    num_steps: int
    is_closed: bool
    is_lost: bool
    """Whether it leaves a request unfinished."""


processes = st.builds(
    Life,
    role=st.sampled_from(["core", "core", "frontend", "worker"]),
    rank=st.integers(0, 1),
    gap_ms=st.integers(0, 8_000),
    lasts_ms=st.integers(1_000, 12_000),
    num_steps=st.integers(0, 3),
    is_closed=st.booleans(),
    is_lost=st.booleans(),
)


def restarted(lives: list[Life]) -> Script:
    """Run processes of one engine, some of them at once."""
    script, at = Script(), 0
    edges_due: list[tuple[float, int, Life, int]] = []
    for number, life in enumerate(lives):
        at += life.gap_ms
        edges = range(at, at + life.lasts_ms, 9_000)
        edges_due += [(ms, number, life, place) for place, ms in enumerate(edges)]
        edges_due.append((at + life.lasts_ms, number, life, -1))
    by_number: dict[int, Ring] = {}
    for ms, number, life, place in sorted(edges_due, key=lambda each: each[:2]):
        script.at(ms)
        if not place:
            by_number[number] = script.ring(life.role, life.rank)
            by_number[number].keyframe(dp_rank=life.rank)
            if life.role == "core":
                serve(
                    by_number[number], f"{number}", from_ms=ms + 10, num_steps=life.num_steps,
                    first_step=10 * number,
                )  # fmt: skip
        elif place > 0:
            by_number[number].keyframe(dp_rank=life.rank)
            by_number[number].health()
        else:
            if life.is_lost:
                by_number[number].received(f"lost {number}")
            by_number[number].health(state=CLOSED if life.is_closed else ON)
    return script


def fold(script: Script, *, dropped_ns: int, until_ms: float) -> tuple[Collector, Finals]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rings, "DROPPED_NS", dropped_ns)
        return script.play(until_ms=until_ms)


@settings(max_examples=8, deadline=None)
@given(lives=st.lists(processes, min_size=2, max_size=6))
def test_totals_are_the_same_when_rings_of_replaced_processes_are_dropped(
    lives: list[Life],
) -> None:
    script = restarted(lives)
    until_ms = sum(life.gap_ms for life in lives) + 45_000
    kept, of_kept = fold(script, dropped_ns=1 << 62, until_ms=until_ms)
    dropped, of_dropped = fold(script, dropped_ns=16_000 * MS, until_ms=until_ms)
    assert len(kept.engines["engine"].rings) == len(lives)
    newest_rings = {(life.role, life.rank) for life in lives}
    assert len(dropped.engines["engine"].rings) == len(newest_rings)
    assert dropped.totals() == kept.totals()
    assert dropped.devices() == kept.devices()
    assert of_dropped.requests == of_kept.requests
    views = [snapshot(each, window_ns=10**9, mode="live").engines[0] for each in (kept, dropped)]
    assert views[0] == views[1]


def test_a_process_that_was_stopped_for_long_and_replaced_is_followed_when_it_goes_on() -> None:
    script = Script()
    first = script.ring()
    serve(first, "before", from_ms=10, num_steps=2)
    script.at(20_000)
    serve(script.ring(), "beside", from_ms=20_010, num_steps=2, first_step=10)
    script.at(100_000)
    first.keyframe()
    serve(first, "after", from_ms=100_010, num_steps=2, first_step=20)
    collector, finals = script.play(until_ms=110_000)
    assert [final.request_id for final in finals.requests] == ["before", "beside", "after"]
    assert len(finals.steps) == 6
    (device,) = collector.devices()
    assert device.seconds_by_ns["prefill"] + device.seconds_by_ns["decode"] == 6 * 8 * MS
    assert_all_closes(collector, finals)


def test_an_engine_that_is_restarted_often_has_few_rings() -> None:
    script = Script()
    for life in range(30):
        script.at(10_000 * life)
        serve(script.ring(), f"{life}", from_ms=10_000 * life + 10, num_steps=1, first_step=life)
    collector, finals = script.play(until_ms=300_000)
    assert len(finals.requests) == 30
    assert len(collector.engines["engine"].rings) <= 8
    (engine,) = snapshot(collector, window_ns=10**9, mode="live").engines
    assert engine.num_replaced == 29
    (device,) = collector.devices()
    assert device.wall_ns == 300_000 * MS
    assert device.seconds_by_ns["prefill"] == 30 * 8 * MS
