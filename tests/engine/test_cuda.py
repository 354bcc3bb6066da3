"""Tests of the reference engine on a GPU: equal tokens, and times by the device's clock."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
import torch

from inferscope.engine import Engine, EngineOptions, Sampling, load_engine
from inferscope.engine.ceilings import measure_ceilings
from inferscope.engine.devices import device_uuid, highest_clocks_mhz, step_timer
from inferscope.engine.load import describe
from inferscope.probe import Probe
from inferscope.records import Clock, EngineInfo, StepSpan
from tests.probe.fakes import check_device_spans, of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

SHAPE = "random:hidden=256,layers=4,heads=8,kv_heads=2,ffn=512,vocab=1024"


def engine_on(device: str, **options: object) -> Engine:
    given = {"token_budget": 48, "max_running": 6, "num_blocks": 200, "dtype": "float32"} | options
    return load_engine(SHAPE, EngineOptions(device=device, **given))  # type: ignore[arg-type]


def prompts(seed: int, num: int = 9) -> list[list[int]]:
    draw = random.Random(seed)
    return [draw.choices(range(1024), k=draw.randint(1, 200)) for _ in range(num)]


def shared_weights(of_cpu: Engine, on_gpu: Engine) -> None:
    """Copy the CPU engine's weights to the GPU engine, where the seed draws other numbers."""
    ours, theirs = of_cpu.model, on_gpu.model
    pairs = [(ours.weights.embedding, theirs.weights.embedding)]  # type: ignore[union-attr]
    pairs += [(ours.weights.norm, theirs.weights.norm)]  # type: ignore[union-attr]
    pairs += [(ours.weights.head, theirs.weights.head)]  # type: ignore[union-attr]
    for one, other in zip(ours.weights.layers, theirs.weights.layers, strict=True):  # type: ignore[union-attr]
        for name in ("attention_norm", "qkv", "out", "ffn_norm"):
            pairs.append((getattr(one, name), getattr(other, name)))
        for name in ("gate_up", "down"):
            pairs.append((getattr(one.feed_forward, name), getattr(other.feed_forward, name)))
    for from_, to in pairs:
        to.copy_(from_)


@pytest.mark.parametrize("seed", range(3))
def test_greedy_tokens_are_the_cpu_s(seed: int) -> None:
    """Include chunks, mixed steps and preemptions, in fp32 without TF32 on both devices."""
    batch_prompts = prompts(seed)
    on_cpu, on_gpu = engine_on("cpu"), engine_on("cuda:0")
    with torch.inference_mode():
        shared_weights(on_cpu, on_gpu)
    sampling = Sampling(max_tokens=24, ignore_eos=True)
    assert on_gpu.generate(batch_prompts, sampling) == on_cpu.generate(batch_prompts, sampling)
    assert on_gpu.pool.num_used == 0


def test_long_prompts_survive_chunks_that_end_without_waiting_for_the_device() -> None:
    """A step that samples nothing does not synchronize; its buffers must not be overwritten."""
    prompt = random.Random(5).choices(range(1024), k=1500)
    sampling = Sampling(max_tokens=8, ignore_eos=True)
    whole, chunked = engine_on("cuda:0", token_budget=2048), engine_on("cuda:0", token_budget=16)
    assert chunked.generate([prompt], sampling) == whole.generate([prompt], sampling)


def test_every_step_has_a_device_span_within_its_host_span(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFERSCOPE_DIR", str(tmp_path))
    engine = engine_on("cuda:0")
    device = engine.model.device
    probe = engine.probe = Probe.open(describe(engine, name=SHAPE), timer=step_timer(device))
    for _ in range(3):
        engine.generate(prompts(1), Sampling(max_tokens=8, ignore_eos=True))
        time.sleep(0.2)
    assert probe.path is not None
    probe.close()
    check_device_spans(of(StepSpan, probe.path))
    assert any(clock.device_ns is not None for clock in of(Clock, probe.path))
    (info, *_) = of(EngineInfo, probe.path)
    assert info.device == torch.cuda.get_device_name(device)
    assert info.device_uuid == device_uuid(device) != ""
    assert info.num_threads == 0


def test_a_gpu_s_ceilings_are_above_any_cpu_s_and_below_ten_times_the_largest_gpu_s() -> None:
    device = torch.device("cuda:0")
    ceilings = measure_ceilings(device, seconds=2.0)
    assert 5e10 < ceilings.read_bytes_s < 1e14
    assert 5e10 < ceilings.copy_bytes_s < 1e14
    assert ceilings.flops_s["bfloat16"] > ceilings.flops_s["float32"] > 1e12
    clocks = highest_clocks_mhz(device)
    assert clocks is None or all(100 < mhz < 10_000 for mhz in clocks)


# torch warns once that its check does not see all synchronizing calls.
@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(max_tokens=6, ignore_eos=True),
        Sampling(max_tokens=6, temperature=0.9, seed=1, min_tokens=4, stop_token_ids=(3, 4)),
        Sampling(max_tokens=6, temperature=0.9, top_k=5, top_p=0.8, seed=1, ignore_eos=True),
    ],
)
def test_a_launched_step_has_not_waited_for_the_device(sampling: Sampling) -> None:
    """Otherwise the device span would end with the host's wait."""
    engine = engine_on("cuda:0")
    execute = engine._runner.execute  # type: ignore[attr-defined]

    def checked(batch: object) -> object:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return execute(batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    engine._runner.execute = checked  # type: ignore[attr-defined]
    assert all(engine.generate(prompts(1), sampling))


def test_graphs_generate_the_tokens_of_eager_steps() -> None:
    """Cover every captured size, and padding."""
    pytest.importorskip("triton")
    sampling = Sampling(max_tokens=24, ignore_eos=True)
    graphs, eager = engine_on("cuda:0"), engine_on("cuda:0", cuda_graphs=False)
    for num in (1, 3, 9):
        ours, theirs = (engine.generate(prompts(num, num), sampling) for engine in (graphs, eager))
        assert ours == theirs


def test_decodes_are_recorded_as_graphs_of_the_next_captured_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("INFERSCOPE_DIR", str(tmp_path))
    engine = engine_on("cuda:0")
    timer = step_timer(engine.model.device)
    probe = engine.probe = Probe.open(describe(engine, name=SHAPE), timer=timer)
    engine.generate(prompts(1, 3), Sampling(max_tokens=8, ignore_eos=True))
    time.sleep(0.2)
    assert probe.path is not None
    probe.close()
    spans = of(StepSpan, probe.path)
    assert {span.mode for span in spans} == {"eager", "graph"}
    assert all(span.padded_tokens == 0 for span in spans if span.mode == "eager")
    assert {span.padded_tokens for span in spans if span.mode == "graph"} <= {1, 2, 4}


def test_graphs_are_captured_beside_event_queries_of_another_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A query of another thread would end a capture in CUDA's default mode."""
    pytest.importorskip("triton")
    monkeypatch.setenv("INFERSCOPE_DIR", str(tmp_path))
    timed = engine_on("cuda:0")
    timer = step_timer(timed.model.device)
    probe = timed.probe = Probe.open(describe(timed, name=SHAPE), timer=timer)
    sampling = Sampling(max_tokens=4, ignore_eos=True)
    for _ in range(5):
        timed.generate(prompts(2, 2), sampling)  # the last step's events are queried from beside
        beside = engine_on("cuda:0")
        assert all(beside.generate(prompts(3, 2), sampling))
    probe.close()
