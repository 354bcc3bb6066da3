from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from inferscope.engine.config import EngineOptions, Llama3Rope, read_checkpoint_config
from inferscope.errors import BadInput

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}


def write(folder: Path, **changes: Any) -> Path:
    (folder / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    return folder


def test_llama_config_is_read(tmp_path: Path) -> None:
    config = read_checkpoint_config(write(tmp_path))
    assert (config.num_layers, config.hidden, config.ffn, config.vocab) == (2, 64, 128, 512)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 16)
    assert (config.eos_token_ids, config.dtype, config.is_tied) == ((2,), "bfloat16", False)


def test_generation_config_adds_end_tokens(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    assert read_checkpoint_config(write(tmp_path)).eos_token_ids == (2, 7)


@pytest.mark.parametrize(
    ("changes", "theta", "is_scaled"),
    [
        ({"rope_theta": 5e5}, 5e5, False),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, 5e5, False),
        ({"rope_theta": 5e5, "rope_scaling": SCALING}, 5e5, True),
        ({"rope_parameters": {**SCALING, "rope_theta": 5e5}}, 5e5, True),
        ({"rope_scaling": None}, 1e4, False),
    ],
)
def test_rope_is_read_from_old_and_new_keys(
    tmp_path: Path, changes: dict[str, Any], theta: float, is_scaled: bool
) -> None:
    config = read_checkpoint_config(write(tmp_path, **changes))
    assert config.rope_theta == theta
    scaling = Llama3Rope(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_positions=256
    )
    assert config.rope_scaling == (scaling if is_scaled else None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
        ({"architectures": None}, "no architecture"),
        ({"rope_scaling": {"type": "longrope", "factor": 4.0}}, "longrope"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "LinearRope"),
        ({"rope_scaling": {"type": "linear"}}, "lacks 'factor'"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "beta_fast": 0.5}}, "YarnRope"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}, "rope_theta": 1.0}, "YarnRope"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope scaling"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["sliding_attention"]}, "layer_types"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"mlp_only_layers": [0]}, "mlp_only_layers"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step"),
        ({"num_key_value_heads": 3}, "key/value heads"),
        ({"num_hidden_layers": 0}, "num_layers = 0"),
        ({"num_hidden_layers": 10**6}, "num_layers = 1000000"),
        ({"max_position_embeddings": 10**12}, "max_positions = 1000000000000"),
        ({"rms_norm_eps": float("nan")}, "norm_eps"),
        ({"rms_norm_eps": -1e-6}, "norm_eps"),
        ({"rope_theta": -1.0}, "rope_theta"),
        ({"rope_theta": float("inf")}, "rope_theta"),
        ({"rope_scaling": {**SCALING, "factor": 0}}, "factor=0"),
        ({"rope_scaling": {**SCALING, "high_freq_factor": 1.0}}, "high_freq_factor=1.0"),
        ({"num_attention_heads": 0}, "cannot read"),
        ({"hidden_size": "wide"}, "cannot read"),
        ({"eos_token_id": "end"}, "cannot read"),
        ({"rope_scaling": [8]}, "cannot read"),
    ],
)
def test_unsupported_feature_is_rejected_by_name(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadInput, match=message):
        read_checkpoint_config(write(tmp_path, **changes))


@pytest.mark.parametrize("stops", [-1, [2, 512, 99_999_999]])
def test_end_tokens_outside_the_vocabulary_are_dropped(tmp_path: Path, stops: Any) -> None:
    config = read_checkpoint_config(write(tmp_path, eos_token_id=stops))
    assert config.eos_token_ids == ((2,) if isinstance(stops, list) else ())


def test_end_of_thinking_is_the_tokenizer_s_token(tmp_path: Path) -> None:
    assert read_checkpoint_config(write(tmp_path)).end_of_thinking is None
    tokens = [{"id": 9, "content": "<think>", "special": False}, {"id": 11, "content": "</think>"}]
    tokenizer = {"added_tokens": tokens, "model": {"vocab": {"a": 0}}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert read_checkpoint_config(write(tmp_path)).end_of_thinking == 11
    (tmp_path / "tokenizer.json").write_text("{")
    assert read_checkpoint_config(write(tmp_path)).end_of_thinking is None


def test_folder_without_config_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"no config\.json"):
        read_checkpoint_config(tmp_path)


def test_broken_config_is_reported(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(BadInput, match="cannot read"):
        read_checkpoint_config(tmp_path)


def test_missing_size_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({key: value for key, value in LLAMA.items() if key != "vocab_size"})
    )
    with pytest.raises(BadInput, match="lacks 'vocab_size'"):
        read_checkpoint_config(tmp_path)


def test_unknown_quantization_error_lists_the_known_ones() -> None:
    with pytest.raises(BadInput, match=r"'int3' is unknown\. Use int8, int4, fp8"):
        EngineOptions(quantization="int3")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options", [{"token_budget": 0}, {"num_blocks": 0}, {"dtype": "int3"}, {"max_running": -1}]
)
def test_impossible_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match=next(iter(options))):
        EngineOptions(**options)
