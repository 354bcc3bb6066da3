"""What is hooked into vLLM, on one in miniature: the laws of the records, and our own faults."""

from __future__ import annotations

import asyncio
import collections
import functools
import gc
import json
import logging
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.applications import Starlette

from inferscope.adapters.live_table import LiveTable
from inferscope.adapters.patching import Patches
from inferscope.adapters.vllm import core as vllm_core
from inferscope.adapters.vllm import frontend as vllm_frontend
from inferscope.adapters.vllm import kept as vllm_kept
from inferscope.adapters.vllm import steps as vllm_steps
from inferscope.adapters.vllm import tag as vllm_tag
from inferscope.adapters.vllm import worker as vllm_worker
from inferscope.adapters.vllm.core import CoreHooks
from inferscope.adapters.vllm.frontend import FrontEndHooks, asked_of
from inferscope.adapters.vllm.kept import Kept
from inferscope.adapters.vllm.steps import Core
from inferscope.adapters.vllm.worker import WorkerHooks
from inferscope.fold.final_records import FinalRequest, FinalStep
from inferscope.probe import Marks, Probe
from inferscope.probe.timers import EventTimer
from inferscope.readers.source import RingSource, catch_up
from inferscope.records import (
    CLOSED,
    DECODE,
    LAST_CHUNK,
    PREFILL,
    RECOMPUTED,
    UNSUPPORTED,
    VERIFY,
    Emitted,
    ProbeHealth,
    RequestEvent,
    StepSame,
    StepSlices,
    StepSpan,
    Transfer,
)
from tests.adapters import toy_vllm
from tests.adapters.toy_vllm import Options, Request, Scheduler, serve
from tests.adapters.vllm_records import SCENARIOS, facts, without_phases
from tests.probe.fakes import FakeClock, make_probe, of, tokens_of_slices, tokens_signed


class RecordingSink:
    """A sink of a fold's final steps and requests."""

    def __init__(self) -> None:
        self.steps: list[FinalStep] = []
        self.requests: dict[str, FinalRequest] = {}

    def on_step(self, step: FinalStep) -> None:
        self.steps.append(step)

    def on_request(self, request: FinalRequest) -> None:
        self.requests[request.request_id] = request


@pytest.fixture
def rings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("INFERSCOPE_DIR", str(tmp_path))
    monkeypatch.setenv("INFERSCOPE_ENGINE_ID", "toy")
    monkeypatch.setenv("INFERSCOPE_RING_MB", "1")
    return tmp_path / "toy"


def attached_to(patches: Patches, monkeypatch: pytest.MonkeyPatch) -> list[Probe]:
    """Return a list that the probes are added to as they are attached, and that keeps them."""
    probes: list[Probe] = []
    attach = patches.attach

    def noted(probe: Probe, **kw: bool) -> None:
        probes.append(probe)
        attach(probe, **kw)

    monkeypatch.setattr(patches, "attach", noted)
    return probes


def hooked() -> Patches:
    patches = Patches("vLLM")
    CoreHooks(patches).install(toy_vllm.Scheduler)
    WorkerHooks(patches).install(toy_vllm.WorkerWrapperBase)
    FrontEndHooks(patches).install(toy_vllm.AsyncLLM)
    return patches


@pytest.fixture
def patches(rings: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Patches]:
    monkeypatch.setattr(vllm_worker, "_is_last_stage", lambda: True)
    patches = hooked()
    yield patches
    patches.restore()
    for probe in patches.probes:
        probe.close()


def rows(step: FinalStep) -> list[tuple[str, int, int, int]]:
    columns = (step.phases.tolist(), step.tokens.tolist(), step.flags.tolist())
    return list(zip(step.request_ids, *columns, strict=True))


def fold(rings: Path) -> tuple[RecordingSink, RingSource]:
    sink = RecordingSink()
    source = RingSource(lambda: rings.glob("*.ring"), name="toy", sinks=(sink,))
    catch_up(source, patience_s=30)
    source.close()
    return sink, source


def hold_to_the_laws(
    rings: Path, scheduler: Any, requests: list[Request], *, are_all_followed: bool = True
) -> RecordingSink:
    finals, source = fold(rings)
    totals = source.collector.totals()
    assert (totals.num_lost, totals.num_late, totals.num_unjoined) == (0, 0, 0)
    signed: dict[int, tuple[int | None, int]] = {}
    for path in rings.glob("worker-*.ring"):
        signed |= tokens_signed(path)
    for path in rings.glob("core-*.ring"):
        of_slices = tokens_of_slices(path)
        of_spans = {step: signed[step] for step in of_slices}
        if not are_all_followed:  # by the core; a worker has no such limit
            assert all(sum(of_slices[step]) <= sum(of_spans[step]) for step in of_slices)
        elif scheduler.num_drafts:  # after a preemption a worker cannot know what was accepted
            assert {step: sum(tokens) for step, tokens in of_slices.items()} == {
                step: None not in tokens and sum(tokens) for step, tokens in of_spans.items()
            }
        else:
            assert of_slices == of_spans
    computed: collections.Counter[str] = collections.Counter()
    again: collections.Counter[str] = collections.Counter()
    in_vain: collections.Counter[str] = collections.Counter()
    for step in finals.steps:
        for name, phase, tokens, flags in rows(step):
            computed[name] += tokens
            again[name] += tokens * bool(flags & RECOMPUTED)
            in_vain[name] += tokens * (phase == VERIFY)
    assert set(finals.requests) == {request.request_id for request in requests}
    for request in requests:
        final = finals.requests[request.request_id]
        assert sum(final.ledger_ns.values()) == final.delivered_ns - final.arrived_ns
        assert final.output_tokens == request.num_outputs
        if final.finish == "length":
            due = request.num_prompt_tokens + request.num_outputs - 1
            spent = computed[request.request_id] - again[request.request_id]
            if scheduler.num_drafts:
                assert due <= spent <= due + in_vain[request.request_id]
            else:
                assert spent == due
    assert bool(sum(again.values())) <= bool(scheduler.num_preempted)
    return finals


