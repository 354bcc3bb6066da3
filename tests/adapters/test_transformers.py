"""Output of transformers is the same when it is observed, and every token is recorded."""

from __future__ import annotations

import copy
import functools
import gc
import importlib
import io
import logging
import marshal
import pickle
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CellType, FunctionType
from typing import Any

import pytest
import torch
from msgspec import structs

import inferscope
from inferscope.adapters import live_table, recorder
from inferscope.adapters.transformers import batching, batching_hooks, generate
from inferscope.adapters.transformers import hooks as transformers
from inferscope.errors import BadInput
from inferscope.records import (
    DECODE,
    DRAFT,
    FAILED,
    PREFILL,
    Emitted,
    EngineInfo,
    ProbeHealth,
    RequestEvent,
    StepPlan,
    StepSlices,
    StepSpan,
)
from inferscope.ring.control import control_path
from tests.adapters.exported import Exported
from tests.adapters.interrupts import Interrupts
from tests.engine.checkpoints import build, randomise
from tests.probe.fakes import check_device_spans, of

NEW_TOKENS = 8
EmissionLog = list[list[int]]


def llama(seed: int = 0) -> Any:
    model = randomise(build("llama"), seed=seed)
    model.generation_config.pad_token_id = 0
    return model


@pytest.fixture(autouse=True)
def _surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch.set_num_threads(1)
    monkeypatch.setenv("INFERSCOPE_DIR", str(tmp_path))
    monkeypatch.setenv("INFERSCOPE_RING_MB", "4")
    monkeypatch.setenv("INFERSCOPE_ENGINE_ID", "here")
    yield
    assert transformers._session is None, "a test left something observed"


@pytest.fixture(scope="module")
def model() -> Any:
    return llama()


@pytest.fixture(scope="module")
def assistant() -> Any:
    return llama(seed=1)


def tokens(num: int, *, batch: int = 1, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 384, (batch, num), generator=generator)


def padded() -> dict[str, torch.Tensor]:
    ids = tokens(20, batch=3)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    mask[2, :11] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def greedy(model: Any, **given: Any) -> EmissionLog:
    settings = {"max_new_tokens": NEW_TOKENS, "do_sample": False, **given}
    inputs = {
        name: value.to(model.device) if isinstance(value, torch.Tensor) else value
        for name, value in settings.items()
    }
    return model.generate(**inputs).tolist()


def one(model: Any, **given: Any) -> EmissionLog:
    return greedy(model, input_ids=tokens(30), **given)


PROMPTS = [tokens(num, seed=num)[0].tolist() for num in (40, 3, 60, 17)]


