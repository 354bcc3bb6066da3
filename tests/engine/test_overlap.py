from __future__ import annotations

import io
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from inferscope.engine import Engine, EngineOptions, Sampling, load_engine
from inferscope.engine.load import load_model
from inferscope.engine.overlap import FutureTokens
from inferscope.engine.remote import AdmittedRequest, RemoteRunner, SliceSpec, StepWork
from inferscope.engine.runner import Collect, Runner
from inferscope.engine.scheduler import Plan
from inferscope.engine.worker import Worker
from inferscope.errors import BadInput
from inferscope.exporting import load_exporter
from inferscope.insight.request_observer import RequestObserver
from inferscope.probe import Probe
from inferscope.readers.request_index import requests_in_rings
from inferscope.readers.source import RingSource
from inferscope.records import Emitted, StepPlan, StepSpan
from inferscope.ring import find_engines
from tests.engine.checkpoints import prompts
from tests.engine.test_core import Spy, break_steps_with, drain
from tests.export_contract import check
from tests.insight.test_why import ROUNDING_NS
from tests.probe.fakes import facts_of, of

TIGHT = {"num_blocks": 50, "block_tokens": 4, "token_budget": 23}
"""Options under which chunks, prefix hits and preemptions occur."""
SAMPLINGS = (
    Sampling(max_tokens=20),
    Sampling(max_tokens=20, temperature=0.9, seed=5),
    Sampling(max_tokens=20, min_tokens=5, stop_token_ids=tuple(range(80)), temperature=1.0),
)
LARGER = "random:hidden=384,layers=6,heads=8,kv_heads=2,ffn=1024,vocab=1024"


def engine_of(*, overlap: bool = True, **options: Any) -> Engine:
    """Return an engine that runs its steps in this thread."""
    given = EngineOptions(dtype="float32", overlap=overlap, **options)
    return Engine(load_model("random:tiny", given), given)


@pytest.mark.thorough
@pytest.mark.parametrize("options", [{}, TIGHT])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_output_is_the_same_as_without_overlap(options: dict[str, int], sampling: Sampling) -> None:
    batch_prompts = prompts(12, vocab=512)
    plain, ahead = engine_of(overlap=False, **options), engine_of(**options)
    assert ahead.generate(batch_prompts, sampling) == plain.generate(batch_prompts, sampling)
    assert ahead.pool.num_used == 0
    if options and not sampling.stop_token_ids:
        assert ahead.stats().preemptions > 0


def test_step_is_launched_before_the_outputs_of_the_one_before_are_awaited() -> None:
    engine = engine_of()
    calls: list[tuple[str, int]] = []
    launch = engine._runner.launch

    def noted(step: int, plan: Any, probe: Probe) -> Callable[[], Any]:
        collect = launch(step, plan, probe)
        calls.append(("launch", step))
        return lambda: (calls.append(("collect", step)), collect())[1]

    engine._runner.launch = noted  # type: ignore[method-assign]
    engine.generate([[1, 2, 3]], Sampling(max_tokens=3))
    assert calls == [
        ("launch", 0), ("launch", 1), ("collect", 0), ("launch", 2), ("collect", 1), ("collect", 2)
    ]  # fmt: skip


def computed_by_request(spy: Spy) -> dict[int, int]:
    computed: dict[int, int] = {}
    for _, fields in spy.of("slices"):
        for index, num_tokens in zip(fields["requests"], fields["tokens"], strict=True):
            computed[index] = computed.get(index, 0) + num_tokens
    return computed


@pytest.mark.parametrize("options", [{}, TIGHT])
@pytest.mark.parametrize("has_stops", [False, True])
def test_records_account_for_every_token_and_for_discarded_ones(
    options: dict[str, int], has_stops: bool
) -> None:
    engine = engine_of(**options)
    engine.probe = spy = Spy()
    stops = tuple(range(120)) if has_stops else ()
    for seed, prompt in enumerate(prompts(12, vocab=512)):
        engine.submit(
            prompt, Sampling(max_tokens=20, temperature=1.0, seed=seed, stop_token_ids=stops)
        )
    ended = [output for output in drain(engine) if output.finish]
    computed = computed_by_request(spy)
    emitted = dict.fromkeys(computed, 0)
    for _, fields in spy.of("emitted"):
        for index, num in zip(fields["requests"], fields["tokens"], strict=True):
            emitted[index] += num
    num_discarded = 0
    for output in ended:
        request = output.request
        owed = request.num_prompt + request.num_output - 1 - request.cached_tokens
        discarded = computed[request.index] - owed - request.recomputed_tokens
        assert emitted[request.index] == request.num_output
        # One token after a stop that ended the output early; none after a known length.
        assert discarded in ((0, 1) if output.finish == "stop" else (0,))
        num_discarded += discarded
    assert (num_discarded > 0) is has_stops
    assert engine.stats().generated_tokens == sum(emitted.values())


