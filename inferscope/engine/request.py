"""One request, from the queue to its last token.

All of its life is told by two numbers: how many `tokens` it has (prompt and output together) and
how many of them are `computed`. What lies between is work to do, and nothing else distinguishes a
prompt, a chunk of one, a prefix hit, a resumption and a decode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import msgspec

from inferscope.engine.kv import ROOT
from inferscope.errors import BadInput, InferScopeError
from inferscope.records import RequestIndex

Finish: TypeAlias = Literal[
    "stop", "length", "client_cancel", "timeout", "server_abort", "rejected", "error", "shed"
]


GREEDY_BELOW = 1e-5
"""Below it the softmax of logits divided by the temperature is one-hot in float32, or NaN."""


class QueueFull(InferScopeError):
    """The waiting queue holds `max_waiting` requests; try again later."""


class BadRequest(BadInput):
    """A prompt or a sampling value that can never be served by this engine."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How to choose the next token, and when to stop.

    Attributes:
        max_tokens: Most output tokens; the model's own limit may end it sooner.
        min_tokens: Stop tokens cannot be chosen before so many.
        temperature: 0 chooses the likeliest token, and so does anything below `GREEDY_BELOW`.
        top_k: Choose among so many likeliest tokens; 0 for all.
        top_p: Choose among the likeliest tokens that hold this share of the probability.
        seed: Makes sampling repeatable, whatever else runs; None draws on the engine's seed.
        stop_token_ids: Tokens that end the output, beside the model's own.
        ignore_eos: Do not stop at the model's own end tokens.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        for name, is_fine, allowed in (
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("min_tokens", 0 <= self.min_tokens <= self.max_tokens, "0 to max_tokens"),
            ("temperature", 0.0 <= self.temperature < float("inf"), "0 or more"),
            ("top_k", self.top_k >= 0, "0 or more"),
            ("top_p", 0.0 < self.top_p <= 1.0, "above 0, at most 1"),
        ):
            if not is_fine:
                raise BadRequest(f"{name} is {getattr(self, name)}. Give {allowed}.")

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is chosen."""
        return self.temperature < GREEDY_BELOW


def check_stop_ids(sampling: Sampling, *, vocab: int) -> None:
    """Refuse stop tokens that the model does not have.

    Raises:
        BadRequest: an id is outside the vocabulary.
    """
    for token in sampling.stop_token_ids:
        if not 0 <= token < vocab:
            raise BadRequest(
                f"stop_token_ids holds {token}; this model has 0 to {vocab - 1}. Leave it out."
            )


def check_prompt(prompt: Sequence[int], *, max_model_tokens: int, vocab: int) -> None:
    """Refuse a prompt that this engine can never serve.

    Raises:
        BadRequest: it is empty, too long, or holds an id outside the vocabulary.
    """
    if not prompt:
        raise BadRequest("the prompt is empty. Give at least one token.")
    if len(prompt) >= max_model_tokens:
        raise BadRequest(
            f"the prompt has {len(prompt)} tokens, and prompt and output together may have "
            f"{max_model_tokens}. Shorten it, or raise max_model_tokens or num_blocks."
        )
    if min(prompt) < 0 or max(prompt) >= vocab:
        raise BadRequest(
            f"the prompt holds the token ids {min(prompt)} to {max(prompt)}; this model has "
            f"0 to {vocab - 1}. Encode it with this model's tokenizer."
        )


class Submission(msgspec.Struct, frozen=True, gc=False):
    """A request as a front end hands it in, before the engine's loop has seen it."""

    request_id: str
    prompt: list[int]
    sampling: Sampling
    external_id: str | None
    parent: str
    arrived_ns: int


@dataclass(eq=False, slots=True)
class Request:
    """A request that the engine's loop knows.

    Attributes:
        index: Its name in the probe's records.
        tokens: Prompt and output so far.
        num_prompt: How many of the tokens are the prompt.
        max_tokens: Most output tokens, the model's limit applied.
        stop_ids: Tokens that end it.
        seed: Of its random numbers.
        computed: Tokens whose keys and values are in its blocks.
        ever_computed: The most that `computed` has been; below it, work is repeated.
        cached_tokens: Tokens it never had to compute, being found in the prefix cache.
        recomputed_tokens: Tokens it computed again after preemptions.
        blocks: KV blocks in the order of the tokens.
        chain: Of its last published block; see `kv.py`.
        num_published: Blocks that are published, from the first on.
        seat: Its row in the runner's tables while it runs, else -1.
        has_run: It has left the queue at least once.
    """

    index: RequestIndex
    request_id: str
    tokens: list[int]
    num_prompt: int
    max_tokens: int
    sampling: Sampling
    stop_ids: frozenset[int]
    seed: int
    computed: int = 0
    ever_computed: int = 0
    cached_tokens: int = 0
    recomputed_tokens: int = 0
    blocks: list[int] = field(default_factory=list)
    chain: int = ROOT
    num_published: int = 0
    seat: int = -1
    has_run: bool = False

    @property
    def todo(self) -> int:
        """Tokens that are known and not computed; drafted tokens will count here too."""
        return len(self.tokens) - self.computed

    @property
    def num_output(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.num_prompt

    def finish_after(self, token: int) -> Finish | None:
        """Say whether `token`, just appended, was the last."""
        if token in self.stop_ids and self.num_output >= self.sampling.min_tokens:
            return "stop"
        return "length" if self.num_output >= self.max_tokens else None