def batched(model: Any, *, num_blocks: int = 64, new_tokens: int = NEW_TOKENS) -> EmissionLog:
    from transformers import ContinuousBatchingConfig, GenerationConfig

    config = GenerationConfig(
        max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    outputs = model.generate_batch(
        PROMPTS,
        generation_config=config,
        continuous_batching_config=ContinuousBatchingConfig(
            num_blocks=num_blocks, page_size=16, max_batch_tokens=32
        ),
        warmup=False,
    )
    return [output.generated_tokens for output in outputs.values()]


WAYS: dict[str, Callable[[Any], EmissionLog]] = {
    "plain": one,
    "padded": lambda model: greedy(model, **padded()),
    "ends": lambda model: greedy(model, **padded(), eos_token_id=list(range(100, 160))),
    "static": lambda model: one(model, cache_implementation="static"),
    "chunked": lambda model: greedy(model, **padded(), prefill_chunk_size=7),
    "no cache": lambda model: one(model, use_cache=False),
    "several": lambda model: one(model, num_return_sequences=2, do_sample=True, top_k=1),
    "looked up": lambda model: greedy(
        model, input_ids=tokens(12).repeat(1, 3), prompt_lookup_num_tokens=4
    ),
    "batching": batched,
}


@pytest.mark.parametrize("way", WAYS)
def test_outputs_are_unchanged_and_every_token_is_recorded(
    way: str, model: Any, tmp_path: Path
) -> None:
    expected = WAYS[way](model)
    with inferscope.observe(model):
        assert WAYS[way](model) == expected
    exported = Exported(tmp_path)
    exported.check_sums()
    assert len(exported.requests) == len(expected)
    for name, row in exported.requests.items():
        if way != "looked up":
            assert exported.surplus(name) == 0
            assert row["tokens_per_event"] == [1] * row["output_tokens"]
        assert row["finish"] == ("length" if row["output_tokens"] == NEW_TOKENS else "stop")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("way", WAYS)
def test_every_step_of_a_gpu_has_a_device_span_within_its_host_span(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor import config

    # A static cache is compiled, by processes that would outlast the test.
    monkeypatch.setattr(config, "compile_threads", 1)
    model = llama().to("cuda:0")
    expected = WAYS[way](model)
    with inferscope.observe(model) as seen:
        assert WAYS[way](model) == expected
        time.sleep(0.3)  # the last events are read from beside
        ring = seen.path
    exported = Exported(tmp_path)
    exported.check_sums()
    assert len(exported.requests) == len(expected)
    assert ring is not None
    check_device_spans(of(StepSpan, ring))


def _facts(ring: Path) -> list[tuple[str, list[dict[str, Any]]]]:
    """Return a ring's records by kind, in their order, without times and generated names."""
    return [
        (
            kind.__name__,
            [
                {
                    key: value
                    for key, value in structs.asdict(record).items()
                    if not key.endswith("_ns") and key not in ("request_id", "cold")
                }
                for record in of(kind, ring)
            ],
        )
        for kind in (StepPlan, StepSlices, StepSpan, Emitted, RequestEvent)
    ]


@pytest.mark.thorough
@pytest.mark.parametrize("way", [way for way in WAYS if way != "batching"])
def test_what_is_recorded_behind_launches_is_what_is_recorded_at_once(
    way: str, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = []
    for defers in (False, True):
        monkeypatch.setattr(generate, "is_asynchronous", lambda model, defers=defers: defers)
        with inferscope.observe(model) as seen:
            WAYS[way](model)
            ring = seen.path
        assert ring is not None
        facts.append(_facts(ring))
    assert facts[1] == facts[0]
    assert all(records for _, records in facts[0])


@pytest.mark.parametrize("num_blocks", [64, 9])
def test_continuous_batching_reports_every_token_behind_launches_too(
    num_blocks: int, model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batching_hooks, "is_asynchronous", lambda model: True)
    with inferscope.observe(model):
        outputs = batched(model, num_blocks=num_blocks)
    exported = Exported(tmp_path)
    exported.check_sums()
    assert [row["output_tokens"] for row in exported.requests.values()] == [len(o) for o in outputs]
    for name in exported.requests:
        assert exported.surplus(name) == 0


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"do_sample": False, "top_k": 7}, {}),
        (
            {"do_sample": True, "temperature": 0.5, "top_k": 7, "top_p": 1.0},
            {"temperature": "0.5", "top_k": "7"},
        ),
        (
            {"do_sample": True, "num_return_sequences": 2, "temperature": 1.0, "top_k": 0},
            {"temperature": "1.0", "n": "2"},
        ),
    ],
    ids=["likeliest", "sampled", "several"],
)
def test_what_was_asked_of_the_sampling_is_what_is_in_force(
    model: Any, given: dict[str, Any], expected: dict[str, str]
) -> None:
    with inferscope.observe(model) as seen:
        model.generate(input_ids=tokens(5), max_new_tokens=2, **given)
    attributes = [event.attributes for event in of(RequestEvent, seen.path) if event.request_id]
    assert attributes == [{"max_tokens": "2", **expected}] * (2 if "n" in expected else 1)


def test_the_token_limit_of_continuous_batching_is_recorded(model: Any) -> None:
    with inferscope.observe(model) as seen:
        batched(model)
    attributes = [event.attributes for event in of(RequestEvent, seen.path) if event.request_id]
    assert attributes == [{"max_tokens": str(NEW_TOKENS)}] * len(PROMPTS)