options = st.builds(
    Options,
    seed=st.integers(0, 9),
    budget=st.integers(6, 30),
    num_blocks=st.integers(12, 20),
    num_drafts=st.sampled_from([0, 0, 2]),
    is_async=st.booleans(),
    is_v2=st.booleans(),
    abort_every=st.sampled_from([0, 7]),
    returns_nothing=st.booleans(),
    lives=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 14)), min_size=1, max_size=6),
)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(options=options)
def test_every_token_is_computed_once_or_marked_as_recomputed(
    rings: Path, monkeypatch: pytest.MonkeyPatch, options: Options
) -> None:
    for ring in rings.glob("*"):
        ring.unlink()
    monkeypatch.setattr(vllm_worker, "_is_last_stage", lambda: True)
    patches = hooked()
    try:
        scheduler, requests = serve(options)
    finally:
        patches.restore()
    hold_to_the_laws(rings, scheduler, requests)


def test_steps_of_a_workers_warm_up_are_not_recorded(rings: Path, patches: Patches) -> None:
    scheduler, requests = serve(Options(lives=[(8, 4)] * 2))
    (worker,) = rings.glob("worker-*.ring")
    (core,) = rings.glob("core-*.ring")
    spans = of(StepSpan, worker)
    assert [span.step for span in spans] == [slices.step for slices in of(StepSlices, core)]
    assert [span.step for span in spans if span.cold] == [0]
    hold_to_the_laws(rings, scheduler, requests)


def test_steps_after_a_warm_up_that_failed_are_recorded(
    rings: Path, patches: Patches, monkeypatch: pytest.MonkeyPatch
) -> None:
    warm_up = toy_vllm.Worker.compile_or_warm_up_model

    def fails(worker: toy_vllm.Worker) -> None:
        warm_up(worker)
        raise RuntimeError("out of memory")

    monkeypatch.setattr(toy_vllm.Worker, "compile_or_warm_up_model", fails)
    hold_to_the_laws(rings, *serve(Options(lives=[(8, 4)] * 2)))
    (worker,) = rings.glob("worker-*.ring")
    (core,) = rings.glob("core-*.ring")
    spans = [span.step for span in of(StepSpan, worker)]
    assert spans == [slices.step for slices in of(StepSlices, core)] != []


def test_preemption_and_drafts_are_really_there(rings: Path, patches: Patches) -> None:
    crowd = Options(num_blocks=12, num_drafts=2, is_async=True, lives=[(12, 12)] * 6)
    scheduler, requests = serve(crowd)
    finals = hold_to_the_laws(rings, scheduler, requests)
    seen = [row for step in finals.steps for row in rows(step)]
    assert {phase for _, phase, _, _ in seen} == {PREFILL, DECODE, VERIFY}
    assert any(flags & RECOMPUTED for _, _, _, flags in seen)
    assert scheduler.num_preempted == sum(r.num_preemptions for r in finals.requests.values())


def test_a_request_is_of_the_adapter_that_it_asks_for(rings: Path, patches: Patches) -> None:
    lora = SimpleNamespace(lora_name="sql", lora_int_id=1, lora_path="/somewhere")
    serve(Options(lives=[(5, 3)] * 3, loras=[lora, None]))
    finals, _ = fold(rings)
    assert {name: each.adapter for name, each in finals.requests.items()} == {
        "r0": "sql",
        "r1": "",
        "r2": "",
    }


def received(*names: str, **other: object) -> object:
    return SimpleNamespace(finished_recving=set(names), **other)


def test_blocks_from_another_engine_are_recorded_on_arrival(rings: Path, patches: Patches) -> None:
    connector = toy_vllm.Connector()
    scheduler = Scheduler(toy_vllm.config(Options(connector=connector)))
    where = {"remote_host": "10.0.0.7", "remote_port": 5600, "remote_engine_id": "theirs"}
    places = {"near": where, "far": {"remote_engine_id": "theirs"}, "here": None, "lost": where}
    for name, params in places.items():
        request = Request(name, 9, 1, kv_transfer_params=params)
        scheduler.add_request(request)
        before_ns = time.monotonic_ns()
        connector.update_state_after_alloc(request, None, num_external_tokens=9)
        connector.update_state_after_alloc(request, None, 0)
    connector.update_connector_output(SimpleNamespace(finished_recving=None))
    connector.update_connector_output(received("near", "here", "unknown"))
    connector.update_connector_output(received("near", "far", failed_recving=set()))
    connector.update_connector_output(received("lost", failed_recving={"lost"}))
    connector.update_connector_output(received("lost"))
    after_ns = time.monotonic_ns()
    scheduler.finish_requests(None, toy_vllm.Status.FINISHED_ABORTED)
    scheduler.shutdown()
    finals, _ = fold(rings)
    transfers = {name: each.transfers for name, each in finals.requests.items()}
    assert transfers["here"] == transfers["lost"] == ()
    (near,), (far,) = transfers["near"], transfers["far"]
    assert (near.peer, far.peer) == ("10.0.0.7:5600", "theirs")
    assert near.num_bytes == far.num_bytes == 3 * 3 * 100, "three blocks of three layers"
    assert near.start_ns < far.start_ns < before_ns < near.end_ns < far.end_ns < after_ns
    for name in ("near", "far"):
        waited_ns = transfers[name][0].end_ns - transfers[name][0].start_ns
        assert finals.requests[name].ledger_ns["kv_transfer"] == waited_ns


class OtherConnector(toy_vllm.Connector):
    """A class of its own, as of an engine that is started with other options."""

    def update_connector_output(self, connector_output: Any) -> None:
        """Hear of what workers have received."""


def test_blocks_of_each_engine_in_a_process_are_recorded(rings: Path, patches: Patches) -> None:
    for connector in (toy_vllm.Connector(), toy_vllm.Connector(), OtherConnector()):
        scheduler = Scheduler(toy_vllm.config(Options(connector=connector)))
        request = Request("same", 9, 1, kv_transfer_params={"remote_host": "there"})
        scheduler.add_request(request)
        connector.update_state_after_alloc(request, None, num_external_tokens=9)
        connector.update_connector_output(received("same", failed_recving=set()))
        scheduler.finish_requests(None, toy_vllm.Status.FINISHED_ABORTED)
        scheduler.shutdown()
    cores = sorted(rings.glob("core-*.ring"))
    assert [len(of(Transfer, path)) for path in cores] == [1, 1, 1]


def test_a_pause_is_what_requests_wait_for(rings: Path, patches: Patches) -> None:
    serve(Options(lives=[(5, 3)] * 3, pause_at=2))
    finals, _ = fold(rings)
    assert {each.finish for each in finals.requests.values()} == {"length"}
    assert all(each.ledger_ns["paused"] > 0 for each in finals.requests.values())


