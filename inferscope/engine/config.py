"""Model configuration and engine options.

`ModelConfig` holds everything the forward pass needs of an architecture, read from a Hugging Face
`config.json` or from a shape (`shapes.py`). A feature that the forward pass does not compute is
rejected here by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf, log
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import msgspec

from inferscope.errors import BadInput

Architecture: TypeAlias = Literal["llama", "qwen2", "qwen3", "qwen3_moe", "mixtral"]
DtypeName: TypeAlias = Literal["float32", "bfloat16", "float16"]
Speculation: TypeAlias = Literal["ngram", "draft"]
QuantizationName: TypeAlias = Literal["int8", "int4", "fp8"]
Role: TypeAlias = Literal["both", "prefill", "decode"]
"""Part of each request that an engine computes."""

_ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "MixtralForCausalLM": "mixtral",
}
MIXTURES: tuple[Architecture, ...] = ("qwen3_moe", "mixtral")
"""Architectures with experts."""
WITH_QKV_BIAS: tuple[Architecture, ...] = ("qwen2",)
WITH_QK_NORM: tuple[Architecture, ...] = ("qwen3", "qwen3_moe")
_MOST_BLOCK_TOKENS = 1024
_MOST_EXPERTS = 4096
_MOST_RANKS = 64
_END_OF_THINKING = "</think>"
_SIZES = ("hidden", "num_heads", "num_kv_heads", "head_dim", "ffn", "vocab", "max_positions")
_MOST = {"num_layers": 10_000, **dict.fromkeys(_SIZES, 1 << 24)}
_DTYPES: tuple[DtypeName, ...] = ("float32", "bfloat16", "float16")


class Llama3Rope(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Rotary frequency scaling of Llama 3.1 and later (`rope_type: llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int

    @property
    def is_sound(self) -> bool:
        """Return whether all factors are positive and the high frequency is above the low one."""
        low, high = self.low_freq_factor, self.high_freq_factor
        return 0 < self.factor < inf and 0 < low < high < inf and self.original_positions > 0


class LinearRope(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Division of all positions by a factor (`rope_type: linear`)."""

    factor: float

    @property
    def is_sound(self) -> bool:
        """Return whether the factor is positive."""
        return 0 < self.factor < inf