def test_preemption_waits_for_the_outputs_under_way() -> None:
    engine = engine_of(**TIGHT)
    schedule, num_preempted = engine.scheduler.schedule, 0

    def checked() -> Any:
        nonlocal num_preempted
        plan = schedule()
        num_preempted += len(plan.preempted)
        assert not (plan.preempted and engine._flights)
        return plan

    engine.scheduler.schedule = checked  # type: ignore[method-assign]
    engine.generate(prompts(12, vocab=512), Sampling(max_tokens=20))
    assert num_preempted > 0


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(5))
def test_cancelling_at_random_moments_leaks_nothing(seed: int) -> None:
    draw = random.Random(seed)
    batch_prompts = prompts(10, vocab=512)
    expected = engine_of(overlap=False).generate(batch_prompts, Sampling(max_tokens=20))
    engine = engine_of(**TIGHT)
    tokens: dict[str, list[int]] = {}
    for prompt in batch_prompts:
        tokens[engine.submit(prompt, Sampling(max_tokens=20))] = []
    while engine.has_work:
        if draw.random() < 0.2:
            engine.cancel(draw.choice(list(tokens)))
        for output in engine.step():
            tokens[output.request.request_id] += output.tokens
    assert engine.pool.num_used == 0
    assert not any(engine.pool.references(block) for block in range(engine.pool.num_blocks))
    for output_tokens, whole in zip(tokens.values(), expected, strict=True):
        assert output_tokens == whole[: len(output_tokens)]


def test_failing_launch_ends_only_the_requests_of_its_step() -> None:
    (expected,) = engine_of().generate([[1, 2, 3]], Sampling(max_tokens=4))
    engine = engine_of(max_running=2)
    engine.probe = spy = Spy()
    break_steps_with(engine, 500)
    for prompt in ([9] * 5, [500] * 20, [1, 2, 3]):  # the third waits for a sequence slot
        engine.submit(prompt, Sampling(max_tokens=4))
    outputs = drain(engine)
    assert spy.finishes() == [(0, "error"), (1, "error"), (2, "length")]
    assert [token for output in outputs[2:] for token in output.tokens] == expected
    assert engine.pool.num_used == 0


def test_failed_outputs_end_the_requests_of_their_step_and_later_ones_continue() -> None:
    (expected,) = engine_of().generate([[1, 2, 3]], Sampling(max_tokens=4))
    engine = engine_of()
    launch = engine._runner.launch

    def failing(step: int, plan: Any, probe: Probe) -> Callable[[], Any]:
        collect = launch(step, plan, probe)
        return collect if step else broken

    def broken() -> Any:
        raise RuntimeError("the device failed")

    engine._runner.launch = failing  # type: ignore[method-assign]
    engine.submit([4, 5], Sampling(max_tokens=4), request_id="lost")
    assert engine.step() == []
    engine.submit([1, 2, 3], Sampling(max_tokens=4), request_id="later")
    outputs = drain(engine)
    assert [(output.request.request_id, output.finish) for output in outputs if output.finish] == [
        ("lost", "error"), ("later", "length")
    ]  # fmt: skip
    assert [token for output in outputs for token in output.tokens] == expected


def test_worker_runs_the_step_behind_a_failed_one() -> None:
    options = EngineOptions(dtype="float32", overlap=True, max_running=2, num_blocks=8)
    runner = Runner.of(load_model("random:tiny", options), options, num_blocks=8)
    worker = Worker(runner, Probe.disabled())
    execute = runner.execute
    admitted = [
        AdmittedRequest(slot, slot, [1 + slot, 2, 3], 3, Sampling(max_tokens=4), [], 0)
        for slot in range(2)
    ]

    def broken(batch: Any) -> Any:
        raise ValueError("a kernel failed")

    runner.execute = broken  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="a kernel failed"):
        worker.run(StepWork(0, admitted[:1], [SliceSpec(0, 0, 3, True, [0], [])]))
    runner.execute = execute  # type: ignore[method-assign]
    slices = [SliceSpec(0, 3, 1, True, [], []), SliceSpec(1, 0, 3, True, [1], [])]
    done = worker.run(StepWork(1, admitted[1:], slices))
    alone = engine_of().generate([[2, 2, 3]], Sampling(max_tokens=1))
    assert done.tokens[done.slice_indices.index(1)] == alone[0]


def test_overlap_beside_speculation_is_refused() -> None:
    with pytest.raises(BadInput, match="planned before the last token is known"):
        EngineOptions(overlap=True, speculative="ngram")