def test_a_scheduler_that_does_not_report_its_cache_is_observed_without_transfers(
    rings: Path, patches: Patches, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(vllm_core, "groups_of", lambda scheduler: [])
    serve(Options(lives=[(5, 3)], connector=toy_vllm.Connector()))
    assert caplog.text.count("unsupported: KV transfers") == 1
    finals, _ = fold(rings)
    assert finals.requests["r0"].finish == "length"


SAMPLING = {
    "n": 1,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.25,
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 40,
    "seed": 11,
    "max_tokens": 12,
    "output_kind": SimpleNamespace(name="DELTA"),
}
OFF = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "seed": None, "frequency_penalty": 0.0}


def asked(parent: object = None, **other: object) -> dict[str, str]:
    params = SimpleNamespace(**{**SAMPLING, **other})
    request = SimpleNamespace(prompt_token_ids=[1] * 20, sampling_params=params)
    return asked_of(request, parent, max_model_tokens=64)


def test_what_was_asked_of_the_sampling_is_what_is_in_force() -> None:
    expected_attributes = {
        "stream": "true",
        "max_tokens": "12",
        "temperature": "0.7",
        "top_p": "0.9",
        "top_k": "40",
        "frequency_penalty": "0.25",
        "seed": "11",
    }
    assert asked() == expected_attributes
    several = SimpleNamespace(sampling_params=SimpleNamespace(n=3, seed=11))
    assert asked(several, seed=13) == {
        **expected_attributes,
        "n": "3",
    }  # vLLM adds an answer's number to it


def test_disabled_parameters_and_the_models_own_limits_are_omitted() -> None:
    whole = SimpleNamespace(name="FINAL_ONLY")
    assert asked(**OFF, max_tokens=43, output_kind=whole) == {
        "stream": "false",
        "max_tokens": "43",
        "temperature": "0.0",
    }
    cumulative = SimpleNamespace(name="CUMULATIVE")
    assert asked(**OFF, max_tokens=44, output_kind=cumulative) == {"temperature": "0.0"}


def test_of_an_embedding_and_of_another_version_nothing_is_made_up() -> None:
    bare = SimpleNamespace(prompt_token_ids=None, sampling_params=None)
    assert asked_of(bare, None, max_model_tokens=64) == {}
    bare.sampling_params = SimpleNamespace(max_tokens="twelve", temperature=True)
    assert asked_of(bare, None, max_model_tokens=64) == {}


FAULTS = [
    (CoreHooks, "made"),
    (CoreHooks, "adding"),
    (CoreHooks, "added"),
    (vllm_kept.Kept, "flush"),
    (vllm_kept.Kept, "judge"),
    (Core, "write_plan"),
    (Core, "write_outcome"),
    (CoreHooks, "dispatched"),
    (CoreHooks, "aborting"),
    (CoreHooks, "aborted"),
    (CoreHooks, "turned"),
    (CoreHooks, "closed"),
    (Core, "_write_slices"),
    (WorkerHooks, "initialised"),
    (WorkerHooks, "configured"),
    (WorkerHooks, "warming_up"),
    (WorkerHooks, "warmed_up"),
    (WorkerHooks, "mark"),
    (Marks, "begin"),
    (Marks, "device_start"),
    (Marks, "end"),
    (WorkerHooks, "stop"),
    (WorkerHooks, "sign"),
    (WorkerHooks, "closed"),
]
CROWD = Options(num_blocks=12, num_drafts=1, abort_every=9, lives=[(12, 9)] * 5, pause_at=6)


@pytest.mark.parametrize(
    ("owner", "hook"), FAULTS, ids=lambda value: getattr(value, "__name__", value)
)
def test_a_fault_in_any_hook_is_reported_once_and_changes_nothing(
    rings: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    owner: type,
    hook: str,
) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise RuntimeError("our own mistake")

    _, untouched = serve(CROWD)
    monkeypatch.setattr(vllm_worker, "_is_last_stage", lambda: True)
    monkeypatch.setattr(WorkerHooks, "_timer", lambda self, device: EventTimer(DoneEvents()))
    monkeypatch.setattr(owner, hook, broken)
    patches = hooked()
    probes = attached_to(patches, monkeypatch)
    try:
        with caplog.at_level(logging.WARNING):
            _, observed = serve(CROWD)
    finally:
        patches.restore()
    assert [vars(request) for request in observed] == [vars(request) for request in untouched]
    # Each ring's own probe reports it; one that is closed by then does not.
    assert 1 <= caplog.text.count("our own mistake") <= max(1, len(patches.probes))
    assert probes or hook in ("initialised", "configured"), "a worker's ring is opened last"
    assert not any(probe.on for probe in probes)


@pytest.mark.parametrize("hook", ["made", "added", "processed", "closing", "closed"])
def test_a_fault_in_the_front_ends_hooks_changes_nothing(
    rings: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, hook: str
) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise RuntimeError("our own mistake")

    monkeypatch.setattr(FrontEndHooks, hook, broken)
    patches = hooked()
    try:
        with caplog.at_level(logging.WARNING):
            engine = toy_vllm.AsyncLLM(toy_vllm.config(Options()))
            request = SimpleNamespace(request_id="a-1", prompt_token_ids=[1], external_req_id="a")
            for _ in range(2):
                engine.output_processor.add_request(request, None)
                assert engine.output_processor.process_outputs([]).reqs_to_abort == []
            engine.shutdown()
    finally:
        patches.restore()
    assert engine.output_processor.calls == ["a-1", "a-1"]
    assert caplog.text.count("our own mistake") == 1


