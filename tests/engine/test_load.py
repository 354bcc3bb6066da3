from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from inferscope.engine import EngineOptions, Sampling, load_engine, load_model, load_tokenizer
from inferscope.engine.devices import has_fast_products
from inferscope.engine.tokenizer import ByteTokenizer
from inferscope.errors import BadInput
from inferscope.probe import EngineInfo, Probe


def test_random_engine_generates_the_same_twice() -> None:
    outputs = [
        load_engine("random:tiny", EngineOptions(dtype="float32", seed=3)).generate(
            [[1, 2, 3]], Sampling(max_tokens=5)
        )
        for _ in range(2)
    ]
    assert outputs[0] == outputs[1]
    assert len(outputs[0][0]) == 5


def test_probe_is_opened_with_the_engine_described() -> None:
    seen: list[EngineInfo] = []

    def open_probe(info: EngineInfo) -> Probe:
        seen.append(info)
        return Probe.disabled()

    load_engine(
        "random:tiny", EngineOptions(num_blocks=10, dtype="bfloat16"), open_probe=open_probe
    )
    (info,) = seen
    assert (info.engine, info.model, info.num_blocks) == ("inferscope", "random:tiny", 10)
    assert info.shape is not None
    assert (info.shape.num_layers, info.shape.weight_bits, info.shape.tied) == (2, 16, True)


def test_auto_is_a_16_bit_dtype_only_where_its_products_are_fast() -> None:
    def dtype_of(**options: Any) -> torch.dtype:
        return load_model("random:tiny", EngineOptions(device="cpu", **options)).dtype

    is_fast = has_fast_products(torch.device("cpu"), torch.bfloat16)
    assert dtype_of() == (torch.bfloat16 if is_fast else torch.float32)
    assert dtype_of(quantization="int8") == dtype_of(dtype="bfloat16") == torch.bfloat16


@pytest.mark.parametrize("name", ["no/such/folder", "gpt-17"])
def test_unknown_model_is_rejected(name: str) -> None:
    with pytest.raises(BadInput):
        load_engine(name)


def test_unknown_shape_error_lists_the_known_shapes() -> None:
    with pytest.raises(BadInput, match="llama-8b"):
        load_engine("random:gpt-9")


def test_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="not a checkpoint"):
        load_engine(str(tmp_path))


@pytest.mark.parametrize("device", ["toaster", "cuda:99"])
def test_missing_device_is_rejected(device: str) -> None:
    with pytest.raises(BadInput, match=device):
        load_engine("random:tiny", EngineOptions(device=device))


@pytest.mark.thorough
@pytest.mark.parametrize("in_worker", [False, True])
def test_end_of_thinking_outside_the_vocabulary_is_refused(in_worker: bool) -> None:
    options = EngineOptions(end_of_thinking=512, num_blocks=8)
    with pytest.raises(
        BadInput, match="end_of_thinking is 512; this model has the tokens 0 to 511"
    ):
        load_engine("random:tiny", options, in_worker=in_worker)


def test_small_vocabulary_uses_the_byte_tokenizer() -> None:
    assert isinstance(load_tokenizer("random:tiny"), ByteTokenizer)


def test_builtin_model_writes_python() -> None:
    engine, tokenizer = load_engine("builtin"), load_tokenizer("builtin")
    prompt = tokenizer.encode("class Reader:\n    def __init__(self")
    (output,) = engine.generate([prompt], Sampling(max_tokens=24))
    assert tokenizer.decode(prompt) == "class Reader:\n    def __init__(self"
    assert "self" in tokenizer.decode(output)


def test_random_model_uses_the_builtin_tokenizer() -> None:
    borrowed = load_tokenizer("random:llama-8b")
    assert borrowed.num_tokens == load_tokenizer("builtin").num_tokens == 1024
