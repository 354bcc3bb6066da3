"""Tensor and pipeline parallelism: cut weights by threads, and engines of several processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from inferscope.engine import Engine, EngineOptions, Sampling, load_engine, load_model
from inferscope.engine.config import ModelConfig
from inferscope.engine.model import Model, forward, outline_of
from inferscope.engine.parallel import SLOW_RANK_VARIABLE, Place, RankGroup
from inferscope.engine.remote import RemoteRunner, WorkerLost
from inferscope.errors import BadInput
from inferscope.insight.findings.ranks import slow_rank
from inferscope.probe import Probe
from inferscope.records import EngineInfo, ExpertLoad, StepSlices, StepSpan
from tests.children import child
from tests.engine.checkpoints import VOCAB, Checkpoint, prompts
from tests.engine.rank_threads import ThreadGroup, Threads
from tests.engine.test_model import attend_densely
from tests.insight.runs import judge
from tests.probe.fakes import of

pytestmark = pytest.mark.thorough

OPTIONS = EngineOptions(dtype="float32", token_budget=24, max_running=6, num_blocks=14)
"""Options under which chunks, prefix hits and preemptions occur."""
IDS = torch.arange(40) * 7 % VOCAB
WAYS = [(2, 1), (1, 2), (2, 2)]
"""Tensor ranks and pipeline stages."""


def logits_of(model: Model, whole: ModelConfig) -> Tensor:
    part = replace(model, config=replace(model.config, num_layers=whole.num_layers))
    with torch.inference_mode():
        return forward(
            model,
            IDS,
            positions=torch.arange(len(IDS)),
            attend=attend_densely(part),
            rows=torch.tensor([3, len(IDS) - 1]),
        )


@pytest.mark.parametrize(("tensor_ranks", "num_stages"), WAYS)
def test_parts_of_a_model_compute_its_logits(
    checkpoint: Checkpoint, tensor_ranks: int, num_stages: int
) -> None:
    options = EngineOptions(
        dtype="float32", tensor_parallel=tensor_ranks, pipeline_parallel=num_stages
    )
    name = str(checkpoint.folder)
    whole = load_model(name, options)
    expected = logits_of(whole, whole.config)
    places = [Place.of(rank, options) for rank in range(options.num_ranks)]
    threads = Threads(places[0])
    found: dict[int, Tensor] = {}

    def compute(place: Place) -> None:
        model = replace(load_model(name, options, place), group=ThreadGroup(place, threads))
        assert outline_of(model).config == whole.config
        assert model.kv_token_bytes * options.num_ranks == whole.kv_token_bytes
        found[place.rank] = logits_of(model, whole.config)

    ranks = [threading.Thread(target=compute, args=(place,)) for place in places]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
    assert len(found) == options.num_ranks
    for logits in found.values():
        assert (logits - expected).abs().max() < 1e-4 * expected.std()


@pytest.mark.parametrize(
    ("options", "arithmetic"),
    [
        ({"tensor_parallel": 3}, "4 heads do not divide among --tensor-parallel 3: 4 = 1 x 3 + 1"),
        (
            {"tensor_parallel": 4},
            "2 key/value heads do not divide among --tensor-parallel 4: 2 = 0 x 4 + 2",
        ),
        ({"pipeline_parallel": 3}, "2 layers do not divide among --pipeline-parallel 3"),
    ],
)
def test_model_that_does_not_divide_is_refused_with_the_arithmetic(
    options: dict[str, Any], arithmetic: str
) -> None:
    given = EngineOptions(**options)
    with pytest.raises(BadInput) as refused:
        load_model("random:tiny", given, Place.of(1, given))
    assert arithmetic in str(refused.value)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"tensor_parallel": 0}, "tensor_parallel is 0"),
        ({"tensor_parallel": 16, "pipeline_parallel": 16}, "are 256 processes"),
        ({"tensor_parallel": 2, "role": "prefill"}, "do not hand it over"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadInput, match=reason):
        EngineOptions(**options)


@pytest.mark.parametrize("given", ["1", "1:x", "x:1", "1:-3", "1:nan"])
def test_bad_slow_rank_is_refused(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SLOW_RANK_VARIABLE, given)
    with pytest.raises(BadInput, match="Give a rank and milliseconds, such as 1:5"):
        RankGroup(Place(0, 2, 1), "/nonexistent/meeting")


# --- engines of several processes -------------------------------------------------------------


def pids_of(engine: Engine) -> list[int]:
    runner = engine._runner
    assert isinstance(runner, RemoteRunner)
    return runner.pids


def is_gone(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


def _run_until_idle(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


@pytest.fixture
def rings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("INFERSCOPE_DIR", str(tmp_path))
    monkeypatch.setenv("INFERSCOPE_ENGINE_ID", "ranks")
    monkeypatch.setenv("INFERSCOPE_RING_MB", "8")
    return tmp_path / "ranks"


def serve(rings: Path, options: EngineOptions, model: str = "random:tiny") -> Iterator[Engine]:
    engine = load_engine(model, options, open_probe=Probe.open)
    expected = load_engine(model, replace(options, tensor_parallel=1, pipeline_parallel=1))
    given = prompts(8, vocab=64)
    for sampling in (Sampling(max_tokens=12), Sampling(max_tokens=3, temperature=0.9, seed=3)):
        assert engine.generate(given, sampling) == expected.generate(given, sampling)
    yield engine
    engine.close()
    engine.probe.close()
    assert all(map(is_gone, pids_of(engine)))


def test_slow_rank_is_named_and_a_killed_one_ends_the_engine(
    rings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One engine for all that two processes show: it takes seconds to start."""
    slow_ms = 25
    monkeypatch.setenv(SLOW_RANK_VARIABLE, f"1:{slow_ms}")
    for engine in serve(rings, replace(OPTIONS, tensor_parallel=2)):
        engine.submit([1, 2, 3], Sampling(max_tokens=50))
        engine.step()
        os.kill(pids_of(engine)[1], signal.SIGKILL)
        with pytest.raises(WorkerLost, match=r"of rank 1 has ended \(exit code -9\)"):
            _run_until_idle(engine)
    (core,), workers = rings.glob("core-*.ring"), sorted(rings.glob("worker-*.ring"))
    slices = {each.step: each for each in of(StepSlices, core)}
    for rank, worker in enumerate(workers):
        (info, *_) = of(EngineInfo, worker)
        assert (info.ranks, info.sizes) == ((rank, 0, 0, 0), (2, 1, 1, 1))
        digests = {span.step: span.digest for span in of(StepSpan, worker)}
        assert {step: slices[step].digest for step in digests} == digests
        assert len(digests) >= len(slices) - 2  # those that were under way
    of_rank = [{span.step: span for span in of(StepSpan, worker)} for worker in workers]
    steps = of_rank[0].keys() & of_rank[1].keys()
    for slow in of_rank[1].values():
        assert slow.ready_ns - slow.launch_start_ns - sum(slow.waits_ns) >= slow_ms * 1e6
    waited_ns = sum(sum(of_rank[0][step].waits_ns) for step in steps)
    assert waited_ns > 0.7 * len(steps) * slow_ms * 1e6
    assert waited_ns > 2 * sum(sum(of_rank[1][step].waits_ns) for step in steps)

    found = judge(rings)
    finding = slow_rank(found.run)
    assert finding is not None
    assert finding.title == "Rank 1 is slow, and the others wait for it"
    for request in found.finals.requests:
        assert sum(request.ledger_ns.values()) == request.delivered_ns - request.arrived_ns
    booked_ns = sum(each.ledger_ns.get("rank_wait", 0) for each in found.finals.requests)
    expected_ns = sum(
        sum(of_rank[0][step].waits_ns) * len(set(memoryview(rows.requests).cast("I")))
        for step, rows in slices.items()
        if step in steps
    )
    assert booked_ns == pytest.approx(expected_ns, rel=0.25)


