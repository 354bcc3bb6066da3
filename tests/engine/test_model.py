from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from inferscope.engine import EngineOptions, ModelConfig
from inferscope.engine.config import read_checkpoint_config
from inferscope.engine.feed_forward import GatedWeights, MixtureWeights, feed_forward
from inferscope.engine.load import load_model
from inferscope.engine.model import Model, forward
from inferscope.engine.remote import encode
from tests.engine.checkpoints import VOCAB, Checkpoint, save


def attend_densely(model: Model) -> Any:
    """Return dense attention over one whole prompt."""

    def attend(
        _layer_idx: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        attended = torch.nn.functional.scaled_dot_product_attention(
            *(tensor.transpose(0, 1) for tensor in (query, key, value)),
            is_causal=True,
            enable_gqa=True,
        )
        return attended.transpose(0, 1)

    return attend


@torch.inference_mode()
def logits_of(folder: Path, ids: torch.Tensor, dtype: Any = "float32") -> torch.Tensor:
    model = load_model(str(folder), EngineOptions(dtype=dtype))
    positions = torch.arange(len(ids))
    return forward(
        model, ids, positions=positions, attend=attend_densely(model), rows=positions
    ).float()


@torch.inference_mode()
def reference_logits(reference: Any, ids: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = reference(ids[None]).logits[0]
    return logits


IDS = torch.randint(0, VOCAB, (400,), generator=torch.Generator().manual_seed(1))


def test_logits_equal_transformers(checkpoint: Checkpoint) -> None:
    expected = reference_logits(checkpoint.reference, IDS)
    actual = logits_of(checkpoint.folder, IDS)
    assert (actual - expected).abs().max() < 1e-4 * expected.std()


def test_bf16_logits_stay_near_fp32(checkpoint: Checkpoint) -> None:
    expected = reference_logits(checkpoint.reference, IDS)
    actual = logits_of(checkpoint.folder, IDS, dtype="bfloat16")
    assert (actual - expected).abs().mean() < 0.05 * expected.std()


YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
ROPES: dict[str, dict[str, Any]] = {
    "llama3": {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "linear": {"rope_type": "linear", "factor": 3.0},
    "yarn": YARN,
    "yarn, not rounded": {**YARN, "truncate": False, "beta_fast": 8.0, "beta_slow": 2.0},
    "yarn, attention factor": {**YARN, "attention_factor": 0.9},
    "yarn, scales": {**YARN, "mscale": 1.2, "mscale_all_dim": 0.7},
    "yarn, one scale": {**YARN, "mscale": 1.2},
    "yarn, all slow": {**YARN, "original_max_position_embeddings": 4},
}


@pytest.mark.parametrize("name", ROPES)
def test_rope_scaling_equals_transformers(tmp_path: Path, name: str) -> None:
    rope = {"rope_theta": 1000.0, **ROPES[name]}
    shape = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    checkpoint = save("llama", tmp_path, rope_parameters=rope, **shape)
    expected = reference_logits(checkpoint.reference, IDS)
    assert (logits_of(tmp_path, IDS) - expected).abs().max() < 1e-4 * expected.std()
    plain = save("llama", tmp_path / "plain", rope_parameters={"rope_theta": 1000.0}, **shape)
    difference = reference_logits(plain.reference, IDS) - expected
    assert difference.abs().max() > 1e-2 * expected.std(), "the scaling changes nothing"


@pytest.mark.parametrize("name", ROPES)
def test_a_scaled_model_s_description_survives_the_worker_s_pipe(tmp_path: Path, name: str) -> None:
    save("llama", tmp_path, rope_parameters={"rope_theta": 1000.0, **ROPES[name]})
    config = read_checkpoint_config(tmp_path)
    assert config.rope_scaling is not None
    assert msgspec.msgpack.decode(encode(config), type=ModelConfig) == config


def test_unnormalised_expert_weights_equal_transformers(tmp_path: Path) -> None:
    checkpoint = save("qwen3_moe", tmp_path, norm_topk_prob=False, num_experts_per_tok=3)
    expected = reference_logits(checkpoint.reference, IDS)
    assert (logits_of(tmp_path, IDS) - expected).abs().max() < 1e-4 * expected.std()


def test_a_mixture_computes_only_the_experts_that_its_tokens_chose() -> None:
    model = load_model("random:tiny-moe", EngineOptions(dtype="float32"))
    block = model.weights.layers[0].feed_forward
    assert isinstance(block, MixtureWeights)
    inputs = torch.randn(1, model.config.hidden, generator=torch.Generator().manual_seed(3))
    chosen = set((inputs @ block.router.T).topk(2).indices[0].tolist())
    others_nan = tuple(
        each if idx in chosen else GatedWeights(each.gate_up * torch.nan, each.down)
        for idx, each in enumerate(block.experts)
    )
    expected = feed_forward(inputs, block, model.config)
    actual = feed_forward(inputs, MixtureWeights(block.router, others_nan), model.config)
    assert torch.equal(actual, expected)
    assert expected.isfinite().all()


@pytest.mark.parametrize("rows", [[0], [399, 3]])
def test_only_the_wanted_rows_are_computed(llama: Checkpoint, rows: list[int]) -> None:
    model = load_model(str(llama.folder), EngineOptions(dtype="float32"))
    with torch.inference_mode():
        logits = forward(
            model,
            IDS,
            positions=torch.arange(len(IDS)),
            attend=attend_densely(model),
            rows=torch.tensor(rows),
        )
    expected = reference_logits(llama.reference, IDS)[rows]
    assert torch.allclose(logits, expected, atol=1e-4 * float(expected.std()))
