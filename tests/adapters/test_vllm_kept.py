"""Facts that vLLM's hooks keep until the device computes: what a crash leaves, and what a hang."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import sys
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from inferscope.adapters.patching import Patches
from inferscope.adapters.vllm import tag as vllm_tag
from inferscope.adapters.vllm import worker as vllm_worker
from inferscope.adapters.vllm.core import CoreHooks
from inferscope.adapters.vllm.worker import WorkerHooks
from inferscope.probe import Marks
from inferscope.probe.timers import EventTimer
from inferscope.records import Emitted, ProbeHealth, RequestEvent, StepPlan, StepSlices, StepSpan
from inferscope.ring.reader import RingReader
from tests.adapters import toy_vllm
from tests.adapters.test_vllm import DoneEvents, fold
from tests.adapters.toy_vllm import Options, Request, Scheduler
from tests.adapters.vllm_records import stated
from tests.children import child
from tests.probe.fakes import FakeClock, make_probe, of

TEAM = Options(num_blocks=40, lives=[(3, 12)] * 3)
STOPPING = """
import functools, os, signal, sys
from inferscope.adapters.vllm import worker as vllm_worker
from inferscope.adapters.vllm.worker import WorkerHooks
from inferscope.probe.timers import EventTimer
from tests.adapters import toy_vllm
from tests.adapters.test_vllm import DoneEvents, hooked
from tests.adapters.test_vllm_kept import TEAM

def stop_at(owner, name):
    original, num_calls = getattr(owner, name), 0

    @functools.wraps(original)
    def stopping(*args, **kw):
        nonlocal num_calls
        num_calls += 1
        result = original(*args, **kw)
        if num_calls in (8, 10):  # of steps 7 and 9
            os.kill(os.getpid(), signal.SIGSTOP)
        return result

    setattr(owner, name, stopping)

place = sys.argv[1]
toy_vllm.Worker.compile_or_warm_up_model = lambda self: None
vllm_worker._is_last_stage = lambda: True
WorkerHooks._timer = lambda self, device: EventTimer(DoneEvents())
if place in vars(toy_vllm.ModelRunner):
    stop_at(toy_vllm.ModelRunner, place)
hooked()
if place in vars(toy_vllm.Scheduler):
    stop_at(toy_vllm.Scheduler, place)  # around our hooks
