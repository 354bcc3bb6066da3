from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from inferscope.engine import EngineOptions
from inferscope.engine.feed_forward import GatedWeights, MixtureWeights, feed_forward
from inferscope.engine.load import load_model
from inferscope.engine.model import Model, forward
from tests.engine.checkpoints import VOCAB, Checkpoint, randomise, save


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


def test_llama3_rope_scaling_equals_transformers(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    reference = randomise(
        LlamaForCausalLM(
            LlamaConfig(
                vocab_size=VOCAB,
                hidden_size=64,
                intermediate_size=96,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=1,
                max_position_embeddings=512,
                rope_parameters={
                    "rope_type": "llama3",
                    "rope_theta": 1000.0,
                    "factor": 4.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 128,
                },
            )
        )
    )
    reference.save_pretrained(tmp_path)
    expected = reference_logits(reference, IDS)
    assert (logits_of(tmp_path, IDS) - expected).abs().max() < 1e-4 * expected.std()


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
