from __future__ import annotations

import json
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
    assert torch.equal(sharded.layers[1].gate_up, single.layers[1].gate_up)


def copy_without(llama: Checkpoint, folder: Path, name: str) -> Path:
    (folder / "config.json").write_text((llama.folder / "config.json").read_text())
    tensors = load_file(llama.folder / "model.safetensors")
    tensors.pop(name, None)
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_missing_tensor_is_named(llama: Checkpoint, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    folder = copy_without(llama, tmp_path, name)
    with pytest.raises(BadInput, match=name):
        load_weights(folder, read_checkpoint_config(folder), dtype=torch.float32, device=CPU)


def test_weights_of_another_model_are_refused(llama: Checkpoint, tmp_path: Path) -> None:
    folder = copy_without(llama, tmp_path, "")
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "vocab_size": 999}))
    with pytest.raises(BadInput, match="another model"):
        load_weights(folder, read_checkpoint_config(folder), dtype=torch.float32, device=CPU)


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
    assert torch.equal(full.layers[1].down.bfloat16(), half.layers[1].down)