def test_placeholders_become_the_tokens_of_their_sequence_slots() -> None:
    future = FutureTokens(4, torch.device("cpu"))
    engine = engine_of()
    for prompt in ([7, 7], [8, 8]):
        engine.submit(prompt, Sampling(max_tokens=4))
    engine.step()
    (flight,) = engine._flights
    future.store(flight.plan.slices, torch.tensor([25, 26]))
    slots = [part.request.sequence_slot for part in flight.plan.slices]
    ids = torch.tensor([3, -1 - slots[1], -1 - slots[0], 0])
    assert future.fill(ids).tolist() == [3, 26, 25, 0]
    assert [part.request.tokens[-1] for part in flight.plan.slices] == [-1 - at for at in slots]


@pytest.mark.thorough
def test_steps_of_a_real_run_overlap_and_its_ledgers_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFERSCOPE_DIR", str(tmp_path))
    monkeypatch.setenv("INFERSCOPE_ENGINE_ID", "ahead")
    options = EngineOptions(
        dtype="float32", overlap=True, token_budget=24, max_running=6, num_blocks=60
    )
    engine = load_engine(LARGER, options, open_probe=Probe.open)
    assert isinstance(engine._runner, RemoteRunner)
    engine.submit([5, 6, 7], Sampling(max_tokens=24))
    began_s = time.monotonic()
    drain(engine)
    step_s = (time.monotonic() - began_s) / 24
    launch = engine._runner.launch
    draw = random.Random(0)

    def slow_launch(step: int, plan: Plan, probe: Probe) -> Collect:
        """Emit most steps' tokens within the next step, on any machine; others' after its end."""
        collect = launch(step, plan, probe)

        def slow_collect() -> Any:
            ran = collect()
            time.sleep(step_s * draw.choice([0.5, 0.5, 2.0]))
            return ran

        return slow_collect

    monkeypatch.setattr(engine._runner, "launch", slow_launch)
    for seed, prompt in enumerate(prompts(20, vocab=1024)):
        stops = tuple(range(40)) if seed % 2 else ()
        engine.submit(
            prompt, Sampling(max_tokens=24, temperature=1.0, seed=seed, stop_token_ids=stops)
        )
    drain(engine)
    engine.close()
    engine.probe.close()
    rings = tmp_path / "ahead"
    core, worker = (next(rings.glob(f"{role}-0-*.ring")) for role in ("core", "worker"))
    plans = {plan.step: plan for plan in facts_of(StepPlan, core)}
    spans = {span.step: span for span in of(StepSpan, worker)}
    emitted_ns = {emitted.step: emitted.at_ns for emitted in facts_of(Emitted, core)}
    pairs = [(step, step + 1) for step in spans if step + 1 in spans]
    num_ahead = sum(plans[after].end_ns < spans[step].ready_ns for step, after in pairs)
    num_inside = sum(
        spans[after].launch_start_ns < emitted_ns[step] < spans[after].ready_ns
        for step, after in pairs
        if step in emitted_ns
    )
    assert num_ahead > len(pairs) / 2  # without overlap: none
    assert num_inside > len(pairs) / 10

    out = io.BytesIO()
    exporter = load_exporter("jsonl")(out)
    observers = [
        RequestObserver(ref, {}) for ref in requests_in_rings(find_engines(tmp_path), "request-")
    ]

    def listen(ring: int, record: Any) -> None:
        for observer in observers:
            observer.on_record(ring, record)

    source = RingSource(
        lambda: rings.glob("*.ring"), name="", sinks=(exporter, *observers), listen=listen
    )
    deadline = time.monotonic() + 60
    while not source.has_ended and time.monotonic() < deadline:
        source.advance()
        time.sleep(0.02)
    assert source.collector.num_unjoined == 0
    exporter.close(source.collector.devices(), source.collector.totals())
    left_out = {}
    for observer in observers:
        facts = observer.facts(source.collector)
        assert facts is not None
        left_out[facts.row.request_id] = facts.num_left_out
    source.close()
    rows = [json.loads(line) for line in out.getvalue().splitlines()]
    totals = check(rows)
    assert totals.breaches == []
    assert (totals.num_requests, totals.num_steps) == (21, len(spans))
    requests = {row["request"]: row for row in rows if row["kind"] == "request"}
    computed = dict.fromkeys(requests, 0)
    for row in rows:
        for share in row.get("shares", ()):
            computed[share["request"]] += share["tokens"]
    discarded = {"length": 0, "stop": 0}
    for name, row in requests.items():
        # One that is admitted while a step runs is not in it.
        assert left_out[name] == (row["ledger_ns"].get("not_scheduled", 0) > ROUNDING_NS)
        owed = row["prompt_tokens"] - row["cached_tokens"] + row["output_tokens"] - 1
        discarded[row["finish"]] += computed[name] - owed
    assert discarded["length"] == 0 < discarded["stop"]
    assert any(left_out.values())
