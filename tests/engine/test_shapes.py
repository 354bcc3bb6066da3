from __future__ import annotations

import pytest

from inferscope.engine.shapes import SHAPES, parse_shape
from inferscope.errors import BadInput


@pytest.mark.parametrize(
    ("name", "num_parameters"),
    [
        ("llama-8b", 8_030_261_248),
        ("llama-1b", 1_235_814_400),
        ("qwen2-0.5b", 494_032_768),
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-8b", 8_190_735_360),
        ("qwen3-30b-a3b", 30_532_122_624),
    ],
)
def test_public_shape_has_the_published_number_of_parameters(
    name: str, num_parameters: int
) -> None:
    assert SHAPES[name].num_parameters == num_parameters


def test_parameters_make_a_shape() -> None:
    shape = parse_shape("hidden=256,layers=4,heads=4,kv_heads=2,ffn=512,vocab=1024")
    assert (shape.hidden, shape.num_layers, shape.num_heads, shape.num_kv_heads) == (256, 4, 4, 2)
    assert (shape.ffn, shape.vocab, shape.head_dim) == (512, 1024, 64)


def test_parameters_change_a_named_shape() -> None:
    shape = parse_shape("qwen3-0.6b,layers=2")
    assert (shape.num_layers, shape.hidden, shape.head_dim) == (2, 1024, 128)
    assert shape.has_qk_norm


def test_architecture_can_be_chosen() -> None:
    assert parse_shape("tiny,arch=qwen2").has_qkv_bias


@pytest.mark.parametrize(
    "text",
    [
        "",
        "llama-9b",
        "tiny,depth=2",
        "hidden=many",
        "layers=0",
        "arch=gpt",
        "kv_heads=3",
        "vocab=9",
        "experts=4,experts_per_token=2",
        "arch=qwen3_moe",
        "tiny-moe,arch=qwen3",
        "tiny-moe,experts_per_token=9",
        "tiny-moe,experts=10000",
    ],
)
def test_invalid_shape_error_names_the_value(text: str) -> None:
    with pytest.raises(BadInput):
        parse_shape(text)