_DRIVER = """
from dataclasses import replace
from inferscope.engine import EngineOptions, Sampling, load_engine
engine = load_engine("random:tiny", EngineOptions(dtype="float32", {way}=2))
engine.submit([1, 2, 3], Sampling(max_tokens=10_000, ignore_eos=True))
engine.step()
print(*engine._runner.pids, flush=True)
while True:
    engine.step()
    if not engine.has_work:
        engine.submit([1, 2, 3], Sampling(max_tokens=1000, ignore_eos=True))
"""


@pytest.mark.slow
@pytest.mark.parametrize("way", ["tensor_parallel", "pipeline_parallel"])
def test_killed_driver_leaves_no_rank(way: str) -> None:
    words = [sys.executable, "-c", _DRIVER.format(way=way)]
    with child(words, stdout=subprocess.PIPE) as driver:
        assert driver.stdout is not None
        pids = [int(pid) for pid in driver.stdout.readline().split()]
        assert len(pids) == 2
        time.sleep(0.5)
        driver.kill()
    deadline_s = time.monotonic() + 60
    while not all(map(is_gone, pids)) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert all(map(is_gone, pids))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"pipeline_parallel": 2},
        {"tensor_parallel": 2, "pipeline_parallel": 2},
        {"pipeline_parallel": 2, "overlap": True},
        {"tensor_parallel": 2, "speculative": "draft", "draft_model": "random:tiny,layers=1"},
    ],
)
def test_healthy_stages_show_no_slowdown(rings: Path, options: dict[str, Any]) -> None:
    list(serve(rings, replace(OPTIONS, **options), "random:tiny,layers=4"))
    found = judge(rings)
    ledger = Counter[str]()
    for request in found.finals.requests:
        assert sum(request.ledger_ns.values()) == request.delivered_ns - request.arrived_ns
        ledger.update(request.ledger_ns)
    assert ledger["slowdown"] < 0.1 * sum(ledger.values())
    assert {rank for _, rank in found.run.steps.of_rank} == set(range(_num_ranks(options)))


def _num_ranks(options: dict[str, Any]) -> int:
    return options.get("tensor_parallel", 1) * options.get("pipeline_parallel", 1)


@pytest.mark.slow
def test_stages_of_a_mixture_record_the_routing_of_all_layers(rings: Path) -> None:
    options = replace(OPTIONS, tensor_parallel=2, pipeline_parallel=2)
    list(serve(rings, options, "random:tiny-moe"))
    loads = [of(ExpertLoad, worker) for worker in sorted(rings.glob("worker-*.ring"))]
    assert [bool(of_rank) for of_rank in loads] == [True, False, True, False]
    assert {load.first_layer for load in loads[0]} == {0}
    assert {load.first_layer for load in loads[2]} == {1}
