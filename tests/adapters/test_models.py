"""Several models in one process: each is recorded as what it is, and timed by its own device."""

from __future__ import annotations

import gc
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import inferscope
from inferscope.adapters import recorder
from inferscope.adapters.patching import Patches
from inferscope.adapters.recorder import MAX_RECORDERS, Engines, Recorders
from inferscope.adapters.transformers import generate
from inferscope.adapters.transformers import hooks as transformers
from inferscope.adapters.transformers.serve import ServedRequests
from inferscope.probe import EventTimer, HostTimer, StepTimer, TorchEvents
from inferscope.records import CLOSED, EngineInfo, ProbeHealth, RequestEvent, StepSpan
from inferscope.ring.discovery import find_engines
from tests.adapters.exported import Exported
from tests.adapters.test_transformers import batched, one, tokens
from tests.engine.checkpoints import build, randomise
from tests.probe.cuda import StrictCuda
from tests.probe.fakes import FakeClock, of


@pytest.fixture(autouse=True)
def _surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch.set_num_threads(1)
    monkeypatch.setenv("INFERSCOPE_DIR", str(tmp_path))
    monkeypatch.setenv("INFERSCOPE_RING_MB", "1")
    monkeypatch.setenv("INFERSCOPE_ENGINE_ID", "here")
    monkeypatch.setattr(recorder, "_engines", Engines())
    yield
    assert transformers._session is None, "a test left something observed"


def model_of(kind: str, **changed: Any) -> Any:
    model = randomise(build(kind))
    model.generation_config.pad_token_id = 0
    for name, value in changed.items():
        setattr(model.config, name, value)
    return model


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    return model_of("llama"), model_of("qwen2")


def infos(folder: Path) -> dict[str, set[str]]:
    """Return the models that the rings of each engine name."""
    return {
        engine.engine_id: {
            info.model for ring in engine.rings for info in of(EngineInfo, ring.path)
        }
        for engine in find_engines(folder)
    }


def names_in(path: Path | None) -> list[str]:
    assert path is not None
    return [event.request_id for event in of(RequestEvent, path) if event.request_id]


@pytest.mark.thorough
@pytest.mark.parametrize("way", [one, batched], ids=["generate", "batching"])
def test_a_second_model_is_recorded_as_what_it_is(
    way: Callable[[Any], Any], pair: tuple[Any, Any], tmp_path: Path
) -> None:
    first, second = pair
    expected = way(first), way(second)
    with inferscope.observe(first) as one_seen, inferscope.observe(second) as other_seen:
        assert (way(first), way(second)) == expected
    assert infos(tmp_path) == {
        "here": {"LlamaForCausalLM"}, "here-2": {"Qwen2ForCausalLM"},
    }  # fmt: skip
    names = names_in(one_seen.path), names_in(other_seen.path)
    assert len(names[0]) == len(names[1]) == len(expected[0])
    for engine in ("here", "here-2"):  # requests of continuous batching have the same names in both
        exported = Exported(tmp_path / engine)
        exported.check_sums()
        assert {step["engine"] for step in exported.steps} == {engine}
        assert all(exported.surplus(name) == 0 for name in exported.requests)


def test_watching_all_records_each_model_as_its_own_engine(
    pair: tuple[Any, Any], tmp_path: Path
) -> None:
    session = transformers.watch_all()
    try:
        one(pair[1])
        one(pair[0])
    finally:
        session.watches_all = False
        session.close()
        transformers._session = None
    assert infos(tmp_path) == {"here": {"Qwen2ForCausalLM"}, "here-2": {"LlamaForCausalLM"}}


def test_what_is_no_longer_observed_has_its_ring_closed_while_others_go_on(
    pair: tuple[Any, Any],
) -> None:
    first, second = pair
    with inferscope.observe(first) as seen:
        with inferscope.observe(second) as other:
            one(second)
        assert other.path is not None
        assert of(ProbeHealth, other.path)[-1].state == CLOSED
        one(first)
        one(second)
    assert len(names_in(seen.path)) == len(names_in(other.path)) == 1


def test_a_collected_model_releases_its_recorder(tmp_path: Path) -> None:
    model = model_of("llama")
    seen = inferscope.observe(model)
    one(model)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert seen.path is not None
    until = time.monotonic() + 10
    while of(ProbeHealth, seen.path)[-1].state != CLOSED:
        assert time.monotonic() < until
        time.sleep(0.005)
    seen.close()


class Subject:
    """A model, as far as recorders are concerned."""

    def __init__(self, name: str = "model") -> None:
        self.name = name

    def describe(self) -> tuple[EngineInfo, StepTimer]:
        return EngineInfo(0, "test", model=self.name), HostTimer()


