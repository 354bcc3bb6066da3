"""A Hugging Face configuration becomes the shape the cost model counts, or honestly none."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from inferscope.adapters.shapes import dtype_bits, shape_of
from inferscope.records import Shape

QWEN2 = {
    "model_type": "qwen2",
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 512,
    "vocab_size": 4096,
    "dtype": "torch.bfloat16",
    "tie_word_embeddings": True,
    "sliding_window": None,
}


def config(**changes: object) -> SimpleNamespace:
    return SimpleNamespace(**{**QWEN2, **changes})


def test_a_dense_model_has_the_shape_of_its_configuration() -> None:
    assert shape_of(config()) == Shape(4, 256, 4, 2, 64, 512, 4096, 16, 16, 16, tied=True)


def test_transformers_own_configuration_gives_the_same() -> None:
    transformers = pytest.importorskip("transformers")
    fields = {key: value for key, value in QWEN2.items() if key not in ("model_type", "dtype")}
    real = transformers.Qwen2Config(**fields)
    assert shape_of(real, activation_bits=16) == shape_of(config())


def test_the_engines_word_on_dtypes_comes_before_the_checkpoints() -> None:
    shape = shape_of(config(), activation_bits=32, weight_bits=8, kv_bits=8)
    assert shape is not None
    assert (shape.weight_bits, shape.kv_bits, shape.activation_bits) == (8, 8, 32)


@pytest.mark.parametrize(
    ("quantisation", "bits"),
    [({"quant_method": "awq", "bits": 4}, 4), ({"quant_method": "fp8"}, 8), ({"odd": 1}, None)],
)
def test_weights_have_the_bits_of_their_quantisation(
    quantisation: dict[str, object], bits: int | None
) -> None:
    shape = shape_of(config(quantization_config=quantisation))
    assert (shape and shape.weight_bits) == bits


def test_experts_are_counted_with_those_that_see_every_token() -> None:
    moe = {"num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408}
    shape = shape_of(config(model_type="qwen2_moe", shared_expert_intermediate_size=5632, **moe))
    assert shape is not None
    assert (shape.ffn, shape.num_experts, shape.experts_per_token) == (1408, 60, 4)
    assert (shape.num_shared_experts, shape.num_shared_gates) == (4, 1)


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "gpt2"},
        {"model_type": "deepseek_v3"},
        {"model_type": "qwen3_next"},
        {"model_type": "gemma2", "sliding_window": 512},
        {"sliding_window": 512, "layer_types": ["sliding_attention", "linear_attention"] * 2},
        {"sliding_window": 512, "layer_types": ["sliding_attention"]},
        {"layer_types": ["sliding_attention"] * 4},
        {
            "model_type": "qwen3_moe",
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "mlp_only_layers": [0],
        },
        {"dtype": "float7"},
        {"hidden_size": None},
    ],
)
def test_what_is_not_known_for_certain_has_no_shape(changes: dict[str, object]) -> None:
    assert shape_of(config(**changes)) is None


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"layer_types": ["sliding_attention"] * 4}, (512, 0)),
        ({"layer_types": ["sliding_attention", "full_attention"] * 2}, (512, 2)),
        ({"layer_types": ["full_attention"] * 4}, (0, 0)),
        ({"model_type": "mistral"}, (512, 0)),
        ({"use_sliding_window": False}, (0, 0)),
        ({"use_sliding_window": True, "max_window_layers": 3}, (512, 3)),
        ({"use_sliding_window": True, "max_window_layers": 28}, (0, 0)),
    ],
)
def test_a_window_counts_in_the_layers_that_have_it(
    changes: dict[str, object], windows: tuple[int, int]
) -> None:
    shape = shape_of(config(sliding_window=512, **changes))
    assert shape is not None
    assert (shape.window_tokens, shape.num_full_layers) == windows


REAL = {"Qwen2Config": (0, 0), "MistralConfig": (4096, 0), "Gemma2Config": (4096, 13)}


@pytest.mark.parametrize("name", REAL)
def test_transformers_own_configurations_state_which_layers_have_windows(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    shape = shape_of(getattr(transformers, name)(), activation_bits=16)
    assert shape is not None
    assert (shape.window_tokens, shape.num_full_layers) == REAL[name]


def test_quantisers_skip_the_head_unless_configured() -> None:
    awq = {"quant_method": "awq", "bits": 4}
    plain, configured = (
        shape_of(config(quantization_config=given)) for given in (awq, awq | {"lm_head": True})
    )
    assert plain is not None
    assert configured is not None
    assert (plain.head_bits, configured.head_bits) == (16, 0)


def test_a_dtype_is_read_from_torch_and_from_a_name() -> None:
    torch = pytest.importorskip("torch")
    assert dtype_bits(torch.bfloat16) == dtype_bits("bfloat16") == 16
    assert dtype_bits("auto") is None
