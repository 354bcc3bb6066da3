"""Graphs of decode steps without a GPU: the choice of a size, the padding, and the records."""

from __future__ import annotations

import ast
import builtins
import random
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from inferscope.engine import Engine, EngineOptions, Sampling, load_engine
from inferscope.engine.attention import KvTensors, PagedAttention
from inferscope.engine.graphs import (
    BoundAttention,
    DecodeGraphs,
    DecodeInputs,
    graph_sizes,
    padded_size,
)
from inferscope.engine.load import describe
from inferscope.engine.model import Model
from inferscope.engine.runner import Runner
from inferscope.engine.scheduler import Slice
from inferscope.probe import Probe
from inferscope.records import StepSlices, StepSpan
from tests.engine.steps import WIDTH, make_request
from tests.probe.fakes import of

NUM_BLOCKS = 64
MAX_RUNNING = 6
CPU = torch.device("cpu")


def part(num_tokens: int = 1, *, is_sampled: bool = True) -> Slice:
    return Slice(make_request(0, [1, 2]), context=0, num_tokens=num_tokens, is_sampled=is_sampled)


@pytest.mark.parametrize("most", range(1, 70))
def test_sizes_hold_every_batch_with_less_than_half_of_it_padding(most: int) -> None:
    sizes = graph_sizes(most)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[-1] == most
    for num in range(1, most + 1):
        padded = padded_size([part()] * num, sizes)
        assert num <= padded < 2 * num or padded == num == 1
    assert padded_size([part()] * (most + 1), sizes) == 0


def test_steps_other_than_one_sampled_token_each_are_eager() -> None:
    sizes = graph_sizes(8)
    assert padded_size([part(), part()], sizes) == 2
    assert padded_size([part(), part(3)], sizes) == 0
    assert padded_size([part(), part(is_sampled=False)], sizes) == 0


def test_inputs_are_padded_without_traces_of_a_larger_step() -> None:
    inputs = DecodeInputs(4, max_blocks=3, device=CPU)
    addresses = [tensor.data_ptr() for tensor in (inputs.ids, inputs.requests, inputs.blocks)]
    assert inputs.slots.tolist() == [-1] * 4
    inputs.write(
        4,
        ids=[5, 6, 7, 8],
        positions=np.array([9, 3, 0, 11]),
        slots=np.array([41, 7, 12, 3]),
        blocks=np.array([[4, 5, 10], [1, 0, 0], [3, 0, 0], [2, 9, 0]]),
    )
    assert inputs.requests.tolist() == [[10, 0, 1, 0], [4, 1, 1, 3], [1, 2, 1, 6], [12, 3, 1, 9]]
    inputs.write(
        4,
        ids=[6, 7, 8],
        positions=np.array([4, 1, 12]),
        slots=np.array([16, 13, 8]),
        blocks=np.array([[1, 4], [3, 0], [2, 9]]),
    )
    assert inputs.ids.tolist() == [6, 7, 8, 0]
    assert inputs.positions.tolist() == [4, 1, 12, 0]
    assert inputs.slots.tolist() == [16, 13, 8, -1]
    assert inputs.requests.tolist() == [[5, 0, 1, 0], [2, 1, 1, 2], [13, 2, 1, 4], [0, 0, 0, 0]]
    assert inputs.blocks[:6].tolist() == [1, 4, 3, 0, 2, 9]
    assert addresses == [t.data_ptr() for t in (inputs.ids, inputs.requests, inputs.blocks)]


