"""A model's shape, for the cost model, read from its Hugging Face configuration object.

Only architectures whose layers are what `cost.shape` counts are known: grouped-query attention,
with a window or without, and gated feed-forwards, dense or in a mixture of experts that is the same
in every layer. Of any other (latent or linear attention, layers unlike each other) the shape is
None, and its steps are attributed by time only: FLOPs that are wrong are worse than none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inferscope.records import Shape

_DENSE = frozenset(
    (
        "llama",
        "mistral",
        "ministral",
        "qwen2",
        "qwen3",
        "gemma",
        "gemma2",
        "gemma3_text",
        "phi3",
        "granite",
        "olmo2",
        "smollm3",
        "stablelm",
        "internlm3",
        "seed_oss",
    )
)
_EXPERTS = frozenset(("mixtral", "qwen2_moe", "qwen3_moe", "olmoe"))
_GATED = frozenset(("qwen2_moe",))
"""Architectures whose shared experts have a gate of their own in the router."""
_ALTERNATING = frozenset(("gemma2", "gemma3_text"))
"""Architectures that alternate layers with and without a window. `layer_types` names the layers;
older versions lack it."""
_BITS_BY_DTYPE = {
    "float32": 32,
    "float16": 16,
    "half": 16,
    "bfloat16": 16,
    "float8_e4m3fn": 8,
    "float8_e5m2": 8,
    "fp8": 8,
    "fp8_e4m3": 8,
    "fp8_e5m2": 8,
    "int8": 8,
}


def dtype_bits(dtype: object) -> int | None:
    """Return the bits of an element, from a torch dtype or a name; None for an unknown one."""
    return _BITS_BY_DTYPE.get(str(dtype).removeprefix("torch."))


def shape_of(
    config: Any,
    *,
    activation_bits: int | None = None,
    weight_bits: int | None = None,
    kv_bits: int | None = None,
) -> Shape | None:
    """Return the shape that a configuration describes, None where it is not known for certain.

    Args:
        config: a `PretrainedConfig`, or an object with its attributes.
        activation_bits: as the engine computes; None for the configuration's dtype.
        weight_bits: as the engine stores them; None for those of the configuration's quantisation.
        kv_bits: of the cache; None for `activation_bits`.
    """
    inner = getattr(config, "get_text_config", None)
    text = inner() if callable(inner) else config
    kind = getattr(text, "model_type", "")
    if kind not in _DENSE and kind not in _EXPERTS:
        return None
    if activation_bits is None:  # reading the older name makes newer configurations complain
        dtype = getattr(text, "dtype", None) or getattr(text, "torch_dtype", None)
        activation_bits = dtype_bits(dtype)
    if activation_bits is None:
        return None
    weight_bits = weight_bits or _quantised_bits(config, activation_bits)
    if weight_bits is None:
        return None
    try:
        num_heads = int(text.num_attention_heads)
        experts = _experts(text) if kind in _EXPERTS else (int(text.intermediate_size), 0, 0, 0)
        windows = _windows(text)
        if experts is None or windows is None:
            return None
        ffn, num_experts, per_token, num_shared = experts
        return Shape(
            num_layers=int(text.num_hidden_layers),
            hidden=int(text.hidden_size),
            num_heads=num_heads,
            num_kv_heads=int(getattr(text, "num_key_value_heads", None) or num_heads),
            head_dim=int(getattr(text, "head_dim", None) or text.hidden_size // num_heads),
            ffn=ffn,
            vocab=int(text.vocab_size),
            weight_bits=weight_bits,
            kv_bits=kv_bits or activation_bits,
            activation_bits=activation_bits,
            tied=bool(getattr(text, "tie_word_embeddings", False)),
            num_experts=num_experts,
            experts_per_token=per_token,
            num_shared_experts=num_shared,
            window_tokens=windows[0],
            num_full_layers=windows[1],
            head_bits=_head_bits(config, activation_bits),
            num_shared_gates=int(kind in _GATED and num_shared > 0),
        )
    except (AttributeError, TypeError, ValueError):
        return None


def _experts(text: Any) -> tuple[int, int, int, int] | None:
    """Return an expert's width, how many there are, work for a token, and see all tokens."""
    num_experts = getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None)
    per_token = getattr(text, "num_experts_per_tok", None)
    width = getattr(text, "moe_intermediate_size", None) or text.intermediate_size
    is_alike = not getattr(text, "mlp_only_layers", None)
    is_alike &= getattr(text, "decoder_sparse_step", 1) in (None, 1)
    if not num_experts or not per_token or not is_alike:
        return None
    shared, rest = divmod(getattr(text, "shared_expert_intermediate_size", None) or 0, width)
    return None if rest else (int(width), int(num_experts), int(per_token), int(shared))


def _windows(text: Any) -> tuple[int, int] | None:
    """Return the sliding window, 0 for none, and how many layers see beyond it nevertheless.

    None where layers are of another kind, or the configuration does not say which are of which.
    """
    window, num_layers = getattr(text, "sliding_window", None), int(text.num_hidden_layers)
    kinds = getattr(text, "layer_types", None)
    if kinds:
        num_windowed = list(kinds).count("sliding_attention")
        num_full = list(kinds).count("full_attention")
        if num_windowed + num_full != num_layers:
            return None
        if not num_windowed:
            return 0, 0
        return (int(window), num_full) if window else None
    if not window or getattr(text, "use_sliding_window", True) is False:
        return 0, 0
    if text.model_type in _ALTERNATING:
        return None
    first = getattr(text, "max_window_layers", None)  # those before it see everything
    num_full = 0 if first is None else min(int(first), num_layers)
    return (int(window), num_full) if num_full < num_layers else (0, 0)


def _head_bits(config: Any, plain_bits: int) -> int:
    """Return the bits of lm_head; 0 for the weights'. Quantisers skip it unless configured."""
    given = getattr(config, "quantization_config", None)
    if given is None:
        return 0
    fields = given if isinstance(given, Mapping) else vars(given)
    return 0 if fields.get("lm_head") else plain_bits


def _quantised_bits(config: Any, plain_bits: int) -> int | None:
    """Return the bits of a weight; None where they are quantised in a way that is not known."""
    given = getattr(config, "quantization_config", None)
    if given is None:
        return plain_bits
    fields = given if isinstance(given, Mapping) else vars(given)
    method = str(fields.get("quant_method", "")).lower()
    if "fp8" in method:
        return 8
    bits = fields.get("bits")
    if isinstance(bits, int) and 0 < bits <= plain_bits:
        return bits
    if fields.get("load_in_4bit"):
        return 4
    return 8 if fields.get("load_in_8bit") else None
