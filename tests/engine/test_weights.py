from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from inferscope.engine.config import read_checkpoint_config
from inferscope.engine.shapes import parse_shape
from inferscope.engine.weights import load_weights, random_weights
from inferscope.errors import BadInput
from tests.engine.checkpoints import Checkpoint

CPU = torch.device("cpu")


def test_sharded_checkpoint_loads_like_a_single_file(llama: Checkpoint, tmp_path: Path) -> None:
    llama.reference.save_pretrained(tmp_path, max_shard_size="100KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    config = read_checkpoint_config(tmp_path)
    sharded = load_weights(tmp_path, config, dtype=torch.float32, device=CPU)
    single = load_weights(llama.folder, config, dtype=torch.float32, device=CPU)
    assert torch.equal(sharded.head, single.head)
    assert torch.equal(
        sharded.layers[1].feed_forward.gate_up, single.layers[1].feed_forward.gate_up
    )


Tensors = dict[str, torch.Tensor]
DOWN = "model.layers.1.mlp.down_proj.weight"
BIAS = "model.layers.0.self_attn.q_proj.bias"


def without(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(name)


def changed(
    name: str, change: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: change(tensors[name]).contiguous()})


def with_layer(tensors: Tensors) -> None:
    tensors.update(
        {
            name.replace("layers.1.", "layers.2."): tensor.clone()
            for name, tensor in tensors.items()
            if "layers.1." in name
        }
    )


def copied(llama: Checkpoint, folder: Path, change: Callable[[Tensors], object]) -> Path:
    (folder / "config.json").write_text((llama.folder / "config.json").read_text())
    tensors = load_file(llama.folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without(DOWN), f"tensor {DOWN} of shape (64, 96) is missing."),
        (
            changed(DOWN, torch.t),
            f"tensor {DOWN} has the shape (96, 64), which is transposed, and should have (64, 96).",
        ),
        (
            changed("lm_head.weight", lambda head: head[:100]),
            "tensor lm_head.weight has the shape (100, 64), and should have (384, 64).",
        ),
        (
            changed("model.norm.weight", lambda norm: norm[None]),
            "tensor model.norm.weight has the shape (1, 64), and should have (64,).",
        ),
        (with_layer, "tensor model.layers.2.input_layernorm.weight is not part of that model (8 "),
        (
            lambda tensors: tensors.update({BIAS: torch.zeros(64)}),
            f"tensor {BIAS} is not part of that model.",
        ),
        (
            lambda tensors: tensors.update({"extra": torch.zeros(1)}),
            "tensor extra is not part of that model.",
        ),
        (
            changed(DOWN, lambda down: down.to(torch.int8)),
            f"tensor {DOWN} is stored as I8, and only F64, F32, F16, BF16 are read.",
        ),
    ],
)
def test_mismatched_tensors_are_named(
    llama: Checkpoint, tmp_path: Path, change: Callable[[Tensors], object], message: str
) -> None:
    folder = copied(llama, tmp_path, change)
    config = read_checkpoint_config(folder)
    with pytest.raises(BadInput) as caught:
        load_weights(folder, config, dtype=torch.float32, device=CPU)
    assert message in str(caught.value)
    assert "Download both" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_infinite_weights_are_rejected(
    llama: Checkpoint, tmp_path: Path, value: float
) -> None:
    folder = copied(llama, tmp_path, lambda tensors: tensors[DOWN][3].fill_(value))
    config = read_checkpoint_config(folder)
    with pytest.raises(BadInput, match=re.escape(DOWN)):
        load_weights(folder, config, dtype=torch.bfloat16, device=CPU)


def test_large_finite_weights_are_accepted(llama: Checkpoint, tmp_path: Path) -> None:
    folder = copied(llama, tmp_path, lambda tensors: tensors[DOWN].fill_(1e38))
    config = read_checkpoint_config(folder)
    loaded = load_weights(folder, config, dtype=torch.float32, device=CPU)
    assert any(layer.feed_forward.down.eq(1e38).all() for layer in loaded.layers)


@pytest.mark.parametrize("num_layers", [1, 3])
def test_another_number_of_layers_is_refused(
    llama: Checkpoint, tmp_path: Path, num_layers: int
) -> None:
    folder = copied(llama, tmp_path, lambda tensors: None)
    config = replace(read_checkpoint_config(folder), num_layers=num_layers)
    message = "layers.1.input_layernorm.weight is not part" if num_layers == 1 else (
        "layers.2.input_layernorm.weight of shape (64,) is missing"
    )  # fmt: skip
    with pytest.raises(BadInput, match=re.escape(message)):
        load_weights(folder, config, dtype=torch.float32, device=CPU)


def test_weights_of_another_model_are_refused(llama: Checkpoint, tmp_path: Path) -> None:
    folder = copied(llama, tmp_path, lambda tensors: None)
    config = replace(read_checkpoint_config(folder), vocab=999)
    with pytest.raises(BadInput, match="another model"):
        load_weights(folder, config, dtype=torch.float32, device=CPU)


def test_computed_tensors_of_older_checkpoints_are_ignored(
    llama: Checkpoint, tmp_path: Path
) -> None:
    def add(tensors: Tensors) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)

    folder = copied(llama, tmp_path, add)
    tied = replace(read_checkpoint_config(folder), is_tied=True)
    weights = load_weights(folder, tied, dtype=torch.float32, device=CPU)
    assert weights.head is weights.embedding


def test_shard_without_the_tensor_that_its_index_names_is_refused(
    llama: Checkpoint, tmp_path: Path
) -> None:
    llama.reference.save_pretrained(tmp_path, max_shard_size="100KB")
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    other = next(file for file in index["weight_map"].values() if file != index["weight_map"][DOWN])
    index["weight_map"][DOWN] = other
    path.write_text(json.dumps(index))
    with pytest.raises(BadInput, match=f"{DOWN} of shape .* is missing"):
        load_weights(tmp_path, read_checkpoint_config(tmp_path), dtype=torch.float32, device=CPU)
    path.write_text('{"weight_map": [1]}')
    with pytest.raises(BadInput, match="cannot read"):
        load_weights(tmp_path, read_checkpoint_config(tmp_path), dtype=torch.float32, device=CPU)


def test_folder_without_safetensors_is_refused(llama: Checkpoint, tmp_path: Path) -> None:
    config = read_checkpoint_config(llama.folder)
    with pytest.raises(BadInput, match=r"no model\.safetensors"):
        load_weights(tmp_path, config, dtype=torch.float32, device=CPU)


def test_damaged_safetensors_are_refused(llama: Checkpoint, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    config = read_checkpoint_config(llama.folder)
    with pytest.raises(BadInput, match="cannot read"):
        load_weights(tmp_path, config, dtype=torch.float32, device=CPU)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_random_weights_repeat_with_their_seed(architecture: str) -> None:
    config = parse_shape(f"tiny,arch={architecture}")
    first, again, other = (
        random_weights(config, seed=seed, dtype=torch.float32, device=CPU) for seed in (1, 1, 2)
    )
    assert torch.equal(first.layers[0].qkv, again.layers[0].qkv)
    assert not torch.equal(first.layers[0].qkv, other.layers[0].qkv)


def test_random_weights_are_the_same_numbers_in_every_dtype() -> None:
    config = parse_shape("tiny")
    full = random_weights(config, seed=0, dtype=torch.float32, device=CPU)
    half = random_weights(config, seed=0, dtype=torch.bfloat16, device=CPU)
    assert torch.equal(
        full.layers[1].feed_forward.down.bfloat16(), half.layers[1].feed_forward.down
    )