class YarnRope(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Rotary frequency scaling by parts (`rope_type: yarn`), with a factor of all rotations.

    Attributes:
        fast_rotations: Rotations over the original positions from which a frequency is kept.
        slow_rotations: Rotations up to which it is divided by `factor`.
        is_rounded: Whether these limits are rounded to whole frequencies.
        attention_factor: Factor of cosines and sines, which scales the attention's logits.
    """

    factor: float
    original_positions: int
    attention_factor: float
    fast_rotations: float = 32.0
    slow_rotations: float = 1.0
    is_rounded: bool = True

    @property
    def is_sound(self) -> bool:
        """Return whether all factors are positive and fast is faster than slow."""
        is_positive = all(0 < each < inf for each in (self.factor, self.attention_factor))
        is_ordered = 0 < self.slow_rotations < self.fast_rotations < inf
        return is_positive and is_ordered and self.original_positions > 0


RopeScaling: TypeAlias = Llama3Rope | LinearRope | YarnRope


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer with RoPE, RMSNorm, SwiGLU and grouped-query attention.

    Attributes:
        ffn: Width of the feed-forward network, or of each expert's.
        num_experts: Number of experts in each layer; 0 for one network for all tokens.
        normalizes_experts: Whether the weights of a token's experts sum to 1.
    """

    architecture: Architecture
    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    max_positions: int
    norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    has_qkv_bias: bool = False
    has_qk_norm: bool = False
    num_experts: int = 0
    experts_per_token: int = 0
    normalizes_experts: bool = True
    is_tied: bool = False
    eos_token_ids: tuple[int, ...] = ()
    end_of_thinking: int | None = None
    dtype: DtypeName = "bfloat16"

    def __post_init__(self) -> None:
        for name, most in _MOST.items():
            if not 1 <= getattr(self, name) <= most:
                raise BadInput(
                    f"cannot build a model with {name} = {getattr(self, name)}. Give 1 to {most}."
                )
        eps, theta, scaling = self.norm_eps, self.rope_theta, self.rope_scaling
        is_sound = 0 <= eps < inf and 0 < theta < inf and (scaling is None or scaling.is_sound)
        # The frequencies that yarn blends are found by the logarithm of the base.
        is_sound &= theta > 1 or not isinstance(scaling, YarnRope)
        if not is_sound:
            raise BadInput(f"norm_eps = {eps}, rope_theta = {theta}, {scaling} are not computable.")
        if self.num_heads % self.num_kv_heads:
            raise BadInput(
                f"{self.num_heads} query heads cannot share {self.num_kv_heads} key/value heads. "
                "Choose a number of key/value heads that divides the number of heads."
            )
        if (self.architecture in MIXTURES) != (self.num_experts != 0):
            raise BadInput(
                f"a {self.architecture} model cannot have {self.num_experts} experts. "
                f"Models of {' and '.join(MIXTURES)} have experts, at least one; others have none."
            )
        if not 0 <= self.experts_per_token <= self.num_experts <= _MOST_EXPERTS or (
            self.num_experts and not self.experts_per_token
        ):
            raise BadInput(
                f"{self.experts_per_token} of {self.num_experts} experts cannot be chosen for each "
                f"token. Give 1 to the number of experts, which is at most {_MOST_EXPERTS}."
            )
        if self.head_dim % 2:
            raise BadInput(
                f"a head dimension of {self.head_dim} cannot be rotated. Choose an even one."
            )

    @property
    def num_parameters(self) -> int:
        """Number of weights of the whole model; a tied embedding counts once."""
        rotated = self.num_heads + self.num_kv_heads
        qkv = (rotated + self.num_kv_heads) * self.head_dim
        ffn = 3 * self.ffn * max(1, self.num_experts) + self.num_experts
        layer = self.hidden * (qkv + self.num_heads * self.head_dim + ffn + 2)
        layer += qkv * self.has_qkv_bias + 2 * self.head_dim * self.has_qk_norm
        embeddings = self.vocab * self.hidden * (1 if self.is_tied else 2)
        return self.num_layers * layer + embeddings + self.hidden

    def kv_token_bytes(self, element_bytes: int) -> int:
        """Return the bytes of one token's keys and values over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * element_bytes


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Options of an engine.

    Attributes:
        token_budget: Maximum tokens per step; a longer prompt is computed in chunks.
        max_running: Maximum number of requests that hold KV blocks at once.
        max_waiting: Maximum number of queued requests; further ones are rejected.
        block_tokens: Tokens in one KV block, at most 1024.
        num_blocks: KV blocks in the pool; None sizes it for `max_running` full-length requests
            within the available memory (`capacity.py`).
        prefix_cache: Whether blocks of finished requests are kept for prompts with the same prefix.
        speculative: How tokens are proposed for verification; None generates one by one. "ngram"
            looks up the tokens that followed the same n-gram in the request, "draft" runs a model.
        num_speculative_tokens: Maximum proposed tokens per request and step.
        draft_model: Name of the model that proposes tokens; None takes the built-in model's own.
        cuda_graphs: Whether decode steps are CUDA graphs, on a GPU with Triton.
        dtype: Dtype of weights, activations and KV; "auto" takes the checkpoint's, or
            float32 on a CPU where that is faster.
        device: Name of a torch device; "auto" takes the first GPU, else the CPU.
        seed: Seed of random weights, and of sampled requests without their own seed.
        max_model_tokens: Maximum prompt plus output tokens; None takes the model's limit, or as
            much of it as the pool holds.
        overlap: Whether a step is launched before the one before it is committed.
        num_threads: CPU threads per operator. Use 1 next to a load generator: two spinning OpenMP
            threads beside other work took a step from 10 to 654 ms.
        role: Part of a request that the engine computes; a prefill engine shares the KV of each
            prompt with a decode engine (`disagg.py`).
        quantization: Quantisation of the layers' matrices (`quantization.py`); None for none.
        end_of_thinking: Token that ends the reasoning in an output; None takes the model's.
        tensor_parallel: Number of ranks that divide each layer (`parallel.py`).
        pipeline_parallel: Number of stages that divide the layers.
    """

    token_budget: int = 512
    max_running: int = 64
    max_waiting: int = 1024
    block_tokens: int = 16
    num_blocks: int | None = None
    prefix_cache: bool = True
    speculative: Speculation | None = None
    num_speculative_tokens: int = 4
    draft_model: str | None = None
    cuda_graphs: bool = True
    dtype: DtypeName | Literal["auto"] = "auto"
    device: str = "cpu"
    seed: int = 0
    max_model_tokens: int | None = None
    overlap: bool = False
    num_threads: int = 1
    role: Role = "both"
    quantization: QuantizationName | None = None
    end_of_thinking: int | None = None
    tensor_parallel: int = 1
    pipeline_parallel: int = 1

    @property
    def num_ranks(self) -> int:
        """Number of processes that compute each step."""
        return self.tensor_parallel * self.pipeline_parallel

    def __post_init__(self) -> None:
        for name in (
            *("tensor_parallel", "pipeline_parallel"),
            *("token_budget", "max_running", "max_waiting", "block_tokens", "num_threads"),
            "num_speculative_tokens",
        ):
            if getattr(self, name) < 1:
                raise BadInput(f"{name} is {getattr(self, name)}. Give at least 1.")
        self._check_speculation()
        if self.num_ranks > _MOST_RANKS:
            raise BadInput(
                f"tensor_parallel {self.tensor_parallel} x pipeline_parallel "
                f"{self.pipeline_parallel} are {self.num_ranks} processes. Give at most "
                f"{_MOST_RANKS} together."
            )
        if self.num_ranks > 1 and self.role != "both":
            raise BadInput(
                f"the KV of {self.num_ranks} ranks is in as many processes, which do not hand it "
                "over. Leave out the role, or tensor and pipeline parallelism."
            )
        if self.block_tokens > _MOST_BLOCK_TOKENS:
            raise BadInput(f"block_tokens is {self.block_tokens}. Give 1 to {_MOST_BLOCK_TOKENS}.")
        if not -(2**63) <= self.seed < 2**63:
            raise BadInput(f"seed is {self.seed}. Give a whole number of 64 bits.")
        for name in ("num_blocks", "max_model_tokens"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise BadInput(
                    f"{name} is {getattr(self, name)}. Give at least 1, or leave it out."
                )
        if self.dtype not in ("auto", *_DTYPES):
            raise BadInput(f"dtype {self.dtype!r} is unknown. Use auto, {', '.join(_DTYPES)}.")
        if self.quantization not in (None, *get_args(QuantizationName)):
            known = ", ".join(get_args(QuantizationName))
            raise BadInput(f"quantization {self.quantization!r} is unknown. Use {known}.")

    def _check_speculation(self) -> None:
        if self.draft_model is not None and self.speculative != "draft":
            raise BadInput(
                f"draft_model is {self.draft_model!r}, and speculative is {self.speculative}. "
                'Set it to "draft", or leave the draft model out.'
            )
        if self.speculative is None:
            return
        if self.speculative not in get_args(Speculation):
            known = ", ".join(get_args(Speculation))
            raise BadInput(f"speculative {self.speculative!r} is unknown. Use {known}.")
        if self.overlap:
            raise BadInput(
                "a draft continues known tokens, and with overlap a step is planned before the "
                "last token is known. Leave out overlap or speculative."
            )
        if self.num_speculative_tokens >= self.token_budget:
            raise BadInput(
                f"verifying {self.num_speculative_tokens} proposed tokens takes "
                f"{self.num_speculative_tokens + 1} tokens of a step, and token_budget is "
                f"{self.token_budget}. Lower num_speculative_tokens, or raise token_budget."
            )


def read_checkpoint_config(folder: Path) -> ModelConfig:
    """Read a Hugging Face model folder's `config.json`.

    Raises:
        BadInput: the folder is not a checkpoint, or needs a feature that is not computed.
    """
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadInput(
            f"{folder} is not a checkpoint: it has no config.json. Name a Hugging Face model "
            'folder, "builtin", or a shape such as "random:llama-1b".'
        ) from None
    except (OSError, ValueError) as error:
        raise BadInput(f"cannot read {path}: {error}. Download the checkpoint again.") from None
    try:
        config = _parse(raw, path)
        stops = _eos_token_ids(folder) or config.eos_token_ids
        # Some checkpoints name an end token outside the vocabulary; no output can contain it.
        return replace(
            config,
            eos_token_ids=tuple(i for i in stops if 0 <= i < config.vocab),
            end_of_thinking=_end_of_thinking(folder),
        )
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise BadInput(f"cannot read {path}: {error}. Download the checkpoint again.") from None


def _parse(raw: Mapping[str, Any], path: Path) -> ModelConfig:
    declared = raw.get("architectures") or []
    architecture = next((_ARCHITECTURES[name] for name in declared if name in _ARCHITECTURES), None)
    if architecture is None:
        known = ", ".join(_ARCHITECTURES)
        raise BadInput(f"{path} declares {declared or 'no architecture'}. Implemented: {known}.")
    for key, expected in (
        ("hidden_act", "silu"),
        ("mlp_bias", False),
        ("use_sliding_window", False),
        *((("sliding_window", None),) if architecture == "mixtral" else ()),
        ("partial_rotary_factor", 1.0),
        ("quantization_config", None),
        ("decoder_sparse_step", 1),
        ("mlp_only_layers", []),
    ):
        if raw.get(key, expected) not in (expected, None):
            _refuse(path, key, raw[key])
    if architecture not in WITH_QKV_BIAS and raw.get("attention_bias"):
        _refuse(path, "attention_bias", True)
    if set(raw.get("layer_types") or ()) - {"full_attention"}:
        _refuse(path, "layer_types", sorted(set(raw["layer_types"])))
    dtype = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    is_mixture = architecture in MIXTURES
    own_ffn = "moe_intermediate_size" if architecture == "qwen3_moe" else "intermediate_size"
    try:
        theta, scaling = _rope(raw, path)
        # transformers 5 writes num_local_experts, earlier versions num_experts.
        num_experts = int(raw.get("num_experts") or raw["num_local_experts"]) if is_mixture else 0
        heads = int(raw["num_attention_heads"])
        hidden = int(raw["hidden_size"])
        return ModelConfig(
            architecture=architecture,
            num_layers=int(raw["num_hidden_layers"]),
            hidden=hidden,
            num_heads=heads,
            num_kv_heads=int(raw.get("num_key_value_heads") or heads),
            head_dim=int(raw.get("head_dim") or hidden // heads),
            ffn=int(raw[own_ffn]),
            vocab=int(raw["vocab_size"]),
            max_positions=int(raw["max_position_embeddings"]),
            norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            rope_theta=theta,
            rope_scaling=scaling,
            has_qkv_bias=architecture in WITH_QKV_BIAS,
            has_qk_norm=architecture in WITH_QK_NORM,
            num_experts=num_experts,
            experts_per_token=int(raw["num_experts_per_tok"]) if is_mixture else 0,
            normalizes_experts=bool(raw.get("norm_topk_prob", architecture == "mixtral")),
            is_tied=bool(raw.get("tie_word_embeddings", False)),
            eos_token_ids=_token_ids(raw.get("eos_token_id")),
            dtype=dtype if dtype in _DTYPES else "float32",
        )
    except KeyError as missing:
        raise BadInput(f"{path} lacks {missing}. Download the checkpoint again.") from None


def _rope(raw: Mapping[str, Any], path: Path) -> tuple[float, RopeScaling | None]:
    # transformers 5 writes rope_parameters, which contains the base; earlier versions write
    # rope_theta and rope_scaling.
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = float(rope.get("rope_theta") or raw.get("rope_theta") or 10_000.0)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default" and not any(isinstance(value, Mapping) for value in rope.values()):
        return theta, None
    if kind == "linear":
        return theta, LinearRope(factor=float(rope["factor"]))
    if kind == "yarn":
        return theta, _yarn(rope, raw)
    if kind != "llama3":
        _refuse(path, "rope scaling", dict(rope) if kind == "default" else kind)
    return theta, Llama3Rope(
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_positions=int(rope["original_max_position_embeddings"]),
    )


def _yarn(rope: Mapping[str, Any], raw: Mapping[str, Any]) -> YarnRope:
    factor = float(rope["factor"])
    original = rope.get("original_max_position_embeddings") or raw["max_position_embeddings"]
    attention_factor = rope.get("attention_factor")
    if attention_factor is None:
        scale, whole_scale = rope.get("mscale"), rope.get("mscale_all_dim")
        if not scale or not whole_scale:
            scale, whole_scale = 1.0, 0.0
        attention_factor = _yarn_attention(factor, scale) / _yarn_attention(factor, whole_scale)
    return YarnRope(
        factor=factor,
        original_positions=int(original),
        attention_factor=float(attention_factor),
        fast_rotations=float(rope.get("beta_fast") or 32.0),
        slow_rotations=float(rope.get("beta_slow") or 1.0),
        is_rounded=bool(rope.get("truncate", True)),
    )


def _yarn_attention(factor: float, scale: float) -> float:
    """Return the attention factor of the YaRN paper (arXiv 2309.00071, equation 22)."""
    return 0.1 * float(scale) * log(factor) + 1.0 if factor > 1 else 1.0


def _refuse(path: Path, key: str, value: object) -> None:
    raise BadInput(
        f"{path} asks for {key} = {value!r}, which this engine does not compute. "
        "Use a checkpoint without it, or observe vLLM or SGLang serving this one."
    )


def _eos_token_ids(folder: Path) -> tuple[int, ...]:
    try:
        raw = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ()
    return _token_ids(raw.get("eos_token_id"))


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _AddedTokens(msgspec.Struct):
    """Part of a `tokenizer.json`, which may have 10 MB."""

    added_tokens: list[_AddedToken] = []


def _end_of_thinking(folder: Path) -> int | None:
    """Return the id of the tokenizer's `</think>`; None if it has no such token."""
    try:
        raw = (folder / "tokenizer.json").read_bytes()
        added = msgspec.json.decode(raw, type=_AddedTokens).added_tokens
    except (OSError, msgspec.MsgspecError):  # the tokenizer's own reader reports what is wrong
        return None
    return next((token.id for token in added if token.content == _END_OF_THINKING), None)


def _token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)
