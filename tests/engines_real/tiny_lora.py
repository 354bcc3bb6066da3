"""A random LoRA adapter for the tiny checkpoint, as PEFT writes one, with its metadata."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from tests.engines_real.folded import Folded

_RANK = 8
_TARGETS = ("q_proj", "v_proj")


def write_adapter(folder: Path, checkpoint: Path, *, seed: int) -> Path:
    """Write an adapter of a checkpoint; return its folder."""
    config = json.loads((checkpoint / "config.json").read_text())
    hidden = config["hidden_size"]
    head = hidden // config["num_attention_heads"]
    rows = {"q_proj": hidden, "v_proj": head * config["num_key_value_heads"]}
    rng = np.random.default_rng(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for target in _TARGETS:
            name = f"base_model.model.model.layers.{layer}.self_attn.{target}"
            for part, shape in (("A", (_RANK, hidden)), ("B", (rows[target], _RANK))):
                weights = rng.normal(0, 0.2, shape).astype("<f4")
                tensors[f"{name}.lora_{part}.weight"] = weights
    folder.mkdir(parents=True)
    _write(folder / "adapter_model.safetensors", tensors)
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(checkpoint),
        "r": _RANK,
        "lora_alpha": 2 * _RANK,
        "lora_dropout": 0.0,
        "target_modules": list(_TARGETS),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def check_adapters(folded: Folded, asked: Mapping[str, str]) -> None:
    """Hold what was folded against the adapter that each client asked for.

    Args:
        folded: the fold of the server's rings.
        asked: by the client's name of a request, its adapter; empty for the base model.
    """
    requests = {each.external_id: each for each in folded.requests}
    assert {name: requests[name].adapter for name in asked} == dict(asked)
    for name, adapter in asked.items():
        assert folded.root(name).get("inferscope.request.adapter") == (adapter or None)
    tokens, seconds = "inferscope_adapter_tokens_total", "inferscope_adapter_gpu_seconds_total"
    everyone = sum(each.output_tokens for each in folded.requests)
    assert folded.page.total(tokens, kind="output") == everyone
    for adapter in filter(None, asked.values()):  # of its own from the third time on
        mine = sum(each.output_tokens for each in folded.requests if each.adapter == adapter)
        assert 0 < folded.page.one(tokens, adapter=adapter, kind="output") < mine
        assert folded.page.one(seconds, adapter=adapter, phase="prefill") > 0
        assert folded.page.one(seconds, adapter=adapter, phase="decode") > 0


def _write(path: Path, tensors: dict[str, np.ndarray]) -> None:  # type: ignore[type-arg]
    """Write tensors as safetensors: the header's length, the header, the bytes."""
    header: dict[str, object] = {}
    at = 0
    for name, tensor in tensors.items():
        offsets = [at, at + tensor.nbytes]
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": offsets}
        at += tensor.nbytes
    encoded = json.dumps(header).encode()
    with path.open("wb") as out:
        out.write(struct.pack("<Q", len(encoded)) + encoded)
        for tensor in tensors.values():
            out.write(tensor.tobytes())