def post(edge_app: type, serve: Callable[[], None]) -> None:
    """Serve one POST by what is given, through an application of a watched class."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        serve()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x"})

    async def nothing(*message: object) -> dict[str, str]:
        return {"type": "http.request"}

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    application = edge_app()
    application.middleware_stack = app
    asyncio.run(application(scope, nothing, nothing))


def ask(engine: toy_vllm.AsyncLLM, name: str) -> None:
    request = SimpleNamespace(
        request_id=name, prompt_token_ids=[1], external_req_id=name, sampling_params=None
    )
    output = SimpleNamespace(request_id=name, new_token_ids=[5])

    def serve() -> None:
        engine.output_processor.add_request(request, None)
        engine.output_processor.process_outputs([output])

    post(Starlette, serve)


def named(probe: Probe) -> list[str]:
    assert probe.path is not None
    return [event.request_id for event in of(RequestEvent, probe.path) if event.request_id]


def test_requests_of_a_second_engine_client_are_not_recorded_as_the_firsts(rings: Path) -> None:
    patches = hooked()
    setting = toy_vllm.config(Options())
    try:
        first, second = toy_vllm.AsyncLLM(setting), toy_vllm.AsyncLLM(setting)
        ask(first, "a")
        ask(second, "b")
        (probe,) = patches.probes
        assert named(probe) == ["a"]
        assert len(of(Emitted, probe.path)) == 1
    finally:
        patches.restore()
        for probe in patches.probes:
            probe.close()


@pytest.mark.parametrize("is_core_dead", [False, True])
def test_a_shutdown_in_answer_to_a_dead_core_leaves_no_shutdown_record(
    rings: Path, monkeypatch: pytest.MonkeyPatch, is_core_dead: bool
) -> None:
    patches = hooked()
    probes = attached_to(patches, monkeypatch)
    try:
        client = toy_vllm.AsyncLLM(toy_vllm.config(Options()))
        client.engine_core.resources = SimpleNamespace(engine_dead=is_core_dead)
        ring = probes[0].path
        assert ring is not None
        client.shutdown()
        assert (patches.probes, probes[0].on) == ([], False)
        toy_vllm.AsyncLLM(toy_vllm.config(Options()))
        health = of(ProbeHealth, ring)
        assert bool(health and health[-1].state == CLOSED) is not is_core_dead
    finally:
        patches.restore()
        for probe in probes:
            probe.close()


def test_engine_clients_one_after_the_other_are_observed_each_to_its_own_shutdown(
    rings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patches = hooked()
    probes = attached_to(patches, monkeypatch)
    setting = toy_vllm.config(Options())
    try:
        first = toy_vllm.AsyncLLM(setting)
        toy_vllm.AsyncLLM.shutdown(object.__new__(toy_vllm.AsyncLLM))  # one that failed to begin
        assert probes[0].on, "another client's shutdown"
        ask(first, "a")
        first.shutdown()
        assert not probes[0].on
        second = toy_vllm.AsyncLLM(setting)
        ask(second, "b")
        gone = weakref.ref(second)
        del second
        gc.collect()
        assert gone() is None
        ask(toy_vllm.AsyncLLM(setting), "c")
        assert [named(probe) for probe in probes] == [["a"], ["b"], ["c"]]
        assert not probes[1].on, "its client is gone"
        assert patches.probes == probes[2:], "what is closed is not kept"
    finally:
        patches.restore()
        for probe in probes:
            probe.close()


def test_what_is_missing_is_unsupported_and_nothing_else_happens(
    rings: Path, caplog: pytest.LogCaptureFixture
) -> None:
    patches = Patches("vLLM")
    bare = type("Scheduler", (), {"__init__": Scheduler.__init__})
    with caplog.at_level(logging.WARNING):
        CoreHooks(patches).install(bare)
    missing = "add_request, schedule, update_from_output, finish_requests is missing"
    assert f"unsupported: the scheduler: {__name__}.Scheduler.{missing}" in caplog.text
    assert caplog.text.count("unsupported") == 1
    patches.restore()
    assert set(vars(bare)) - {"__module__", "__dict__", "__weakref__", "__doc__"} == {"__init__"}


def core_of(scheduler: Scheduler) -> Core:
    """Return what the hooks in place know of a scheduler."""
    known = (one for one in gc.get_objects() if type(one) is Core)
    (core,) = (core for core in known if core.scheduler is scheduler)
    return core


@pytest.mark.parametrize("is_shut_down", [True, False])
def test_engines_one_after_the_other_in_a_process_are_observed_and_not_kept(
    rings: Path, patches: Patches, monkeypatch: pytest.MonkeyPatch, is_shut_down: bool
) -> None:
    workers: list[weakref.ref[object]] = []
    make = toy_vllm.Worker.__init__

    def made(self: toy_vllm.Worker, vllm_config: object) -> None:
        make(self, vllm_config)
        workers.append(weakref.ref(self))

    monkeypatch.setattr(toy_vllm.Worker, "__init__", made)
    connector = toy_vllm.Connector()
    requests: list[Request] = []
    for name in ("first", "second"):
        scheduler, some = serve(
            Options(name=name, lives=[(5, 3)] * 3, connector=connector, is_shut_down=is_shut_down)
        )
        requests += some
        num_preempted = scheduler.num_preempted
        gone = weakref.ref(scheduler)
        del scheduler
        gc.collect()
        assert gone() is None
        assert workers[-1]() is None
        assert len(patches.probes) == (0 if is_shut_down else 2), "the worker's and the core's"
    for probe in patches.probes:
        probe.close()
    finals = hold_to_the_laws(
        rings, SimpleNamespace(num_drafts=0, num_preempted=num_preempted), requests
    )
    assert all(each.prefill_ns > 0 for each in finals.requests.values())


UNIT = ("add_request", "schedule", "update_from_output", "finish_requests")


def test_a_worker_that_ray_executes_past_its_hooks_leaves_a_ring_that_reports_it(
    rings: Path, patches: Patches
) -> None:
    class RayWorkerWrapper(toy_vllm.WorkerWrapperBase):
        def execute_model_ray(self, execute_model_input: object) -> None:
            """Call the model runner of the worker."""

    wrapper = RayWorkerWrapper(toy_vllm.config(Options()))
    wrapper.init_device()
    wrapper.worker.initialize_from_config(None)
    (probe,) = patches.probes
    assert not probe.on
    (health,) = of(ProbeHealth, next(rings.glob("worker-*.ring")))
    assert health.state == UNSUPPORTED
    assert health.unsupported == ("steps of the worker: Ray calls its model runner directly",)


@pytest.mark.parametrize("missing", UNIT)
def test_without_one_method_of_the_scheduler_none_is_hooked_and_the_ring_reports_it(
    rings: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, missing: str
) -> None:
    methods = {name: vars(Scheduler)[name] for name in UNIT if name != missing}
    other = type("Scheduler", (), {**methods, "__init__": Scheduler.__init__, "_free": None})
    patches = Patches("vLLM")
    CoreHooks(patches).install(other)
    FrontEndHooks(patches).install(toy_vllm.AsyncLLM)
    try:
        setting = toy_vllm.config(Options())
        other(setting)
        assert {name: vars(other)[name] for name in methods} == methods
        (probe,) = patches.probes
        assert not probe.on
        (health,) = of(ProbeHealth, next(rings.glob("core-*.ring")))
        assert health.state == UNSUPPORTED
        (feature,) = health.unsupported
        assert feature.startswith("the scheduler: ")
        assert f".{missing} is missing" in feature
    finally:
        patches.restore()
        for probe in patches.probes:
            probe.close()
    assert caplog.text.count("unsupported: ") == 1


def copy_of(function: FunctionType) -> FunctionType:
    """Return a function of its own with the same code."""
    parts = (function.__name__, function.__defaults__, function.__closure__)
    return FunctionType(function.__code__, function.__globals__, *parts)


@pytest.mark.thorough
@pytest.mark.parametrize("name", [*UNIT, "shutdown", "set_pause_state"])
@pytest.mark.parametrize("calls_base", [True, False])
def test_a_scheduler_that_overrides_a_hooked_method_is_observed_like_its_base(
    rings: Path, monkeypatch: pytest.MonkeyPatch, name: str, calls_base: bool
) -> None:
    original = vars(Scheduler)[name]

    class Custom(Scheduler):
        pass

    def override(self: Scheduler, *args: object, **kwargs: object) -> object:
        return getattr(super(Custom, self), name)(*args, **kwargs)

    setattr(Custom, name, override if calls_base else copy_of(original))
    monkeypatch.setattr(vllm_worker, "_is_last_stage", lambda: True)
    monkeypatch.setattr(toy_vllm, "Scheduler", Custom)
    patches = Patches("vLLM")
    CoreHooks(patches).install(Scheduler)
    WorkerHooks(patches).install(toy_vllm.WorkerWrapperBase)
    try:
        scheduler, requests = serve(CROWD)
    finally:
        patches.restore()
    finals = hold_to_the_laws(rings, scheduler, requests)
    assert all(each.ledger_ns["paused"] > 0 for each in finals.requests.values())
    assert {each.finish for each in finals.requests.values()} == {"length", "client_cancel"}
    assert sum(each.num_preemptions for each in finals.requests.values()) == scheduler.num_preempted


def test_steps_that_were_planned_where_no_hook_is_leave_a_ring_that_reports_it(
    rings: Path, patches: Patches, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler = Scheduler(toy_vllm.config(Options()))
    scheduler.add_request(Request("a", 5, 3))
    output = Scheduler.schedule.__wrapped__(scheduler)  # type: ignore[attr-defined]
    sampled = SimpleNamespace(req_id_to_index={"a": 0}, sampled_token_ids=[[9]])
    for _ in range(2):
        scheduler.update_from_output(output, sampled)
    assert caplog.text.count("unsupported: the scheduler: ") == 1
    health = of(ProbeHealth, next(rings.glob("core-*.ring")))[-1]
    assert health.state == UNSUPPORTED
    assert health.unsupported[0].startswith("the scheduler: ")


def test_evictions_of_a_scheduler_that_is_observed_no_longer_are_not_kept(rings: Path) -> None:
    patches = Patches("vLLM")
    hooks = CoreHooks(patches)
    hooks.install(Scheduler)
    try:
        scheduler = Scheduler(toy_vllm.config(Options()))
        assert hooks.kept is not None
        recorder, pool = hooks.kept.core.cache, scheduler.kv_cache_manager.block_pool
        assert recorder is not None
        for number in range(2):
            pool.cached_block_hash_to_block[b"key"] = object()
            assert pool._maybe_evict_cached_block(SimpleNamespace(block_hash=b"key", block_id=1))
            assert len(recorder.evicted) == 1
            if not number:
                hooks.unplanned(hooks.kept)
    finally:
        patches.restore()


@pytest.mark.parametrize("missing", ["set_pause_state", "shutdown"])
def test_a_hook_of_one_feature_costs_that_feature_alone(
    rings: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    monkeypatch.setattr(vllm_worker, "_is_last_stage", lambda: True)
    original = getattr(Scheduler, missing)
    monkeypatch.delattr(Scheduler, missing)
    patches = hooked()
    try:
        monkeypatch.setattr(
            Scheduler, missing, original, raising=False
        )  # the toy needs it, the hooks did not
        scheduler, requests = serve(Options(lives=[(5, 3)] * 3))
    finally:
        for probe in patches.probes:
            probe.close()
        patches.restore()
    hold_to_the_laws(rings, scheduler, requests)
    (health, *_) = of(ProbeHealth, next(rings.glob("core-*.ring")))
    (feature,) = health.unsupported
    assert f".{missing} is missing" in feature


@pytest.mark.parametrize("how", ["one", "several", "an iterator", "all"])
@pytest.mark.parametrize("returns_nothing", [False, True])
def test_requests_ended_from_outside_leave_nothing_behind(
    rings: Path, patches: Patches, how: str, returns_nothing: bool
) -> None:
    options = Options(returns_nothing=returns_nothing)
    scheduler = Scheduler(toy_vllm.config(options))
    for name in ("a", "b"):
        scheduler.add_request(Request(name, 5, 3))
    core = core_of(scheduler)
    ids = {"one": "a", "several": ["a", "gone"], "an iterator": iter(["a"]), "all": None}[how]
    scheduler.finish_requests(ids, toy_vllm.Status.FINISHED_ABORTED)
    assert set(core._requests) == set(scheduler.requests)
    scheduler.finish_requests(None, toy_vllm.Status.FINISHED_ABORTED)
    assert not core._requests
    scheduler.shutdown()
    finals, _ = fold(rings)
    ended = "server_abort" if how == "all" else "client_cancel"
    assert {name: each.finish for name, each in finals.requests.items()} == {
        "a": ended,
        "b": "server_abort",
    }


def test_a_request_that_ends_where_no_hook_is_leaves_with_the_next_step(
    rings: Path, patches: Patches
) -> None:
    scheduler = Scheduler(toy_vllm.config(Options()))
    scheduler.add_request(Request("a", 5, 3))
    scheduler.add_request(Request("b", 5, 3))
    core = core_of(scheduler)
    scheduler._forget(scheduler.requests["a"])  # by none of the scheduler's methods
    scheduler.get_grammar_bitmask(scheduler.schedule())
    assert set(core._requests) == {"b"}


def test_aborts_keep_their_reason_if_a_steps_outputs_are_handled_in_vain(
    rings: Path, patches: Patches
) -> None:
    scheduler = Scheduler(toy_vllm.config(Options()))
    for name in ("a", "b"):
        scheduler.add_request(Request(name, 5, 3))
    output = scheduler.schedule()
    with pytest.raises(KeyError):
        scheduler.update_from_output(
            output, SimpleNamespace(req_id_to_index={}, sampled_token_ids=[])
        )
    scheduler.finish_requests(["a"], toy_vllm.Status.FINISHED_ABORTED)
    scheduler.schedule()
    scheduler.finish_requests(["b"], toy_vllm.Status.FINISHED_ABORTED)
    assert not core_of(scheduler)._requests
    scheduler.shutdown()
    finals, _ = fold(rings)
    assert {each.finish for each in finals.requests.values()} == {"client_cancel"}


def test_the_turns_of_a_session_are_prefills_and_its_last_input_stops_it(
    rings: Path, patches: Patches
) -> None:
    scheduler = Scheduler(toy_vllm.config(Options()))
    wrapper = toy_vllm.WorkerWrapperBase(scheduler.vllm_config)
    wrapper.init_device()
    wrapper.worker.initialize_from_config(None)
    for num_new in (4, 8):
        scheduler.add_request(Request("s", num_new, 2, resumable=True))
        for _ in range(2):
            output = scheduler.schedule()
            wrapper.worker.execute_model(output)
            answer = wrapper.worker.sample_tokens({"s"})
            scheduler.update_from_output(output, answer)
    scheduler.add_request(Request("s", 0, 0, resumable=True))
    scheduler.shutdown()
    wrapper.worker.shutdown()
    finals, _ = fold(rings)
    assert [rows(step) for step in finals.steps] == [
        [("s", PREFILL, 4, LAST_CHUNK)],
        [("s", DECODE, 1, 0)],
        [("s", PREFILL, 8, LAST_CHUNK)],
        [("s", DECODE, 1, 0)],
    ]
    final = finals.requests["s"]
    assert (final.finish, final.num_preemptions, final.output_tokens) == ("stop", 0, 4)
    assert sum(final.ledger_ns.values()) == final.delivered_ns - final.arrived_ns


@pytest.mark.parametrize("is_judged_first", [True, False])
def test_drafts_in_flight_when_a_sessions_turn_ends_are_in_no_context_of_the_next(
    tmp_path: Path, is_judged_first: bool
) -> None:
    probe = make_probe(tmp_path, FakeClock(step_ns=10))
    scheduler = Scheduler(toy_vllm.config(Options()))
    core = Core(scheduler, probe)
    kept = Kept(core)
    session = Request("s", 4, 9, resumable=True)
    scheduler.add_request(session)
    core.added(session)

    def plan(context: int, tokens: int, *, drafts: int = 0, is_new: bool = False) -> Any:
        new = [SimpleNamespace(req_id="s", num_computed_tokens=context)]
        again = SimpleNamespace(
            req_ids=[] if is_new else ["s"],
            num_computed_tokens=[] if is_new else [context],
            resumed_req_ids=set(),
        )
        spec = {"s": [-1] * drafts} if drafts else {}
        output = toy_vllm.SchedulerOutput(
            new if is_new else [], again, {"s": tokens}, tokens, spec, None
        )
        vllm_tag.attach(output, kept.next_step)
        kept.planned = (output, kept.next_step, 0, 1)
        kept.next_step += 1
        kept.flush()
        return output

    def judge(output: Any, *, num_sampled: int) -> None:
        answer = SimpleNamespace(req_id_to_index={"s": 0}, sampled_token_ids=[[9] * num_sampled])
        kept.accepted = {}
        kept.judge(output, answer)
        kept.left.append((output, {}, 2, [], kept.accepted))
        kept.flush()

    judge(plan(0, 4, is_new=True), num_sampled=1)
    last = plan(4, 4, drafts=3)
    in_flight = plan(8, 4, drafts=3)  # counts all drafts of `last`
    judge(last, num_sampled=2)  # the turn ends behind 6 tokens, and new input comes at once
    session.num_prompt_tokens = 6 + 5
    if is_judged_first:
        judge(in_flight, num_sampled=4)
    turn = plan(6, 5, is_new=True)
    if not is_judged_first:
        judge(in_flight, num_sampled=1)
    judge(turn, num_sampled=1)
    path = probe.path
    assert path is not None
    probe.close()
    (*_, slices) = of(StepSlices, path)
    tokens, contexts = memoryview(slices.tokens).cast("I"), memoryview(slices.contexts).cast("I")
    assert (list(slices.phases), list(slices.flags)) == ([PREFILL], [LAST_CHUNK])
    assert (list(tokens), list(contexts)) == ([5], [6])


@pytest.mark.parametrize("num_sampled", [0, 1])
def test_accepted_draft_tokens_are_without_the_one_that_is_sampled(
    rings: Path, patches: Patches, num_sampled: int
) -> None:
    scheduler = Scheduler(toy_vllm.config(Options(num_drafts=2)))
    scheduler.num_sampled_tokens_per_step = num_sampled  # 0: diffusion
    scheduler.add_request(Request("a", 5, 9))
    for sampled in ([9], [9, 9]):
        output = scheduler.schedule()
        answer = SimpleNamespace(req_id_to_index={"a": 0}, sampled_token_ids=[sampled])
        scheduler.update_from_output(output, answer)
    assert output.scheduled_spec_decode_tokens == {"a": [-1, -1]}
    kept = [one for one in gc.get_objects() if type(one) is Kept]
    assert [one.accepted for one in kept if one.scheduler() is scheduler] == [{0: 2 - num_sampled}]


EVENTS = st.lists(
    st.tuples(st.sampled_from(["add", "step", "abort", "lose"]), st.integers(0, 11)), max_size=60
)


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(events=EVENTS, most=st.integers(1, 6))
def test_tables_stay_bounded_whatever_never_ends(
    rings: Path, tmp_path: Path, events: list[tuple[str, int]], most: int
) -> None:
    for ring in tmp_path.glob("*.ring"):
        ring.unlink()
    probe = make_probe(tmp_path, FakeClock(step_ns=10))
    scheduler = Scheduler(toy_vllm.config(Options(num_blocks=200)))
    core = Core(scheduler, probe)
    core._requests = LiveTable(probe, most=most)
    kept = Kept(core)
    num_added = 0
    for event, number in events:
        name = f"r{number}"
        if event == "add" and name not in scheduler.requests:
            request = Request(name, 5, 100)
            scheduler.add_request(request)
            core.added(request)
            num_added += 1
        elif event == "step":
            kept.planned = (scheduler.schedule(), kept.next_step, 0, 1)  # outputs never come
            kept.next_step += 1
            kept.flush()
        elif event == "abort" and name in scheduler.requests:
            scheduler.finish_requests([name], toy_vllm.Status.FINISHED_ABORTED)
            core.aborted([name], toy_vllm.Status.FINISHED_ABORTED)
        elif event == "lose" and name in scheduler.requests:
            scheduler._forget(scheduler.requests[name])
        assert len(core._requests) <= most
        assert len(core._flying) <= 64
    assert probe.on
    path = probe.path
    assert path is not None
    probe.close()
    unsupported = of(ProbeHealth, path)[-1].unsupported
    assert bool(unsupported) == bool(core._requests.num_dropped)


@pytest.mark.parametrize("num_drafts", [0, 2])
@pytest.mark.parametrize("most", [0, 1, 2])
def test_requests_for_which_a_table_has_no_room_are_unknown_and_the_others_are_right(
    rings: Path, patches: Patches, monkeypatch: pytest.MonkeyPatch, most: int, num_drafts: int
) -> None:
    monkeypatch.setattr(vllm_steps, "LiveTable", functools.partial(LiveTable, most=most))
    crowd = Options(num_blocks=20, num_drafts=num_drafts, lives=[(12, 9)] * 5)
    scheduler, requests = serve(crowd)
    finals, _ = fold(rings)
    assert len(finals.requests) in range(most, 5), "in the place of those that ended, new ones"
    followed = [request for request in requests if request.request_id in finals.requests]
    assert followed[:most] == requests[:most]
    hold_to_the_laws(rings, scheduler, followed, are_all_followed=False)
    (health, *_) = reversed(of(ProbeHealth, next(rings.glob("core-*.ring"))))
    assert health.unsupported == (f"more than {most} live requests: the newest are not followed",)


class MarkedEvents:
    """Events of a device that notes each record among what the model runner does."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.made: list[object] = []

    def new(self) -> object:
        self.made.append(object())
        return self.made[-1]

    def record(self, event: object) -> None:
        self.calls.append(f"event {self.made.index(event)}")

    def record_aside(self, event: object) -> None:
        """An anchor is not the step's."""

    def is_done(self, event: object) -> bool:
        return False

    def is_capturing(self) -> bool:
        return False

    def aside(self) -> AbstractContextManager[bool]:
        return nullcontext(False)

    def reset(self) -> None:
        """Nothing is held."""

    def elapsed_ms(self, start: object, end: object) -> float:
        return 1.0