class Gathering:
    """Attention over bound tensors, by way of the pool of a `PagedAttention`."""

    def __init__(self, pool: PagedAttention) -> None:
        self.pool = pool
        self.bound: tuple[Tensor, Tensor, Tensor] | None = None

    def bind(self, *, slots: Tensor, requests: Tensor, blocks: Tensor) -> None:
        self.bound = slots, requests, blocks

    def run(self, layer_idx: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        assert self.bound is not None
        slots, requests, blocks = self.bound
        keys, values = self.pool.kv.keys[layer_idx], self.pool.kv.values[layer_idx]
        out = torch.zeros_like(query)
        for row, (length, _, _, first) in enumerate(requests.tolist()):
            if slots[row] < 0:
                assert length == 0
                continue
            keys[slots[row]], values[slots[row]] = key[row], value[row]
            at = torch.arange(length)
            read = blocks[first + at // WIDTH] * WIDTH + at % WIDTH
            repeats = query.shape[1] // key.shape[1]
            seen, weighed = (
                tensor[read].repeat_interleave(repeats, dim=1) for tensor in (keys, values)
            )
            scores = torch.einsum("hd,khd->hk", query[row], seen) * query.shape[-1] ** -0.5
            out[row] = torch.einsum("hk,khd->hd", scores.softmax(-1), weighed)
        return out


def engine_with_graphs(
    build: Callable[[PagedAttention], BoundAttention],
    *,
    captured: list[Tensor] | None = None,
    overlap: bool = False,
) -> Engine:
    """Return an engine whose graphs run the captured function again."""
    plain = load_engine("random:tiny", options())
    model = plain.model
    assert isinstance(model, Model)
    pool = PagedAttention(
        KvTensors(
            model.config, num_blocks=NUM_BLOCKS, block_tokens=WIDTH, dtype=model.dtype, device=CPU
        )
    )

    def capture(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        if captured is not None:
            captured.append(run())
        return run

    graphs = DecodeGraphs(
        model,
        build(pool),
        sizes=graph_sizes(MAX_RUNNING),
        max_blocks=NUM_BLOCKS,
        capture=capture,
    )
    runner = Runner(
        model,
        pool,
        token_budget=32,
        max_running=MAX_RUNNING,
        max_blocks=NUM_BLOCKS,
        block_tokens=WIDTH,
        overlap=overlap,
        graphs=graphs,
    )
    return Engine(model, options(overlap=overlap), runner=runner)


def options(*, overlap: bool = False) -> EngineOptions:
    return EngineOptions(
        dtype="float32", token_budget=32, max_running=MAX_RUNNING, num_blocks=NUM_BLOCKS,
        block_tokens=WIDTH, max_model_tokens=200, overlap=overlap,
    )  # fmt: skip


def prompts(seed: int, num: int = 9) -> list[list[int]]:
    draw = random.Random(seed)
    return [draw.choices(range(256), k=draw.randint(1, 50)) for _ in range(num)]


def test_sizes_are_captured_from_the_largest_on_padding_alone() -> None:
    captured: list[Tensor] = []
    engine_with_graphs(Gathering, captured=captured)
    assert [len(logits) for logits in captured] == [6, 4, 2, 1]
    assert all(bool(logits.isfinite().all()) for logits in captured)


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(max_tokens=12, ignore_eos=True),
        Sampling(max_tokens=9, temperature=0.9, top_k=9, seed=3, min_tokens=4),
    ],
)
@pytest.mark.parametrize("overlap", [False, True])
def test_tokens_are_those_of_eager_steps(seed: int, sampling: Sampling, overlap: bool) -> None:
    """Cover chunks, mixed steps, preemptions, and padding of every size."""
    expected = load_engine("random:tiny", options()).generate(prompts(seed), sampling)
    engine = engine_with_graphs(Gathering, overlap=overlap)
    assert engine.generate(prompts(seed), sampling) == expected
    assert engine.pool.num_used == 0


def test_spans_record_the_mode_and_the_size_that_a_step_is_padded_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFERSCOPE_DIR", str(tmp_path))
    engine = engine_with_graphs(Gathering)
    probe = engine.probe = Probe.open(describe(engine, name="tiny"))
    engine.generate(prompts(0), Sampling(max_tokens=12, ignore_eos=True))
    assert probe.path is not None
    probe.close()
    sizes = graph_sizes(MAX_RUNNING)
    tokens_by_step = {
        record.step: np.frombuffer(record.tokens, "<u4").tolist()
        for record in of(StepSlices, probe.path)
    }
    spans = of(StepSpan, probe.path)
    assert {span.mode for span in spans} == {"eager", "graph"}
    assert any(span.padded_tokens not in (0, sum(tokens_by_step[span.step])) for span in spans)
    for span in spans:
        tokens = tokens_by_step[span.step]
        is_graph = span.mode == "graph"
        assert is_graph or span.padded_tokens == 0
        if is_graph:
            assert tokens == [1] * len(tokens)
            assert span.padded_tokens == min(size for size in sizes if size >= len(tokens))


def test_option_has_no_effect_without_a_gpu(tiny_engine: Callable[..., Engine]) -> None:
    for graphs in (True, False):
        engine = tiny_engine(device="cpu", cuda_graphs=graphs, num_blocks=32)
        runner = engine._runner
        assert isinstance(runner, Runner)
        assert runner._graphs is None
        assert isinstance(runner._attention, PagedAttention)


@pytest.mark.parametrize("module", ["kernels", "weight_kernels"])
def test_kernels_use_only_globals_that_triton_compiles(module: str) -> None:
    """Triton evaluates annotations as well; its interpreter, which tests run, does not."""
    spec = find_spec(f"inferscope.engine.{module}")
    assert spec is not None
    assert spec.origin is not None
    source = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    kernels = [
        each for each in source.body if isinstance(each, ast.FunctionDef) and each.decorator_list
    ]
    allowed = {"tl", *dir(builtins), *(kernel.name for kernel in kernels)}
    assert kernels
    for kernel in kernels:
        compiled = [node for part in (kernel.args, *kernel.body) for node in ast.walk(part)]
        names = [node for node in compiled if isinstance(node, ast.Name)]
        own = {each.arg for each in kernel.args.args}
        own |= {name.id for name in names if isinstance(name.ctx, ast.Store)}
        assert {name.id for name in names} - own <= allowed, kernel.name
