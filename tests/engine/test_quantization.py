"""Tests of quantised matrices and models against their dequantised twins."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
import torch

from inferscope.cost.hbm import hbm_rates
from inferscope.engine import Engine, EngineOptions, load_engine
from inferscope.engine.load import describe, load_model
from inferscope.engine.model import Model, forward
from inferscope.engine.quantization import (
    Fp8Matrix,
    Int4Matrix,
    Int8Matrix,
    PackedInt4Matrix,
    linear,
)
from inferscope.errors import BadInput
from tests.engine.checkpoints import Checkpoint, matrices_of
from tests.engine.test_correctness import PROMPTS, TIE_SHARE, WAYS, serve
from tests.engine.test_model import IDS, attend_densely

NAMES = ("int8", "int4")
WIDE = "random:hidden=128,layers=2,heads=4,kv_heads=2,ffn=192,vocab=512"
"""Shape whose matrices all fit the CPU kernels."""


def plain(weights: Any) -> Any:
    """Return weights with each quantised matrix replaced by the plain matrix it stands for."""
    if hasattr(weights, "dequantized"):
        return weights.dequantized()
    if isinstance(weights, tuple):
        return tuple(map(plain, weights))
    if is_dataclass(weights):
        changes = {each.name: plain(getattr(weights, each.name)) for each in fields(weights)}
        return replace(weights, **changes)  # type: ignore[type-var]
    return weights


def dequantized(model: Model) -> Model:
    """Return a model's twin that computes with the plain matrices."""
    twin = replace(model, weights=plain(model.weights))
    assert isinstance(twin.weights.layers[0].qkv, torch.Tensor)
    return twin


@torch.inference_mode()
def logits_of(model: Model) -> torch.Tensor:
    positions = torch.arange(len(IDS))
    attend = attend_densely(model)
    return forward(model, IDS, positions=positions, attend=attend, rows=positions).float()


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_weights_are_within_half_a_step_of_their_channel(dtype: torch.dtype) -> None:
    matrix = drawn(24, 40, dtype=dtype)
    matrix[3] = 0
    quantized = Int8Matrix.of(matrix)
    exact = quantized.values.double() * quantized.scales.double().unsqueeze(1)
    step = matrix.double().abs().amax(dim=1, keepdim=True) / 127
    # The scale is rounded to the dtype, which clips the largest weights or widens the steps.
    slack = 1 + 127 * 2 * torch.finfo(dtype).eps
    assert ((exact - matrix.double()).abs() <= step * slack / 2 + 1e-12).all()
    assert (exact[3] == 0).all()