@pytest.fixture
def recorders() -> Iterator[Recorders]:
    made = Recorders(Patches("test"))
    yield made
    made.close()


def test_each_model_is_timed_by_its_own_device(recorders: Recorders) -> None:
    clock = FakeClock()
    cuda = StrictCuda(clock)
    events = TorchEvents(1, cuda=cuda, exchange=cuda.exchange)
    on_gpu = EngineInfo(0, "test", model="a", device="NVIDIA H200"), EventTimer(events)
    subjects = Subject("a"), Subject("b")
    first = recorders.take(subjects[0], subjects[0].describe, place="cpu")
    second = recorders.take(subjects[1], lambda: on_gpu, place="cuda:1")
    assert first is not None
    assert second is not None
    for each in (first, second, first, second):
        step = each.next_step()
        each.probe.start(step)
        clock.now_ns += 1_000_000
        each.probe.stop(step)
    for each in (first, second):
        each.probe.start(9)  # reaps
    assert first.probe.path is not None
    assert second.probe.path is not None
    assert {span.device_start_ns is None for span in of(StepSpan, first.probe.path)} == {True}
    assert {span.device_start_ns is None for span in of(StepSpan, second.probe.path)} == {False}
    assert set(cuda.recorded) == {1}


def test_a_model_that_moves_gets_a_recorder_of_its_new_device(recorders: Recorders) -> None:
    subject = Subject()
    before = recorders.take(subject, subject.describe, place="cpu")
    assert before is not None
    recorders.give_back(before)
    on_gpu = EngineInfo(0, "test", model="model", device="NVIDIA H200"), HostTimer()
    after = recorders.take(subject, lambda: on_gpu, place="cuda:0")
    assert after is not None
    assert after is not before
    assert not before.probe.on
    recorders.give_back(after)
    assert recorders.take(subject, lambda: on_gpu, place="cuda:0") is after


def test_replicas_are_ranks_of_one_engine_and_a_reloaded_model_is_the_first_again(
    recorders: Recorders, tmp_path: Path
) -> None:
    twins = [Subject("same"), Subject("same")]
    taken = [recorders.take(each, each.describe) for each in twins]
    assert [each.rank for each in taken if each is not None] == [0, 1]
    other = Subject("other")
    recorders.take(other, other.describe)
    recorders.release(twins[0])
    assert taken[0] is not None
    recorders.give_back(taken[0])
    again = Subject("same")
    loaded = recorders.take(again, again.describe)
    assert loaded is not None
    assert loaded.rank == 0
    assert infos(tmp_path) == {"here": {"same"}, "here-2": {"other"}}


def test_the_number_of_open_rings_is_bounded_however_many_models_come(
    recorders: Recorders, caplog: pytest.LogCaptureFixture
) -> None:
    subjects = [Subject(f"model {at}") for at in range(MAX_RECORDERS + 3)]
    taken = [recorders.take(each, each.describe) for each in subjects]
    assert [each is not None for each in taken] == [True] * MAX_RECORDERS + [False] * 3
    assert len([record for record in caplog.records if record.name == "inferscope"]) == 1
    for each in taken:
        if each is not None:
            recorders.give_back(each)
    fronts = [recorders.front_end(each, each.describe) for each in subjects]
    assert sum(each is not None and each.on for each in fronts) <= MAX_RECORDERS
    recorders.release(subjects[3])
    last = recorders.take(subjects[-1], subjects[-1].describe)
    assert last is not None
    assert last.probe.on


def test_many_models_one_after_the_other_are_all_recorded(recorders: Recorders) -> None:
    for at in range(3 * MAX_RECORDERS):
        subject = Subject(f"model {at}")
        taken = recorders.take(subject, subject.describe)
        assert taken is not None
        recorders.give_back(taken)
        del subject, taken
        until = time.monotonic() + 10
        while recorders._open:
            assert time.monotonic() < until
            time.sleep(0.001)


def test_the_ids_of_engines_that_are_gone_are_bounded_and_never_given_twice() -> None:
    engines = Engines()
    made = [engines.of(EngineInfo(0, "test", model=str(at))) for at in range(500)]
    assert len({each.engine_id for each in made}) == 500
    assert len(engines._by_description) <= 65
    held = made[-1]
    held.take_rank()
    for at in range(500, 1000):
        engines.of(EngineInfo(0, "test", model=str(at)))
    assert engines.of(EngineInfo(0, "test", model="499")) is held