class DoneEvents(MarkedEvents):
    """Events that the device has passed as soon as they are recorded."""

    def is_done(self, event: object) -> bool:
        return True

    def aside(self) -> AbstractContextManager[bool]:
        return nullcontext(True)

    def elapsed_ms(self, start: object, end: object) -> float:
        return 0.0


def speculation(method: str, *, padded: bool) -> SimpleNamespace:
    return SimpleNamespace(
        method=method,
        disable_padded_drafter_batch=not padded,
        use_eagle=lambda: method in ("eagle", "eagle3", "mtp"),
        uses_draft_model=lambda: method == "draft_model",
        uses_extract_hidden_states=lambda: method == "extract_hidden_states",
        use_ngram_gpu=lambda: method == "ngram_gpu",
    )


@pytest.mark.parametrize(
    ("methods", "is_late_padded", "is_late"),
    [
        (["eagle", "mtp", "draft_model", "extract_hidden_states", "ngram_gpu"], False, True),
        (["medusa", "mlp_speculator", "custom_class"], True, True),
        (["ngram", "suffix"], False, False),  # on the host
    ],
)
def test_a_drafter_is_late_if_it_runs_on_the_device_after_the_host_has_waited(
    methods: list[str], is_late_padded: bool, is_late: bool
) -> None:
    for method in methods:
        for padded, due in ((True, is_late_padded), (False, is_late)):
            config = SimpleNamespace(speculative_config=speculation(method, padded=padded))
            assert vllm_worker._drafts_late(config) is due, method
    older = SimpleNamespace(speculative_config=SimpleNamespace(method="eagle"))
    assert vllm_worker._drafts_late(older)
    assert not vllm_worker._drafts_late(SimpleNamespace(speculative_config=None))