@pytest.mark.parametrize(("num_inputs", "group"), [(192, 64), (96, 32)])
def test_int4_weights_are_within_half_a_step_of_their_group(num_inputs: int, group: int) -> None:
    matrix = drawn(24, num_inputs)
    quantized = Int4Matrix.of(matrix)
    assert quantized.scales.shape == (24, num_inputs // group)
    error = (quantized.dequantized() - matrix).abs().unflatten(1, (-1, group))
    step = matrix.unflatten(1, (-1, group)).abs().amax(dim=-1, keepdim=True) / 7
    assert (error <= step * (0.5 + 1e-5)).all()


@pytest.mark.parametrize("num_tokens", [1, 7, 300])
@pytest.mark.parametrize("kind", [Int8Matrix, PackedInt4Matrix])
def test_kernel_products_are_the_dequantised_ones(kind: Any, num_tokens: int) -> None:
    matrix, bias = (drawn(*shape, dtype=torch.bfloat16) for shape in ((128, 192), (128,)))
    quantized = kind.of(matrix)
    inputs = drawn(num_tokens, 192, dtype=torch.bfloat16)
    weights = quantized.dequantized().float()
    expected = inputs.float() @ weights.T + bias.float()
    actual = linear(inputs, quantized, bias)
    assert actual.dtype is torch.bfloat16
    # The dequantised weights, the product and the sum are each rounded to 8 bits of mantissa.
    magnitude = inputs.float().abs() @ weights.T.abs() + bias.float().abs()
    assert ((actual.float() - expected).abs() <= 2**-7 * magnitude).all()


def test_both_int4_layouts_stand_for_the_same_weights() -> None:
    matrix = drawn(128, 192)
    packed = PackedInt4Matrix.of(matrix).dequantized()
    assert torch.equal(packed, Int4Matrix.of(matrix).dequantized())


def test_fp8_weights_and_inputs_are_within_half_an_e4m3_step() -> None:
    matrix, inputs = drawn(64, 96, dtype=torch.bfloat16), drawn(5, 96, dtype=torch.bfloat16)
    quantized = Fp8Matrix.of(matrix)
    weights = quantized.values.float() * quantized.scales.unsqueeze(1)
    # e4m3 has 3 bits of mantissa down to 2^-6, and steps of 2^-9 below.
    smallest = quantized.scales.unsqueeze(1) * 2**-10
    assert ((weights - matrix).abs() <= torch.maximum(matrix.abs() * 2**-4, smallest)).all()
    expected = inputs.float() @ weights.T
    error = (quantized.product(inputs).float() - expected).abs()
    # The inputs' error, 2^-4 of each at most, adds up as noise; bfloat16 rounds the sum.
    assert error.max() < 0.1 * expected.std()


@pytest.mark.thorough
@pytest.mark.parametrize("name", NAMES)
def test_fp32_logits_are_the_dequantised_twin_s(checkpoint: Checkpoint, name: Any) -> None:
    options = EngineOptions(dtype="float32", quantization=name)
    model = load_model(str(checkpoint.folder), options)
    expected = logits_of(dequantized(model))
    assert (logits_of(model) - expected).abs().max() < 1e-4 * expected.std()
    unquantized = logits_of(load_model(str(checkpoint.folder), EngineOptions(dtype="float32")))
    assert (expected - unquantized).abs().mean() < 0.5 * unquantized.std()
    assert not torch.equal(expected, unquantized)


@pytest.mark.parametrize("name", NAMES)
def test_bf16_logits_stay_near_the_dequantised_twin_s(name: Any) -> None:
    model = load_model(WIDE, EngineOptions(dtype="bfloat16", quantization=name))
    expected = logits_of(dequantized(model))
    assert (logits_of(model) - expected).abs().mean() < 0.05 * expected.std()


def assert_greedy(model: Model, prompt: list[int], output: list[int]) -> None:
    """Assert that each token is the model's choice after the same tokens, except at ties."""
    ids = torch.tensor(prompt + output)
    rows = torch.arange(len(prompt) - 1, len(ids) - 1)
    with torch.inference_mode():
        logits = forward(
            model,
            ids,
            positions=torch.arange(len(ids)),
            attend=attend_densely(model),
            rows=rows,
        )
    chosen = logits.gather(1, torch.tensor(output).unsqueeze(1)).squeeze(1)
    assert (logits.amax(dim=1) - chosen < TIE_SHARE * logits.std(dim=1)).all()


TWIN_WAYS: dict[str, dict[str, Any]] = {
    **{way: WAYS[way] for way in ("chunks of 7", "prefix hits", "preemption", "all together")},
    "n-gram drafts": {"token_budget": 64, "speculative": "ngram"},
}


@pytest.mark.thorough
@pytest.mark.parametrize("way", TWIN_WAYS)
@pytest.mark.parametrize("name", NAMES)
def test_output_is_the_dequantised_twin_s(llama: Checkpoint, name: Any, way: str) -> None:
    options = EngineOptions(dtype="float32", quantization=name, **TWIN_WAYS[way])
    engine = load_engine(str(llama.folder), options)
    assert isinstance(engine.model, Model)
    twin = dequantized(engine.model)
    outputs, _ = serve(engine)
    expected, _ = serve(Engine(twin, options))
    for prompt, output, wanted in zip(PROMPTS, outputs, expected, strict=True):
        assert len(output) == len(wanted)
        if output != wanted:
            assert_greedy(twin, prompt, output)
    assert engine.pool.num_used == 0


def stored_bytes(model: Model) -> int:
    """Return the bytes of the layers' matrices, their scales included."""
    total = 0
    for matrix in matrices_of(model):
        parts = [matrix] if isinstance(matrix, torch.Tensor) else vars(matrix).values()
        total += sum(part.numel() * part.element_size() for part in parts)
    return total


@pytest.mark.parametrize(("name", "bits", "scale_bits"), [("int8", 8, 0.3), ("int4", 4, 0.6)])
def test_recorded_weight_bytes_are_those_stored(name: Any, bits: int, scale_bits: float) -> None:
    """The kernels' own layout of int4 has a zero beside each scale: twice the scale bits."""
    engines = {
        each: load_engine(WIDE, EngineOptions(num_blocks=32, dtype="bfloat16", quantization=each))
        for each in (None, name)
    }
    shapes = {each: describe(engine, name=WIDE).shape for each, engine in engines.items()}
    rates = {each: hbm_rates(shape) for each, shape in shapes.items() if shape is not None}
    large, small = rates[None].weights, rates[name].weights
    assert small.layers == large.layers * bits // 16
    assert small.head == large.head
    assert small.of_step(8, 1) < large.of_step(8, 1)
    model = engines[name].model
    assert isinstance(model, Model)
    excess = stored_bytes(model) - small.layers
    assert 0 < excess <= 2 * scale_bits / bits * small.layers


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests a host without a GPU")
def test_fp8_without_a_hopper_gpu_is_refused_with_the_reason() -> None:
    with pytest.raises(BadInput, match=r"compute capability 9\.0 \(Hopper\).*the device is cpu"):
        load_engine("random:tiny", EngineOptions(quantization="fp8"))


def test_int4_of_inputs_without_whole_groups_is_refused_with_the_rest() -> None:
    with pytest.raises(BadInput, match="48 inputs leave a rest of 16"):
        load_engine("random:tiny,hidden=48", EngineOptions(quantization="int4"))


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
    reason="needs a Hopper GPU",
)
@pytest.mark.parametrize(("name", "share"), [("int8", 0.05), ("int4", 0.05), ("fp8", 0.15)])
def test_logits_stay_near_the_dequantised_twin_s_on_hopper(name: Any, share: float) -> None:
    """The twin of fp8 does not quantise its inputs."""
    options = EngineOptions(dtype="bfloat16", device="cuda:0", quantization=name)
    engine = load_engine(WIDE, options)
    assert isinstance(engine.model, Model)
    outputs = engine.generate(PROMPTS)
    assert all(outputs)
    with torch.inference_mode():
        ids = IDS.cuda()
        positions = torch.arange(len(ids), device="cuda")
        ours, theirs = (
            forward(
                model, ids, positions=positions, attend=attend_densely(model), rows=positions
            ).float()
            for model in (engine.model, dequantized(engine.model))
        )
    assert (ours - theirs).abs().mean() < share * theirs.std()