toy_vllm.serve(TEAM)
"""


@pytest.fixture
def rings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("INFERSCOPE_DIR", str(tmp_path))
    monkeypatch.setenv("INFERSCOPE_ENGINE_ID", "toy")
    monkeypatch.setenv("INFERSCOPE_RING_MB", "1")
    return tmp_path / "toy"


@pytest.fixture
def patches(rings: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Patches]:
    """Put the hooks in place around a worker on a device and a core."""
    monkeypatch.setattr(vllm_worker, "_is_last_stage", lambda: True)
    monkeypatch.setattr(WorkerHooks, "_timer", lambda self, device: EventTimer(DoneEvents()))
    patches = Patches("vLLM")
    CoreHooks(patches).install(Scheduler)
    WorkerHooks(patches).install(toy_vllm.WorkerWrapperBase)
    yield patches
    patches.restore()
    for probe in patches.probes:
        probe.close()


class Engine(NamedTuple):
    """A worker that is ready and a scheduler; both have the hooks."""

    worker: Any
    scheduler: Scheduler


def engine_of(setting: Any, request: Request) -> Engine:
    """Make an engine of a configuration, with a request in its queue."""
    wrapper = toy_vllm.WorkerWrapperBase(setting)
    wrapper.init_device()
    wrapper.worker.initialize_from_config(None)
    scheduler = Scheduler(setting)
    scheduler.add_request(request)
    return Engine(wrapper.worker, scheduler)


def ring(rings: Path, role: str) -> Path:
    (path,) = rings.glob(f"{role}-*.ring")
    return path


def newest(rings: Path) -> tuple[int, int, int]:
    """Return the newest step of which there are a plan, slices, and emitted tokens."""
    core = stated(ring(rings, "core"))
    return (
        max(record.step for record in core if isinstance(record, StepPlan)),
        max(record.step for record in core if isinstance(record, StepSlices)),
        max(record.step for record in core if isinstance(record, Emitted)),
    )


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("place", "is_dispatched"), [("schedule", False), ("_model_forward", False), ("_sample", True)]
)
def test_a_process_stopped_or_killed_leaves_all_steps_up_to_the_one_dispatched_last(
    rings: Path, place: str, is_dispatched: bool
) -> None:
    found = []
    with child([sys.executable, "-c", STOPPING, place]) as engine:
        for then in (signal.SIGCONT, signal.SIGKILL):
            _, status = os.waitpid(engine.pid, os.WUNTRACED)
            assert os.WIFSTOPPED(status)
            found.append(newest(rings))
            reader = RingReader(ring(rings, "worker"))
            pending_ns = reader.pending_ns()
            reader.close()
            launches = [span.launch_start_ns for span in of(StepSpan, ring(rings, "worker"))]
            assert pending_ns > max(launches), "since when a step is under way without a span"
            engine.send_signal(then)
    for step, steps in zip((7, 9), found, strict=True):
        plan = step if is_dispatched else step - 1
        # Behind a dispatch its plan and members are written, and all there is of the steps before.
        assert steps == (plan, plan, plan - 1)
    _, source = fold(rings)
    totals = source.collector.totals()
    assert (totals.num_lost, totals.num_late, totals.num_unjoined) == (0, 0, 0)


def test_a_launch_that_hangs_is_in_the_ring_with_its_members_soon(
    rings: Path, patches: Patches, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = toy_vllm.ModelRunner._model_forward
    hung: list[tuple[int, ...]] = []

    def hangs(self: Any, input_ids: Any = None) -> None:
        forward(self, input_ids)
        core = next(rings.glob("core-*.ring"), None)
        if core is None or hung:
            return
        planned = {record.step for record in stated(core) if isinstance(record, StepPlan)}
        if len(planned) == 5:
            until = time.monotonic() + 20
            while newest(rings)[1] < 5:
                assert time.monotonic() < until, "the probe's thread has not written it"
                time.sleep(0.01)
            hung.append(newest(rings))

    monkeypatch.setattr(toy_vllm.ModelRunner, "_model_forward", hangs)
    toy_vllm.serve(TEAM)
    assert hung == [(5, 5, 4)]
    finals, source = fold(rings)
    assert source.collector.totals().num_unjoined == 0
    assert {request.output_tokens for request in finals.requests.values()} == {12}


def test_an_engine_that_pauses_between_two_steps_reports_the_last_one(
    rings: Path, patches: Patches
) -> None:
    worker, scheduler = engine_of(toy_vllm.config(TEAM), Request("a", 3, 9))
    output = scheduler.schedule()
    worker.execute_model(output)
    scheduler.get_grammar_bitmask(output)
    sampled = worker.sample_tokens({"a"})
    scheduler.update_from_output(output, sampled)
    left_ns = time.monotonic_ns()
    core, until = ring(rings, "core"), time.monotonic() + 20
    while not (of(Emitted, core) and of(StepSpan, ring(rings, "worker"))):
        assert time.monotonic() < until
        time.sleep(0.01)
    (emitted,), (span,) = of(Emitted, core), of(StepSpan, ring(rings, "worker"))
    assert emitted.at_ns is not None
    assert emitted.at_ns < left_ns < emitted.t_ns
    (slices,) = of(StepSlices, core)
    assert span.digest == slices.digest != 0


def test_reports_state_that_kept_facts_are_not_there_yet(tmp_path: Path) -> None:
    clock = FakeClock()
    probe = make_probe(tmp_path, clock)
    assert probe.path is not None
    since_ns = clock.now_ns
    for kept_ns in (since_ns, 0):
        probe.defer(kept_ns)
        clock.now_ns += 200_000_000
        probe.sign(0, tokens=[1], digest=5)
    through_ns = [health.complete_through_ns for health in of(ProbeHealth, probe.path)]
    assert through_ns[-2:] == [since_ns, clock.now_ns]
    probe.close()


def test_after_a_fault_no_output_of_the_engine_is_kept(rings: Path, patches: Patches) -> None:
    engine = engine_of(toy_vllm.config(Options()), Request("r", 3, 9))
    output = engine.scheduler.schedule()
    engine.worker.execute_model(output)
    is_there = weakref.ref(output)
    patches.fail(ring, ValueError("a fault"))
    del output, engine
    gc.collect()
    assert is_there() is None


def test_a_step_that_begins_during_a_fault_of_another_thread_is_not_kept(
    rings: Path, patches: Patches, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(toy_vllm.config(Options()), Request("r", 3, 9))
    output = engine.scheduler.schedule()

    def fail(*args: object) -> None:
        patches.fail(ring, ValueError("a fault"))

    monkeypatch.setattr(Marks, "begin", fail)
    engine.worker.execute_model(output)
    is_there = weakref.ref(output)
    del output, engine
    gc.collect()
    assert is_there() is None


def test_a_second_scheduler_in_the_process_writes_nothing_of_the_first_before_its_dispatch(
    rings: Path, patches: Patches
) -> None:
    first = engine_of(toy_vllm.config(Options()), Request("r", 3, 9)).scheduler
    second = Scheduler(toy_vllm.config(Options()))
    output = first.schedule()
    second.schedule()
    assert not of(StepPlan, ring(rings, "core"))
    first.get_grammar_bitmask(output)
    assert [plan.step for plan in of(StepPlan, ring(rings, "core"))] == [0]


class TimedScheduler(Scheduler):
    """A scheduler of a plug-in, whose core passes an argument more."""

    def update_from_output(
        self, scheduler_output: Any, model_runner_output: Any, timings: Any = None
    ) -> Any:
        assert timings == "timings"
        return super().update_from_output(scheduler_output, model_runner_output)


def test_an_argument_that_a_plug_in_adds_reaches_its_scheduler(
    rings: Path, patches: Patches
) -> None:
    scheduler = TimedScheduler(toy_vllm.config(Options()))
    scheduler.add_request(Request("r", 3, 1))
    output = scheduler.schedule()
    scheduler.get_grammar_bitmask(output)
    sampled = SimpleNamespace(req_id_to_index={"r": 0}, sampled_token_ids=[[9]])
    scheduler.update_from_output(output, sampled, timings="timings")
    scheduler.shutdown()
    assert len(of(StepSlices, ring(rings, "core"))) == 1


def test_a_request_added_under_the_id_of_one_that_just_ended_is_another_one(
    rings: Path, patches: Patches
) -> None:
    setting = toy_vllm.config(Options())
    scheduler = Scheduler(setting)
    for name in ("other", "again"):
        scheduler.add_request(Request(name, 3, 1 if name == "again" else 9))
    output = scheduler.schedule()
    scheduler.get_grammar_bitmask(output)
    sampled = SimpleNamespace(
        req_id_to_index={"other": 0, "again": 1}, sampled_token_ids=[[9], [9]]
    )
    scheduler.update_from_output(output, sampled)  # "again" has ended, "other" runs on
    scheduler.add_request(Request("again", 3, 1))
    scheduler.shutdown()
    events = [event for event in of(RequestEvent, ring(rings, "core")) if event.index > 0]
    assert [(event.index, event.kind) for event in events] == [
        (1, events[0].kind),
        (1, events[1].kind),
        (1, events[2].kind),
        (2, events[0].kind),
    ]
    assert events[2].reason == "length"


def test_a_request_that_ends_beside_an_overdue_flush_ends_no_observation(
    rings: Path, patches: Patches
) -> None:
    scheduler = engine_of(toy_vllm.config(Options()), Request("r", 3, 9)).scheduler
    unseen = Request("unseen", 3, 9)
    scheduler.requests["unseen"] = unseen  # by a way that is not hooked
    scheduler.waiting.append(unseen)
    output = scheduler.schedule()
    assert set(output.num_scheduled_tokens) == {"r", "unseen"}
    del scheduler.requests["unseen"]
    scheduler.get_grammar_bitmask(output)
    assert not patches.is_off
    (slices,) = of(StepSlices, ring(rings, "core"))
    assert len(slices.phases) == 1
    scheduler.shutdown()


def test_a_tag_is_a_step_number_that_other_versions_can_read(tmp_path: Path) -> None:
    output = SimpleNamespace(num_scheduled_tokens={"a": 3, "b": 1})
    assert vllm_tag.step_of(output) is None
    vllm_tag.attach(output, 7)
    sent = pickle.loads(pickle.dumps(output))
    assert (vllm_tag.step_of(sent), vllm_tag.is_signed_by_ids(sent)) == (7, True)
    older_core = SimpleNamespace(_inferscope=(7, (0, 1), None, 3))
    assert (vllm_tag.step_of(older_core), vllm_tag.is_signed_by_ids(older_core)) == (7, False)
    # An older worker signs by these fields: with a digest of 0, which fits any slices.
    _, requests, tokens, prefill_tokens = sent._inferscope
    probe = make_probe(tmp_path, FakeClock(step_ns=1000))
    assert probe.path is not None
    probe.start(7)
    probe.stop(7)
    probe.sign(7, requests=requests, tokens=tokens, prefill_tokens=prefill_tokens)
    (span,) = of(StepSpan, probe.path)
    assert span.digest == 0
    probe.close()


def test_the_digest_of_a_step_is_of_its_ids_and_tokens_in_their_order() -> None:
    steps = [{"a": 3, "b": 1}, {"b": 1, "a": 3}, {"a": 1, "b": 3}, {"a": 3}, {"ab": 3, "": 1}]
    digests = {vllm_tag.step_digest(step) for step in steps}
    assert len(digests) == len(steps)
    assert 0 not in digests
    assert vllm_tag.step_digest({"\ud800": 1}), "ids come from clients"