@pytest.mark.parametrize("drafts_late", [False, True])
def test_a_device_span_is_from_the_forward_to_before_the_host_waits(
    rings: Path, monkeypatch: pytest.MonkeyPatch, drafts_late: bool
) -> None:
    events = MarkedEvents()
    monkeypatch.setattr(vllm_worker, "_is_last_stage", lambda: True)
    monkeypatch.setattr(vllm_worker, "_drafts_late", lambda config: drafts_late)
    monkeypatch.setattr(WorkerHooks, "_timer", lambda self, device: EventTimer(events))
    patches = hooked()
    try:
        setting = toy_vllm.config(Options())
        wrapper = toy_vllm.WorkerWrapperBase(setting)
        wrapper.init_device()
        worker, runner = wrapper.worker, wrapper.worker.model_runner
        worker.initialize_from_config(None)
        runner.calls = events.calls
        scheduler = Scheduler(setting)
        scheduler.add_request(Request("r", 5, 3))
        output = scheduler.schedule()
        runner._model_forward()  # a warm-up: no step is open
        worker.execute_model(output)
        worker.sample_tokens({"r"})
    finally:
        patches.restore()
        for probe in patches.probes:
            probe.close()
    last = max(int(line.split()[1]) for line in events.calls if line.startswith("event"))
    start, end = f"event {last - 1}", f"event {last}"
    tail = ["sync", end] if drafts_late else [end, "sync"]
    assert events.calls == [
        *("forward", start, "prepare", start, "forward", "sample"),
        *tail,
    ]


