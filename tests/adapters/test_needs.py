"""The tables of what adapters need: as they hook, and as an installed engine is checked."""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.applications import Starlette

from inferscope.adapters import llama_cpp
from inferscope.adapters.needs.check import ENGINES, engines_of, lacks_of
from inferscope.adapters.needs.feature import Engine, Feature, Fields, Place
from inferscope.adapters.needs.llama_cpp import LLAMA_CPP
from inferscope.adapters.needs.sglang import SGLANG
from inferscope.adapters.needs.source import Source
from inferscope.adapters.needs.transformers import TRANSFORMERS
from inferscope.adapters.needs.vllm import VLLM
from inferscope.adapters.recorder import Recorders
from inferscope.adapters.sglang import hooks as sglang_hooks
from inferscope.adapters.sglang.cache import CacheRecorder
from inferscope.adapters.sglang.hooks import FrontEndHooks, SchedulerHooks
from inferscope.adapters.sglang.scheduler import SchedulerWatch
from inferscope.adapters.transformers.batching_hooks import BatchingHooks
from inferscope.adapters.transformers.serve import ServedRequests, observe_server
from inferscope.adapters.vllm import core as vllm_core
from inferscope.adapters.vllm import hooks as vllm_hooks
from inferscope.adapters.vllm import worker as vllm_worker
from inferscope.adapters.vllm.core import CoreHooks
from inferscope.adapters.vllm.frontend import FrontEndHooks as VllmFrontEndHooks
from inferscope.adapters.vllm.starts import Starts
from inferscope.adapters.vllm.worker import WorkerHooks
from inferscope.probe.timers import EventTimer
from tests.adapters import toy_vllm
from tests.adapters.engine_source import environment, split, write
from tests.adapters.hooked import Hooked, Recording
from tests.adapters.test_vllm import DoneEvents

IN_TOY = {"GPUModelRunner": "ModelRunner", "KVConnectorBase_V1": "Connector"}
"""How the miniature's classes are called that are called otherwise in vLLM."""


def places(engine: Engine) -> list[tuple[Feature, Place]]:
    return [(feature, place) for feature in engine.features for place in feature.places]


def assert_agree(table: set[tuple[str, tuple[str, ...], bool]], hooked: set[Hooked]) -> None:
    """Check that the same methods are hooked as the table has, with the same parameters."""
    assert {(each.path, each.takes, each.is_open) for each in hooked} == table


# --- the tables and the hooks ---------------------------------------------------------------------


@pytest.fixture
def rings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("INFERSCOPE_DIR", str(tmp_path / "rings"))
    monkeypatch.setenv("INFERSCOPE_ENGINE_ID", "toy")
    monkeypatch.setenv("INFERSCOPE_RING_MB", "1")
    return tmp_path


@pytest.fixture
def patches(rings: Path) -> Iterator[Recording]:
    patches = Recording("a table's")
    yield patches
    patches.restore()
    for probe in patches.probes:
        probe.close()


def test_vllm_is_hooked_where_its_table_has_it(
    patches: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_worker, "_is_last_stage", lambda: True)
    monkeypatch.setattr(WorkerHooks, "_timer", lambda self, device: EventTimer(DoneEvents()))
    CoreHooks(patches).install(toy_vllm.Scheduler)
    WorkerHooks(patches).install(toy_vllm.WorkerWrapperBase)
    VllmFrontEndHooks(patches).install(toy_vllm.AsyncLLM)
    Starts(patches).install(toy_vllm.MPClient)
    options = toy_vllm.Options(connector=toy_vllm.Connector())
    toy_vllm.serve(options)
    toy_vllm.AsyncLLM(toy_vllm.config(options))
    assert not patches.is_off
    table = set()
    for feature, place in places(VLLM):
        owner, _, method = split(place.target)[1].partition(".")
        table.add((f"{IN_TOY.get(owner, owner)}.{method}", place.takes, place.is_open))
        named = {each.feature for each in patches.hooked if each.path.endswith(f".{method}")}
        assert feature.name in named or named == {None}, place
    of_engine = {each for each in patches.hooked if each.module == toy_vllm.__name__}
    assert_agree(table, of_engine)


def test_vllm_s_table_has_the_modules_that_are_waited_for_and_the_fields_that_are_asked() -> None:
    classes = {
        **{"front_end": "AsyncLLM", "starts": "MPClient"},
        **{"core": "Scheduler", "worker": "WorkerWrapperBase"},
    }
    waited = {
        f"{module}:{classes[name.removeprefix('observe_')]}"
        for module, name in vllm_hooks._OBSERVERS.items()
    }
    assert waited <= {place.target.rpartition(".")[0] for _, place in places(VLLM)}
    scheduler = VLLM.features[0]
    assert scheduler.name == vllm_core.SCHEDULER
    assert set(scheduler.fields[0].names) == set(vllm_core._NEEDED)