def test_a_sequence_that_ends_early_is_charged_no_further(model: Any, tmp_path: Path) -> None:
    with inferscope.observe(model) as seen:
        out = WAYS["ends"](model)
    exported = Exported(tmp_path)
    (name,) = {request.split("/")[0] for request in exported.requests}
    rows = [exported.requests[each] for each in exported.names(name)]
    generated = [row["output_tokens"] for row in rows]
    ends = [next(i for i, t in enumerate(row[20:]) if 100 <= t < 160 or i == 7) for row in out]
    assert generated == [end + 1 for end in ends]
    assert len(set(generated)) > 1, "all end at once: nothing is tested"
    assert [row["prompt_tokens"] for row in rows] == [15, 20, 9]
    spans = {span.step: span.padded_tokens for span in of(StepSpan, seen.path)}
    first, *others = (len(each.tokens) // 4 for each in of(StepSlices, seen.path))
    assert first == 3
    assert spans[0] == 60
    assert all(spans[at + 1] == (3 if rows < 3 else 0) for at, rows in enumerate(others))


def test_what_is_computed_again_without_a_cache_is_not_new(model: Any, tmp_path: Path) -> None:
    with inferscope.observe(model):
        WAYS["no cache"](model)
    exported = Exported(tmp_path)
    (counts,) = exported.tokens.values()
    assert counts == {
        "prefill": 30,
        "decode": NEW_TOKENS - 1,
        "recomputed": sum(range(30, 30 + NEW_TOKENS - 1)),
    }


def test_a_cache_carried_on_is_not_computed_again(model: Any, tmp_path: Path) -> None:
    first = model.generate(
        tokens(30), max_new_tokens=5, do_sample=False, return_dict_in_generate=True
    )
    ids = torch.cat([first.sequences, tokens(6, seed=2)], dim=1)
    with inferscope.observe(model):
        greedy(model, input_ids=ids, past_key_values=first.past_key_values)
    exported = Exported(tmp_path)
    (row,) = exported.requests.values()
    assert (row["prompt_tokens"], row["cached_tokens"]) == (41, 34)
    assert exported.surplus(row["request"]) == 0


@pytest.mark.parametrize("is_good", [True, False], ids=["agreeing", "disagreeing"])
def test_draft_and_verify_tokens_are_distinguished(
    is_good: bool, model: Any, assistant: Any, tmp_path: Path
) -> None:
    drafter = copy.deepcopy(model) if is_good else assistant
    expected = one(model)
    with inferscope.observe(model) as seen:
        assert one(model, assistant_model=drafter) == expected
    exported = Exported(tmp_path)
    exported.check_sums()
    ((name, counts),) = exported.tokens.items()
    assert counts["draft"] >= 30
    slices = of(StepSlices, seen.path)
    drafts = [each for each in slices if DRAFT in each.phases]
    assert all(set(each.phases) == {DRAFT} for each in drafts)
    judged = [each for each in slices if each.proposed]
    proposed = sum(sum(each.proposed[::2]) for each in judged)
    accepted = sum(sum(each.accepted[::2]) for each in judged)
    assert proposed == counts["verify"] > 0
    assert (accepted == proposed) if is_good else (accepted < proposed)
    assert exported.surplus(name) == -accepted
    events = exported.requests[name]["tokens_per_event"]
    assert sum(events) - len(events) == accepted


def test_steps_of_continuous_batching_mix_phases_exactly(model: Any, tmp_path: Path) -> None:
    with inferscope.observe(model):
        batched(model)
    exported = Exported(tmp_path)
    both = {"prefill", "decode"}
    mixed = [
        step for step in exported.steps if {share["phase"] for share in step["shares"]} == both
    ]
    assert mixed
    assert all(sum(share["tokens"] for share in step["shares"]) <= 32 for step in exported.steps)


def test_a_pause_of_continuous_batching_is_what_requests_wait_for(
    model: Any, tmp_path: Path
) -> None:
    from transformers import ContinuousBatchingConfig, GenerationConfig

    settings = ContinuousBatchingConfig(num_blocks=64, page_size=16, max_batch_tokens=32)
    config = GenerationConfig(max_new_tokens=3, do_sample=False, eos_token_id=-1, pad_token_id=0)
    with (
        inferscope.observe(model),
        model.continuous_batching_context_manager(
            generation_config=config, continuous_batching_config=settings, warmup=False
        ) as manager,
    ):
        with manager.pause():
            manager.add_request(PROMPTS[0], request_id="waits")
            begun_ns = time.monotonic_ns()
            while time.monotonic_ns() - begun_ns < 50_000_000:
                time.sleep(0.01)
        assert len(manager.get_result("waits", timeout=60).generated_tokens) == 3
    exported = Exported(tmp_path)
    exported.check_sums()
    (row,) = exported.requests.values()
    assert row["ledger_ns"]["paused"] >= 50_000_000


@pytest.mark.thorough
def test_requests_that_lose_their_blocks_are_recorded_as_preempted(
    model: Any, tmp_path: Path
) -> None:
    expected = batched(model, new_tokens=70)
    with inferscope.observe(model):
        assert batched(model, num_blocks=16, new_tokens=70) == expected
    exported = Exported(tmp_path)
    exported.check_sums()
    recomputed = [counts["recomputed"] for counts in exported.tokens.values()]
    assert max(recomputed) > 0, "nothing was preempted: nothing is tested"
    assert all(exported.surplus(name) == 0 for name in exported.requests)
    held = [row for row in exported.requests.values() if row["ledger_ns"].get("preempted")]
    assert held


CALLED = [
    ("continuous_api", "ContinuousBatchProcessor", "prepare_next_batch"),
    ("continuous_api", "ContinuousBatchProcessor", "update_batch"),
    ("continuous_api", "ContinuousBatchingManager", "_create_batch_processor"),
    ("scheduler", "Scheduler", "add_waiting_request"),
    ("scheduler", "Scheduler", "clear_cancelled_requests"),
    ("model_runner", "ModelRunner", "compute_batch"),
    ("input_outputs", "ContinuousBatchingIOs", "prepare_batch_tensors"),
]


@pytest.mark.thorough
@pytest.mark.parametrize(("module", "name", "missing"), CALLED)
def test_a_version_that_lacks_a_method_of_batching_has_none_of_it_recorded(
    module: str,
    name: str,
    missing: str,
    model: Any,
    outputs: dict[str, EmissionLog],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    expected = outputs.get("two") or outputs.setdefault("two", batched(model, new_tokens=2))
    package = "transformers.generation.continuous_batching"
    owner = getattr(importlib.import_module(f"{package}.{module}"), name)
    elsewhere = vars(owner)[missing]

    def found(subject: Any, name: str) -> Any:
        if name != missing:
            raise AttributeError(name)
        return functools.partial(elsewhere, subject)

    monkeypatch.delattr(owner, missing)
    monkeypatch.setattr(owner, "__getattr__", found, raising=False)
    with inferscope.observe(model) as seen:
        assert batched(model, new_tokens=2) == expected
        assert transformers._session is not None
        assert not transformers._session.batching._batchers
    assert of(RequestEvent, seen.path) == of(StepSlices, seen.path) == []
    (unsupported,) = of(ProbeHealth, seen.path)[-1].unsupported
    assert unsupported.startswith("continuous batching: ")
    assert missing in caplog.text


def test_steps_without_an_outcome_switch_the_hooks_off(
    model: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = batched(model)
    monkeypatch.setattr(batching.Batcher, "update_begins", lambda _: None)
    with inferscope.observe(model) as seen:
        assert batched(model) == expected
    (line,) = [each.getMessage() for each in caplog.records if each.name == "inferscope"]
    assert "9 planned steps without an outcome" in line
    assert of(ProbeHealth, seen.path)[-1].state == FAILED


def test_requests_that_never_end_are_dropped_from_the_oldest(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_table.LiveTable.__init__, "__kwdefaults__", {"most": 2})
    sizes = []
    enter = batching.Batcher._enter

    def enters(batcher: Any, *args: Any, **kwargs: Any) -> Any:
        track = enter(batcher, *args, **kwargs)
        sizes.append(len(batcher._tracks))
        return track

    monkeypatch.setattr(batching.Batcher, "_enter", enters)
    with inferscope.observe(model) as seen:
        batched(model, new_tokens=2)
    assert max(sizes) == 2
    names = [event.request_id for event in of(RequestEvent, seen.path) if event.request_id]
    assert len(names) == len(set(names)) == len(PROMPTS)
    (unsupported,) = of(ProbeHealth, seen.path)[-1].unsupported
    assert unsupported.startswith("more than 2 live requests")


@pytest.mark.parametrize("hook", ["plan_ends", "update_ends"])
def test_a_fault_keeps_no_kv_cache(
    hook: str, model: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from transformers.generation.continuous_batching.cache import PagedAttentionCache

    caches: weakref.WeakSet[Any] = weakref.WeakSet()
    make = PagedAttentionCache.__init__
    real = getattr(batching.Batcher, hook)

    def made(cache: Any, *args: Any, **kwargs: Any) -> None:
        caches.add(cache)
        make(cache, *args, **kwargs)

    def fails(*args: Any) -> None:
        real(*args)
        raise ZeroDivisionError("a hook's own fault")

    monkeypatch.setattr(PagedAttentionCache, "__init__", made)
    monkeypatch.setattr(batching.Batcher, hook, fails)
    with inferscope.observe(model):
        batched(model, new_tokens=2)
        assert "a hook's own fault" in caplog.text
        caplog.clear()
        gc.collect()
        assert not caches


def warmed_up(manager: Any) -> None:
    manager.warmup()


def stopped_when_idle(manager: Any) -> None:
    manager.start()
    while manager.batch_processor is None:
        time.sleep(0.001)
    thread = manager._generation_thread
    manager.stop(block=False)  # the processor is dropped, and the loop ends later
    thread.join()


@pytest.mark.parametrize("use", [warmed_up, stopped_when_idle])
def test_managers_that_batch_nothing_keep_no_ring(
    use: Callable[[Any], None], model: Any, tmp_path: Path
) -> None:
    from transformers import ContinuousBatchingConfig

    settings = ContinuousBatchingConfig(num_blocks=16, page_size=16, max_batch_tokens=32)
    with inferscope.observe(model):
        for _ in range(3):
            use(model.init_continuous_batching(continuous_batching_config=settings))
            gc.collect()
        batched(model)
    assert len(list(tmp_path.rglob("*.ring"))) == 1


def test_threads_that_generate_at_once_have_a_ring_each(model: Any, tmp_path: Path) -> None:
    expected = one(model)
    got: list[EmissionLog] = []
    with inferscope.observe(model):
        threads = [threading.Thread(target=lambda: got.append(one(model))) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert got == [expected] * 3
    exported = Exported(tmp_path)
    exported.check_sums()
    assert len(exported.requests) == 3
    assert all(exported.surplus(name) == 0 for name in exported.requests)


def test_a_name_is_of_the_ids_it_was_given_with_and_ends_with_them(model: Any) -> None:
    with inferscope.observe(model) as seen:
        session = transformers._session
        assert session is not None
        kept = [torch.ones((1, 3), dtype=torch.long) for _ in range(5000)]
        for at, ids in enumerate(kept):
            session.expect(ids, f"request {at}", at + 1)
        greedy(model, input_ids=kept[-1])
        del kept, ids
        assert not session._expected
        for _ in range(20):
            abandoned = tokens(3)
            session.expect(abandoned, "abandoned", 1)
            del abandoned
            greedy(model, input_ids=tokens(3), max_new_tokens=1)
    first, *others = (each for each in of(RequestEvent, seen.path) if each.request_id)
    assert first.request_id == "request 4999"
    assert len(others) == 20
    assert all(each.request_id.startswith("generate-") for each in others)


def test_an_exception_passes_and_ends_its_requests(model: Any, tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    def bomb(ids: torch.Tensor, scores: Any) -> torch.Tensor:
        if ids.shape[1] > 33:
            raise Stop
        return scores

    with inferscope.observe(model):
        with pytest.raises(Stop):
            one(model, logits_processor=[bomb])
        one(model)
    exported = Exported(tmp_path)
    exported.check_sums()
    assert [row["finish"] for row in exported.requests.values()] == ["error", "length"]
    assert next(iter(exported.requests.values()))["output_tokens"] == 4


@pytest.mark.parametrize("place", ["the entry", "the loop"])
def test_an_interrupt_while_a_call_begins_costs_that_call_alone(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    with inferscope.observe(model):
        with monkeypatch.context() as patch:
            if place == "the entry":
                patch.setattr(transformers._session, "_enter", interrupted)
            else:
                patch.setattr(transformers.MainLoop, "__init__", interrupted)
            for _ in range(recorder.MAX_RECORDERS + 1):
                with pytest.raises(KeyboardInterrupt):
                    one(model)
        before_ns = time.monotonic_ns()
        one(model)
    (ring,) = tmp_path.glob("here/*.ring")
    (begun,) = (event for event in of(RequestEvent, ring) if event.request_id)
    assert begun.at_ns >= before_ns


@pytest.mark.thorough
def test_interrupts_at_all_lines_of_a_call_cost_no_later_call(model: Any) -> None:
    modules = {transformers.__file__, generate.__file__, recorder.__file__}
    begins_and_ends = {
        *("generate", "loop", "_begin", "_leave", "__init__", "leave", "_finish"),
        *("take", "give_back", "give_back_own"),
    }
    interrupts = Interrupts(
        lambda code: code.co_name in begins_and_ends and code.co_filename in modules
    )
    places = interrupts.places

    def go() -> None:
        greedy(model, input_ids=tokens(4, batch=2), max_new_tokens=1)

    with inferscope.observe(model):
        recorders = transformers._session.recorders
        (only,) = recorders._open
        while sum(interrupts.stop(go) for _ in range(4)):
            before = only.next_step()
            go()
            last = list(places)[-4:]
            assert only.next_step() - before == 2, last
            assert only.probe.live_requests == [], last
            assert only.model.free == recorders._open == [only], last
    assert len(places) > 80


def test_the_engine_states_what_it_is(model: Any) -> None:
    with inferscope.observe(model) as seen:
        pass
    info = of(EngineInfo, seen.path)[0]
    assert (info.engine, info.device, info.model) == (
        "transformers", "cpu", "LlamaForCausalLM",
    )  # fmt: skip
    assert info.shape is not None
    assert (info.shape.num_layers, info.shape.weight_bits, info.shape.vocab) == (2, 32, 384)


def test_closing_puts_every_attribute_back(model: Any, assistant: Any) -> None:
    def everything() -> dict[str, Any]:
        from transformers.generation import utils
        from transformers.generation.continuous_batching import continuous_api, scheduler

        classes = [*type(model).__mro__, scheduler.Scheduler, continuous_api.OutputRouter]
        classes += [continuous_api.ContinuousBatchProcessor, utils.StoppingCriteriaList]
        return {
            f"{cls.__qualname__}.{name}": value
            for cls in classes
            for name, value in vars(cls).items()
            if callable(value)
        }

    before, own = everything(), set(vars(model))
    first = inferscope.observe(model)
    second = inferscope.observe(model)
    one(model, assistant_model=assistant)
    assert everything() != before
    first.close()
    first.close()
    assert everything() != before
    second.close()
    assert everything() == before
    assert set(vars(model)) - own <= {"_compiled_call"}


def test_an_observed_model_is_copied_and_pickled_as_it_was(model: Any) -> None:
    with inferscope.observe(model) as seen:
        twin = copy.deepcopy(model)
        again = pickle.loads(pickle.dumps(model))
        written = len(of(StepSlices, seen.path))
        expected = one(twin)
        assert one(again) == expected
        assert len(of(StepSlices, seen.path)) == written, "a copy is not the observed model"
        assert one(model) == expected
        assert len(of(StepSlices, seen.path)) > written


def by_value(functions: dict[str, FunctionType]) -> dict[str, FunctionType]:
    """Return functions as they come out of a pickle that has their code, as cloudpickle's have."""

    class Pickler(pickle.Pickler):
        def reducer_override(self, given: Any) -> Any:
            is_hook = isinstance(given, FunctionType) and given.__closure__ is not None
            if not is_hook or not given.__globals__["__name__"].startswith("inferscope."):
                return NotImplemented
            values = tuple(cell.cell_contents for cell in given.__closure__)
            module = given.__globals__["__name__"]
            return rebuilt, (marshal.dumps(given.__code__), module, values, vars(given))

    with io.BytesIO() as file:
        Pickler(file).dump(functions)
        return pickle.loads(file.getvalue())


def rebuilt(code: bytes, module: str, values: tuple[Any, ...], own: Any) -> FunctionType:
    names, cells = vars(importlib.import_module(module)), tuple(map(CellType, values))
    function = FunctionType(marshal.loads(code), names, None, None, cells)
    vars(function).update(own)
    return function


def own_sample(model: Any, *args: Any, **kwargs: Any) -> Any:
    return super(type(model), model)._sample(*args, **kwargs)


def own_turn(model: Any, *args: Any, **kwargs: Any) -> Any:
    return super(type(model), model)._has_unfinished_sequences(*args, **kwargs)


OVERRIDES = {"_sample": own_sample, "_has_unfinished_sequences": own_turn}


def through_a_pickle(functions: dict[str, Any]) -> dict[str, FunctionType]:
    """Return functions of `__main__` as cloudpickle does, where InferScope is not installed."""

    class Pickler(pickle.Pickler):
        def reducer_override(self, given: Any) -> Any:
            if not isinstance(given, FunctionType) or given is remade:
                return NotImplemented
            names = {
                name: given.__globals__[name]
                for name in given.__code__.co_names
                if name in given.__globals__
            }
            values = tuple(cell.cell_contents for cell in given.__closure__ or ())
            return remade, (marshal.dumps(given.__code__), names, values, vars(given))

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            assert not module.startswith("inferscope")
            return super().find_class(module, name)

    with io.BytesIO() as file:
        Pickler(file).dump(functions)
        file.seek(0)
        return Unpickler(file).load()


def remade(code: bytes, names: dict[str, Any], values: tuple[Any, ...], own: Any) -> FunctionType:
    function = FunctionType(marshal.loads(code), names, None, None, tuple(map(CellType, values)))
    vars(function).update(own)
    return function


def test_a_class_of_the_program_is_pickled_without_hooks_and_observed_after_it_is_read() -> None:
    plain, other = llama(), llama()
    expected = one(plain)
    mine = type("Mine", (type(plain),), {"__module__": "__main__", **OVERRIDES})
    unchanged = {name: value for name, value in vars(mine).items() if name not in OVERRIDES}
    plain.__class__ = mine
    with inferscope.observe(other), inferscope.observe(plain) as seen:
        for num_calls in range(1, 4):
            assert one(plain) == expected
            assert len(of(StepSlices, seen.path)) == num_calls * NEW_TOKENS
            functions = {name: vars(mine)[name] for name in OVERRIDES}
            for name, function in through_a_pickle(functions).items():
                assert function.__code__ == OVERRIDES[name].__code__
                setattr(mine, name, function)  # as cloudpickle does to a class that it knows
    assert {name: value for name, value in vars(mine).items() if name not in OVERRIDES} == unchanged
    assert one(plain) == expected


def test_an_observed_class_that_is_pickled_by_value_generates_as_before(tmp_path: Path) -> None:
    plain = llama()
    expected = one(plain)
    mine, again = (type(name, (type(plain),), OVERRIDES) for name in ("Mine", "Again"))
    plain.__class__ = mine
    with inferscope.observe(plain) as seen:
        functions = {name: vars(mine)[name] for name in OVERRIDES}
        for name, function in by_value(functions).items():
            setattr(again, name, function)
        twin = copy.deepcopy(plain)
        twin.__class__ = again
        assert one(twin) == expected
        assert not of(StepSlices, seen.path)
        assert one(plain) == expected
        assert of(StepSlices, seen.path)


def test_beams_are_unsupported_and_reported_once(
    model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    expected = one(model, num_beams=2)
    with inferscope.observe(model):
        assert one(model, num_beams=2) == one(model, num_beams=2) == expected
    lines = [record for record in caplog.records if record.name == "inferscope"]
    assert len(lines) == 1
    assert "unsupported: beam search" in lines[0].getMessage()


def test_what_does_not_generate_is_refused() -> None:
    with pytest.raises(BadInput, match="cannot observe str"):
        inferscope.observe("a model's name")


def test_switched_off_it_records_nothing_and_changes_nothing(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = one(model)
    with inferscope.observe(model) as seen:
        assert seen.path is not None
        assert control_path(seen.path).exists()
    monkeypatch.setenv("INFERSCOPE", "0")
    with inferscope.observe(model) as seen:
        assert seen.path is None
        assert one(model) == expected


@pytest.fixture(scope="module")
def outputs() -> dict[str, EmissionLog]:
    return {}


HOOKS = [
    (transformers.Session, "_enter", "plain"),
    (transformers.Session, "_begin", "plain"),
    (transformers.Session, "_judged", "plain"),
    (transformers.Session, "_leave", "plain"),
    (transformers.Session, "patch_model", "plain"),
    (recorder.Recorders, "take", "plain"),
    *(
        (generate.MainLoop, name, "plain")
        for name in ("forward_begins", "forward_ends", "tokens_chosen", "turn", "leave")
    ),
    *((generate.DraftLoop, name, "drafted") for name in ("forward_begins", "forward_ends")),
    *(
        (batching.Batcher, name, "batching")
        for name in (
            "plan_begins", "waits", "batch_chosen", "plan_ends", "step_begins", "step_ends",
            "update_begins", "update_ends", "close",
        )
    ),
]  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("owner", "name", "way", "nth"),
    [(*hook, nth) for hook in HOOKS for nth in ((1,) if hook[2] == "batching" else (1, 3))],
)
def test_a_fault_in_any_hook_changes_nothing_and_is_reported_once(
    owner: type,
    name: str,
    way: str,
    nth: int,
    model: Any,
    assistant: Any,
    outputs: dict[str, EmissionLog],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def go() -> EmissionLog:
        if way == "drafted":
            return one(model, assistant_model=assistant)
        num = 1 if way == "batching" else 3
        return [row for _ in range(num) for row in WAYS[way](model)]

    expected = outputs.get(way) or outputs.setdefault(way, go())
    num_calls = 0
    real = getattr(owner, name)

    def fails(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == nth:
            raise ZeroDivisionError("a hook's own fault")
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, fails)
    with inferscope.observe(model), caplog.at_level(logging.WARNING):
        assert go() == expected
    lines = [record.getMessage() for record in caplog.records if record.name == "inferscope"]
    if num_calls >= nth:
        assert len(lines) == 1, lines
        assert "a hook's own fault" in lines[0]
    assert num_calls


def test_decode_steps_name_each_sequence_once(model: Any) -> None:
    with inferscope.observe(model) as seen:
        greedy(model, **padded())
    decodes = [each for each in of(StepSlices, seen.path) if PREFILL not in each.phases]
    assert decodes
    assert all(each.phases == bytes([DECODE]) * 3 for each in decodes)
