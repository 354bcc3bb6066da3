"""Classification of queued requests: admissible, or waiting for a scarce resource."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from inferscope.fold.snapshots import EngineView
from inferscope.fold.view import snapshot
from inferscope.records import FAILED, OFF, OVER_BUDGET, EngineInfo, StepPlan
from tests.fold.scripts import Ring, Script

END_MS = 4000.0


def seen(script: Script, *, until_ms: float = END_MS) -> EngineView:
    """Fold the script; return its only engine."""
    for at_ms in range(0, int(until_ms), 500):
        script.at(at_ms)
        for ring in script.rings:
            ring.health()
    script.entries.sort(key=lambda entry: entry[1].t_ns)
    collector, _ = script.play(until_ms=until_ms)
    (view,) = snapshot(collector, window_ns=10**10, mode="live").engines
    return view


def plan(core: Ring, step: int, *, binding: str = "none", running: int = 1) -> None:
    """Report a plan that leaves a request in the queue."""
    now_ns = core.now_ns
    core.write(StepPlan(now_ns, step, now_ns, now_ns, 1, running, 1, 0, 10, b"", binding))


def describe(core: Ring, **changes: object) -> None:
    """Fold an EngineInfo with other values."""
    infos = [record for _, record in core.script.entries if isinstance(record, EngineInfo)]
    core.write(replace(infos[-1], t_ns=core.now_ns, **changes))


def livelocked() -> tuple[Script, Ring]:
    """Return a script with one finished request and two later ones that are not admitted."""
    script = Script()
    core = script.ring()
    first = core.queued("first")
    core.admitted(first)
    core.step(0, [(first, 8, 0)], start_ms=2, end_ms=12)
    script.at(15)
    core.finished(first)
    script.at(100)
    core.queued("second")
    core.queued("third")
    return script, core


def beside(*, binding: str = "none", waits_since_ms: float = 100, **more: object) -> Script:
    """Return a script with one decoding request, and one queued before or after its last step."""
    script = Script()
    core = script.ring()
    describe(core, max_running=4)
    first = core.queued("first")
    core.admitted(first)
    core.step(0, [(first, 8, 0)], start_ms=2, end_ms=12)
    script.at(waits_since_ms)
    core.queued("second", **more)
    script.at(200)
    plan(core, 1, binding=binding)
    script.at(300)
    core.span(1, 200, 300)
    core.slices(1, [(first, 1, 8)])
    return script


def test_queued_requests_of_an_engine_that_runs_none_are_admissible() -> None:
    view = seen(livelocked()[0])
    assert (view.num_admissible, view.num_admissions) == (2, 1)


def test_a_request_that_was_passed_over_although_nothing_was_scarce_is_admissible() -> None:
    assert seen(beside()).num_admissible == 1


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(lambda: beside(binding="slots"), id="all slots are taken"),
        pytest.param(lambda: beside(binding="blocks"), id="the KV cache is full"),
        pytest.param(lambda: beside(binding="budget"), id="a prefill takes the whole budget"),
        pytest.param(lambda: beside(waits_since_ms=250), id="a long step is under way"),
        pytest.param(lambda: beside(adapter="sql"), id="its adapter has no slot"),
    ],
)
def test_a_request_that_has_to_wait_is_not_admissible(script: Callable[[], Script]) -> None:
    view = seen(script())
    assert (view.num_waiting, view.num_admissible) == (1, 0)


def test_slots_that_the_plan_counts_as_taken_are_taken() -> None:
    script, core = livelocked()
    script.at(50)
    describe(core, max_running=1)
    running = core.queued("running")
    core.admitted(running)
    script.at(150)
    plan(core, 1)
    assert seen(script).num_admissible == 0


def test_a_preempted_request_is_admissible_once_a_plan_has_passed_it_over() -> None:
    script = Script()
    core = script.ring()
    held = core.queued("held")
    core.admitted(held)
    core.step(0, [(held, 8, 0)], start_ms=2, end_ms=12)
    script.at(20)
    core.preempted(held)
    assert seen(script).num_admissible == 1
    script.at(30)
    core.resumed(held)
    view = seen(script)
    assert (view.num_admissible, view.num_admissions) == (0, 2)


@pytest.mark.parametrize(("preempted_ms", "num"), [(100, 1), (250, 0)])
def test_a_plan_before_its_preemption_has_not_passed_a_request_over(
    preempted_ms: float, num: int
) -> None:
    script = Script()
    core = script.ring()
    running, held = core.queued("running"), core.queued("held")
    core.admitted(running)
    core.admitted(held)
    core.step(0, [(running, 8, 0), (held, 8, 0)], start_ms=2, end_ms=12)
    script.at(preempted_ms)
    core.preempted(held)
    script.at(200)
    plan(core, 1)
    script.at(260)
    core.span(1, 200, 260)
    core.slices(1, [(running, 1, 8)])
    assert seen(script).num_admissible == num


def test_a_request_that_an_idle_core_does_not_accept_is_admissible() -> None:
    script = livelocked()[0]
    front = script.ring("frontend")
    script.at(200)
    front.received("never tokenised")
    front.tokenised(front.received("never queued"))
    assert seen(script).num_admissible == 3


def test_no_request_is_admissible_in_a_core_that_never_reported_an_admission() -> None:
    script = Script()
    script.ring()
    front = script.ring("frontend")
    front.tokenised(front.received("served by an unobserved scheduler"))
    view = seen(script)
    assert (view.num_admissible, view.num_admissions) == (0, 0)


def test_admissible_number_is_unknown_without_an_observed_core() -> None:
    script = Script()
    front = script.ring("frontend")
    front.tokenised(front.received("r"))
    view = seen(script)
    assert (view.num_admissible, view.num_admissions) == (None, None)


@pytest.mark.parametrize("state", [OFF, FAILED, OVER_BUDGET])
def test_admissible_number_is_unknown_after_a_core_stops_observing(state: int) -> None:
    script, core = livelocked()
    front = script.ring("frontend")
    script.at(200)
    core.keyframe(state=state)
    front.tokenised(front.received("third"))
    for second in range(1, 4):
        script.at(1000 * second)
        front.health()
    collector, _ = script.play(until_ms=END_MS)
    (view,) = snapshot(collector, window_ns=10**10, mode="live").engines
    assert view.num_admissible is None


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_admissible_number_is_unknown_if_requests_may_wait_for_another_worker(role: str) -> None:
    script, core = livelocked()
    describe(core, role=role)
    view = seen(script)
    assert (view.num_admissible, view.num_admissions) == (None, 1)


def test_a_paused_or_full_replica_does_not_change_the_result_of_another() -> None:
    script = Script()
    cores = [script.ring("core", rank) for rank in (0, 1)]
    for rank, core in enumerate(cores):
        core.keyframe(dp_rank=rank)
        core.admitted(core.queued(f"running-{rank}"))
        core.queued(f"queued-{rank}")
    script.at(100)
    plan(cores[0], 0, binding="slots")
    plan(cores[1], 0, binding="none")
    assert seen(script).num_admissible == 1
    script.at(200)
    cores[1].keyframe(dp_rank=1, paused_ms=150)
    assert seen(script).num_admissible == 0