def test_sglang_is_hooked_where_its_table_has_it() -> None:
    scheduler, front_end = SchedulerHooks(), FrontEndHooks()
    hooked: dict[str, set[str]] = defaultdict(set)
    hooked["the scheduler"] |= scheduler.by_target().keys()
    hooked["requests at the front end"] |= front_end.by_target().keys()
    for hooks in (scheduler, front_end):
        for feature, targets in hooks.by_feature().items():
            hooked[feature] |= targets.keys()
    table: dict[str, set[str]] = defaultdict(set)
    for feature, place in places(SGLANG)[1:]:  # the first is what they are placed by
        table[feature.name].add(place.target.replace(":", "."))
    assert table == hooked


@pytest.mark.parametrize(
    ("method", "reader"),
    [
        ("_add_request_to_queue", SchedulerWatch.enqueued),
        ("run_batch", SchedulerWatch.launching),
        ("process_batch_result", SchedulerWatch.result_ends),
        ("stream_output", SchedulerWatch.streamed),
        ("send_abort_output", SchedulerWatch.aborted),
        ("checkpoint_into_tree", CacheRecorder.inserted),
        ("_send_one_request", sglang_hooks._sending),
        ("_send_batch_request", sglang_hooks._sending_batch),
        ("_handle_batch_output", sglang_hooks._received),
    ],
)
def test_sglang_s_arguments_are_named_as_in_its_table(method: str, reader: Any) -> None:
    (place,) = (each for _, each in places(SGLANG) if each.target.endswith(f".{method}"))
    kinds = inspect.Parameter
    named = [
        each.name
        for each in inspect.signature(reader).parameters.values()
        if each.kind is kinds.POSITIONAL_OR_KEYWORD
    ]
    assert tuple(named) == place.takes