def test_a_model_runner_without_these_places_is_timed_by_the_workers_calls(
    rings: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(vllm_worker, "_is_last_stage", lambda: True)
    monkeypatch.setattr(WorkerHooks, "_timer", lambda self, device: EventTimer(DoneEvents()))
    monkeypatch.setattr(toy_vllm, "ModelRunner", OtherRunner)
    patches = hooked()
    try:
        scheduler, requests = serve(Options(lives=[(5, 3)] * 3))
    finally:
        patches.restore()
        for probe in patches.probes:
            probe.close()
    hold_to_the_laws(rings, scheduler, requests)
    assert caplog.text.count("unsupported: device spans that begin at the forward") == 1


class OtherRunner:
    """A model runner whose methods go by other names."""

    def prepare(self) -> None:
        """Prepare inputs."""

    def __getattr__(self, name: str) -> object:
        if name == "kv_connector":
            raise AttributeError(name)
        return lambda *args, **kwargs: None


def test_all_hooks_are_taken_back(rings: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_worker, "_is_last_stage", lambda: True)
    classes = [
        toy_vllm.Scheduler,
        toy_vllm.Worker,
        toy_vllm.WorkerWrapperBase,
        toy_vllm.AsyncLLM,
        toy_vllm.OutputProcessor,
    ]
    before = [dict(vars(kind)) for kind in classes]
    patches = hooked()
    toy_vllm.AsyncLLM(toy_vllm.config(Options())).shutdown()
    serve(CROWD)
    during = [dict(vars(kind)) for kind in classes]
    patches.restore()
    assert all(one != other for one, other in zip(before, during, strict=True))
    assert [dict(vars(kind)) for kind in classes] == before


@pytest.mark.parametrize("is_on", ["0", "1"])
def test_the_plug_in_imports_nothing_unless_it_is_switched_on(is_on: str) -> None:
    program = (
        "import sys\n"
        "from inferscope.adapters.vllm.plugin import register\n"
        "register(); register()\n"
        "print(*sorted(name for name in sys.modules if name.startswith('inferscope')))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={"INFERSCOPE": is_on, "PYTHONPATH": ":".join(sys.path), "INFERSCOPE_DIR": "/nowhere"},
    )
    names = done.stdout.split()
    quiet = [
        "inferscope",
        "inferscope.adapters",
        "inferscope.adapters.registry",
        "inferscope.adapters.vllm",
        "inferscope.adapters.vllm.plugin",
        "inferscope.errors",
        "inferscope.observing",
    ]
    if is_on == "0":
        assert names == quiet
        assert done.stderr == ""
    else:
        assert "inferscope.adapters.vllm.core" in names
        assert done.stderr.count("unsupported: vllm.v1.core.sched.scheduler is missing") == 1


def registered_after(broken: str) -> str:
    """Register in a process of its own that is broken first; return what it writes to stderr."""
    program = f"""
import logging, sys
{broken}
from inferscope.adapters.vllm.plugin import register
register()
print("served")
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        env={"INFERSCOPE": "1", "PYTHONPATH": ":".join(sys.path), "INFERSCOPE_DIR": "/nowhere"},
    )
    assert (done.returncode, done.stdout) == (0, "served\n"), done.stderr
    return done.stderr


@pytest.mark.parametrize(
    "broken", ["sys.modules['msgspec'] = None", "sys.modules['inferscope.probe.identity'] = sys"]
)
def test_an_installation_that_is_broken_leaves_vllm_running(broken: str) -> None:
    assert "inferscope: not observing: " in registered_after(broken)


def test_a_log_that_raises_leaves_vllm_running_too() -> None:
    registered_after(
        "sys.modules['inferscope.adapters.vllm.hooks'] = None\n"
        "logging.getLogger('inferscope').addFilter(lambda record: 1 / 0)"
    )


def test_the_names_of_faults_are_those_of_hooks() -> None:
    hooks = {name for name in vars(vllm_core.CoreHooks) if not name.startswith("_")}
    assert hooks - {"install", "made_otherwise", "unplanned", "forget"} == {
        hook for owner, hook in FAULTS if owner is CoreHooks
    }
    hooks = {name for name in vars(vllm_worker.WorkerHooks) if not name.startswith("_")}
    others = {"install", "idling", "idled", "is_computing_on_host", "sign_overdue", "forwarding"}
    others |= {"forget"}
    assert hooks - others == {hook for owner, hook in FAULTS if owner is WorkerHooks}
    hooks = {name for name in vars(vllm_frontend.FrontEndHooks) if not name.startswith("_")}
    assert hooks - {"install"} == {"made", "added", "processed", "closing", "closed"}


GOLDEN = Path(__file__).parents[1] / "golden" / "vllm-records.json"


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("bitmask", ["dispatched", "early", "late", "never", "at once"])
def test_records_are_those_of_hooks_that_write_everything_at_once(
    rings: Path, monkeypatch: pytest.MonkeyPatch, name: str, bitmask: str
) -> None:
    """The golden file was written by such hooks; see `vllm_records.py`."""
    monkeypatch.setattr(vllm_worker, "_is_last_stage", lambda: True)
    options, patches = SCENARIOS[name], Patches("vLLM")
    probes = attached_to(patches, monkeypatch)
    if bitmask == "at once":  # worker and core of one process that computes on its CPU
        worker = WorkerHooks(patches)
        CoreHooks(patches, worker.is_computing_on_host).install(Scheduler)
    else:
        monkeypatch.setattr(WorkerHooks, "_timer", lambda self, device: EventTimer(DoneEvents()))
        options = replace(options, bitmask=bitmask)
        worker = WorkerHooks(patches)
        CoreHooks(patches).install(Scheduler)
    worker.install(toy_vllm.WorkerWrapperBase)
    try:
        serve(options)
    finally:
        patches.restore()
    assert len(probes) == 2
    assert not any(probe.on for probe in probes), "closed"
    (core,) = rings.glob("core-*.ring")
    assert len(of(StepSame, core)) > 3 or not name.startswith("a team")
    due, found = json.loads(GOLDEN.read_text())[name], facts(rings)
    if name == "drafts, asynchronous":  # after a preemption a worker cannot know what was accepted
        for each in (due, found):
            each["worker"] = [without_phases(line) for line in each["worker"]]
    assert found == due