def test_a_front_end_s_ring_is_of_the_engine_of_the_model_it_serves(
    recorders: Recorders, tmp_path: Path
) -> None:
    first, second = Subject("first"), Subject("second")
    assert recorders.front_end(first, first.describe) is None
    probe = recorders.front_end(second, second.describe)
    assert probe is not None
    assert probe.path is not None
    assert probe.path.parent == tmp_path / "here-2"
    assert recorders.front_end(second, second.describe) is probe
    core = recorders.take(second, second.describe)
    assert core is not None
    assert core.probe.path is not None
    assert core.probe.path.parent == probe.path.parent
    recorders.release(second)
    recorders.give_back(core)
    assert not probe.on


def test_what_is_unsupported_is_in_every_ring_opened_afterwards(tmp_path: Path) -> None:
    patches = Patches("test")
    patches.unsupported("beam search")
    recorders = Recorders(patches)
    for name in ("first", "second"):
        subject = Subject(name)
        recorders.take(subject, subject.describe)
        recorders.front_end(subject, subject.describe)
    recorders.close()
    rings = [ring.path for engine in find_engines(tmp_path) for ring in engine.rings]
    assert len(rings) == 3
    assert [of(ProbeHealth, ring)[-1].unsupported for ring in rings] == [("beam search",)] * 3


def test_what_is_unsupported_is_in_the_ring_of_a_server_s_front_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Fastapi(ModuleType):
        FastAPI = type("FastAPI", (), {"__call__": lambda self, *_args: None})

    for name in ("fastapi", "transformers.cli.serving.utils"):  # extras that may be absent
        monkeypatch.setitem(sys.modules, name, Fastapi(name))
    session = transformers.Session()
    session.patches.unsupported("beam search")
    ServedRequests(session).begin()
    (probe,) = session.patches.probes
    probe.close()
    session.close()
    assert probe.path is not None
    assert "beam search" in of(ProbeHealth, probe.path)[-1].unsupported


def test_an_assistant_on_another_device_is_not_timed_by_its_model_s_timer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    model, assistant = model_of("llama"), model_of("llama")
    expected = one(model, assistant_model=assistant)
    loops: list[object] = []
    begin = transformers.Session._begin

    def moved(session: Any, of_model: Any, *rest: Any) -> Any:
        # The class's property stays what it is for everything but this question of ours.
        with pytest.MonkeyPatch.context() as patch:
            if of_model is assistant:
                patch.setattr(type(model), "device", property(lambda each: each is assistant))
            loops.append(begin(session, of_model, *rest))
        return loops[-1]

    monkeypatch.setattr(transformers.Session, "_begin", moved)
    with inferscope.observe(model):
        assert one(model, assistant_model=assistant) == expected
    assert None in loops
    (line,) = [each.getMessage() for each in caplog.records if each.name == "inferscope"]
    assert "another device" in line
    exported = Exported(tmp_path)
    exported.check_sums()
    assert all(counts["draft"] == 0 for counts in exported.tokens.values())


def test_models_that_take_turns_write_into_their_own_rings(pair: tuple[Any, Any]) -> None:
    with inferscope.observe(pair[0]) as seen, inferscope.observe(pair[1]) as other:
        for at in range(6):
            pair[at % 2].generate(tokens(5 + at), max_new_tokens=2, do_sample=False)
    of_first = [each.prompt_tokens for each in of(RequestEvent, seen.path) if each.request_id]
    of_other = [each.prompt_tokens for each in of(RequestEvent, other.path) if each.request_id]
    assert (of_first, of_other) == ([5, 7, 9], [6, 8, 10])


def test_an_observation_that_outlives_its_session_ends_no_later_one() -> None:
    models = [model_of("llama") for _ in range(3)]
    gone = model_of("llama")
    late, first = inferscope.observe(gone), inferscope.observe(models[0])
    del gone
    gc.collect()
    first.close()  # nothing is observed any more
    others = [inferscope.observe(models[1])]
    late.close()
    others.append(inferscope.observe(models[2]))
    for model, watch in zip(models[1:], others, strict=True):
        one(model)
        assert watch.path is not None
        assert of(StepSpan, watch.path)
        watch.close()


def test_after_a_fault_on_a_device_no_model_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "is_asynchronous", lambda model: True)
    model = model_of("llama")
    watch = inferscope.observe(model)
    turn = generate.MainLoop.turn

    def fails(loop: generate.MainLoop) -> None:
        turn(loop)
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(generate.MainLoop, "turn", fails)
        one(model)
    is_there = weakref.ref(model)
    del model
    gc.collect()
    assert is_there() is None
    watch.close()