@pytest.mark.thorough
def test_transformers_is_hooked_where_its_table_has_it(
    rings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers.cli.serving.server")
    from transformers import Qwen2ForCausalLM

    from inferscope.adapters.transformers import hooks as transformers

    class FastAPI(Starlette):
        """What stands in for FastAPI's own class, which the fast suite does without."""

    monkeypatch.setitem(sys.modules, "fastapi", SimpleNamespace(FastAPI=FastAPI))
    monkeypatch.setattr(transformers, "Patches", Recording)
    monkeypatch.setattr(transformers, "_session", None)
    session = transformers.watch_all()
    patches = session.patches
    assert isinstance(patches, Recording)
    try:
        session.patch_model(Qwen2ForCausalLM)
        server = import_module("transformers.cli.serving.server")
        observe_server(server)
        ServedRequests(session).begin()
        hooked = {each for each in patches.hooked if each.module.startswith("transformers")}
    finally:
        session.close()
        monkeypatch.setattr(transformers, "_session", None)
        for probe in patches.probes:
            probe.close()
    hooked_by_path = {(each.module, each.path): each for each in hooked}
    assert hooked_by_path.keys() == {split(place.target) for _, place in places(TRANSFORMERS)}
    for _, place in places(TRANSFORMERS):
        hook = hooked_by_path[split(place.target)]
        assert hook.is_open is place.is_open
        # What passes everything on takes the arguments apart later, as the stream's hook does.
        is_passing_on = place.target.endswith(".generate_non_streaming")
        assert hook.takes == (() if is_passing_on else place.takes)


@pytest.mark.thorough
def test_batches_of_transformers_before_5_17_are_hooked_where_its_table_has_it(
    patches: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    batching = pytest.importorskip("transformers.generation.continuous_batching.continuous_api")
    monkeypatch.delattr(batching.OutputRouter, "fail_and_deliver")
    hooks = BatchingHooks(patches, Recorders(patches), lambda model: True)
    hooks.install()
    assert hooks._is_whole
    (feature,) = (each for each in TRANSFORMERS.features if each.otherwise)
    (place,) = feature.otherwise
    wanted = Hooked(feature.name, *split(place.target), place.takes, place.is_open)
    assert wanted in patches.hooked


def test_llama_cpp_is_hooked_where_its_table_has_it(patches: Recording) -> None:
    class Llama:
        def generate(self, tokens: Any) -> None: ...
        def eval(self, tokens: Any) -> None: ...
        def create_completion(self, prompt: str) -> None: ...

    session = llama_cpp.Session()
    session.patches = patches
    session.install(Llama)
    hooked = {each.path.rpartition(".")[2] for each in patches.hooked}
    assert hooked == {place.target.rpartition(".")[2] for _, place in places(LLAMA_CPP)}


# --- the static check -----------------------------------------------------------------------------


def lacking(engine: Engine, folder: Path) -> dict[str, tuple[str, ...]]:
    return {
        lack.feature.name: lack.missing for lack in lacks_of(engine, Source(engine.package, folder))
    }


@pytest.mark.thorough
@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: str(engine.package))
def test_each_thing_that_is_missing_costs_the_features_that_need_it_and_no_other(
    engine: Engine, tmp_path: Path
) -> None:
    assert lacking(engine, write(engine, tmp_path / "whole")) == {}
    targets = defaultdict(set)
    for feature in engine.features:
        for place in feature.places:
            if not place.target.endswith(".__init__"):
                targets[place.target].add(feature.name)
        for fields in feature.fields:
            for name in fields.names:
                dot = "." if ":" in fields.target else ":"
                targets[f"{fields.target}{dot}{name}"].add(feature.name)
    for number, (target, features) in enumerate(targets.items()):
        found = lacking(engine, write(engine, tmp_path / str(number), without=target))
        assert found.keys() == features, target
        name = re.split("[.:]", target)[-1]
        assert all(name in " ".join(why) for why in found.values())


@pytest.mark.parametrize(
    ("instead", "why"),
    [
        ("def add_request(self, request): ...", ""),
        ("def add_request(self, *args, **kwargs): ...", ""),
        ("add_request = None", ""),  # what it is cannot be read
        ("def add_request(self, asked): ...", "has no request"),
        ("def add_request(self): ...", "has no request"),
        ("def add_request(self, request, priority=0): ...", "takes priority too"),
    ],
)
def test_parameters_must_be_those_of_the_hook(instead: str, why: str, tmp_path: Path) -> None:
    target = "vllm.v1.core.sched.scheduler:Scheduler.add_request"
    found = lacking(VLLM, write(VLLM, tmp_path, without=target, instead=instead))
    if not why:
        assert found == {}
        return
    missing, *_ = found.pop("the scheduler")
    assert found == {}
    assert missing.startswith("vllm.v1.core.sched.scheduler.Scheduler.add_request ")
    assert why in missing


def test_one_place_may_serve_for_another(tmp_path: Path) -> None:
    runner = "vllm.v1.worker.gpu_model_runner:GPUModelRunner._model_forward"
    folder = write(VLLM, tmp_path, without=runner)
    assert lacking(VLLM, folder).keys() == {"device spans that begin at the forward"}
    second = folder / "v1" / "worker" / "gpu" / "kv_connector.py"
    second.parent.mkdir()
    second.write_text("class KVConnector:\n    def pre_forward(self, output): ...\n")
    assert lacking(VLLM, folder) == {}


SOURCES = {
    "__init__.py": "from .far.base import Base\nimport pack.other",
    "far/__init__.py": "",
    "far/base.py": "try:\n    import fast\nexcept ImportError:\n    class Base:\n"
    "        def inherited(self): self.assigned, other = 1, 2\n",
    "other.py": "if True:\n    class Mixin:\n        @property\n        def mixed(self): ...",
    "main.py": "import outside\nfrom . import Base\nfrom pack import other as named\n"
    "from pack.main import Loop\n"
    "class Mine(Base, named.Mixin, outside.Class):\n    annotated: int\n    @staticmethod\n"
    "    def free(first): ...\n",
    "broken.py": "class Mine(:",
}


@pytest.fixture
def source(tmp_path: Path) -> Source:
    for name, text in SOURCES.items():
        path = tmp_path / "pack" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Source("pack", tmp_path / "pack")


def test_a_class_has_what_its_bases_have_wherever_they_are(source: Source) -> None:
    members = source.members("pack.main:Mine")
    assert members is not None
    assert members.keys() == {"annotated", "free", "inherited", "assigned", "mixed"}
    assert source.members("pack:Base") == source.members("pack.far.base:Base")


@pytest.mark.parametrize(
    "target",
    ["pack.broken:Mine", "pack.none:Mine", "pack.main:None", "pack.main:Loop", "outside:Class"],
)
def test_what_cannot_be_read_is_missing(source: Source, target: str) -> None:
    assert source.members(target) is None


def test_methods_without_self_keep_their_first_parameter(source: Source) -> None:
    free = Feature("it", (Place("pack.main:Mine.free", ("first",)),))
    engine = Engine("pack", "pack", "", (free,))
    assert list(lacks_of(engine, source)) == []
    fields = Feature("it", (), (Fields("pack.main:Mine", ("free", "none")),))
    (lack,) = lacks_of(Engine("pack", "pack", "", (fields,)), source)
    assert str(lack) == "it: pack.main.Mine has no none"


@pytest.mark.thorough
@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: str(engine.package))
def test_another_environment_s_engine_is_checked_without_importing_it(
    engine: Engine, tmp_path: Path
) -> None:
    python = environment(tmp_path, engine, "1.2.3")
    (found,) = (each for each in engines_of(python) if each.engine is engine)
    assert (found.version, found.lacks, found.is_observed) == ("1.2.3", (), True)


def test_the_check_loads_no_engine_and_no_torch() -> None:
    program = (
        "import sys, json\nfrom inferscope.adapters.needs.check import engines_of\n"
        "engines_of(sys.executable)\nprint(json.dumps(sorted(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=os.environ, check=True
    )
    loaded = set(json.loads(done.stdout))
    assert not loaded & {"torch", "numpy", "vllm", "sglang", "transformers", "llama_cpp"}
