"""A request from the queue to its last token.

Three numbers define its state: the number of `tokens` (prompt plus output), the number of tokens in
its `draft`, and how many are `computed`. The difference is the remaining work. Nothing else
distinguishes a prompt, a chunk, a prefix hit, a resumption, a decode and a verification.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

import msgspec

from inferscope.engine.disagg import ReceivedKv
from inferscope.engine.kv import ROOT, Chain
from inferscope.engine.speculative import NgramIndex
from inferscope.errors import BadInput, InferScopeError
from inferscope.records import RequestIndex

Finish: TypeAlias = Literal[
    "stop", "length", "client_cancel", "timeout", "server_abort", "rejected", "error", "shed"
]


MOST_LOGPROBS = 20
"""Maximum number of likeliest tokens with log probabilities per position."""
GREEDY_BELOW = 1e-5
"""Temperature below which the float32 softmax of the scaled logits is one-hot, or NaN."""


class QueueFull(InferScopeError):
    """Error: the waiting queue holds `max_waiting` requests."""


class BadRequest(BadInput):
    """Error: this engine can never serve the prompt or the sampling value."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling parameters and stop conditions.

    Attributes:
        max_tokens: Maximum output tokens; the model's limit may end the output sooner.
        min_tokens: Number of output tokens before which no stop token is sampled.
        temperature: Softmax temperature; values below `GREEDY_BELOW` select the likeliest token.
        top_k: Number of likeliest tokens to sample from; 0 for all.
        top_p: Cumulative probability of the likeliest tokens to sample from.
        seed: Seed that makes sampling repeatable in any batch; None uses the engine's seed.
        stop_token_ids: Tokens that end the output, in addition to the model's own.
        ignore_eos: Whether the model's own end tokens do not end the output.
        logprobs: Number of likeliest tokens per position to return log probabilities of, in
            addition to the chosen token's; None for no log probabilities.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        for name, is_fine, allowed in (
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("min_tokens", 0 <= self.min_tokens <= self.max_tokens, "0 to max_tokens"),
            ("temperature", 0.0 <= self.temperature < float("inf"), "0 or more"),
            ("top_k", self.top_k >= 0, "0 or more"),
            ("top_p", 0.0 < self.top_p <= 1.0, "above 0, at most 1"),
            (
                "logprobs",
                self.logprobs is None or 0 <= self.logprobs <= MOST_LOGPROBS,
                f"0 to {MOST_LOGPROBS}",
            ),
        ):
            if not is_fine:
                raise BadRequest(f"{name} is {getattr(self, name)}. Give {allowed}.")

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is selected."""
        return self.temperature < GREEDY_BELOW


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Natural log probabilities at one position of an output.

    Attributes:
        token: Chosen token.
        logprob: Log probability of the chosen token.
        top: The likeliest tokens and their log probabilities, likeliest first.
    """

    token: int
    logprob: float
    top: list[tuple[int, float]]


def check_stop_ids(sampling: Sampling, *, vocab: int) -> None:
    """Reject stop tokens outside the vocabulary.

    Raises:
        BadRequest: an id is outside the vocabulary.
    """
    for token in sampling.stop_token_ids:
        if not 0 <= token < vocab:
            raise BadRequest(
                f"stop_token_ids holds {token}; this model has 0 to {vocab - 1}. Leave it out."
            )


def check_prompt(prompt: Sequence[int], *, max_model_tokens: int, vocab: int) -> None:
    """Reject a prompt that this engine can never serve.

    Raises:
        BadRequest: the prompt is empty, too long, or holds an id outside the vocabulary.
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


class PromptKeys(NamedTuple):
    """Keys of the content of a request's blocks, by which the prefix cache is observed."""

    keys: list[int]
    """Keys of the prompt's blocks; those of blocks that hold output are appended."""
    packed: bytes
    """Keys of the prompt's blocks one after another."""
    spent_ns: int
    """Time that their computation took."""


class Submission(msgspec.Struct, frozen=True, gc=False):
    """A request as submitted by a front end, before the engine's loop reads it."""

    request_id: str
    prompt: list[int]
    sampling: Sampling
    external_id: str | None
    parent: str
    trace: str
    received: ReceivedKv | None
    arrived_ns: int
    cache_salt: str
    block_keys: PromptKeys | None


@dataclass(eq=False, slots=True)
class Request:
    """A request in the engine's loop.

    Attributes:
        index: Index of the request in the probe's records.
        tokens: Prompt and output tokens so far.
        num_prompt: Number of prompt tokens.
        max_tokens: Maximum output tokens, limited by the model.
        stop_ids: Tokens that end the output.
        seed: Seed of its random numbers.
        draft: Proposed tokens after the known ones, to be verified with the next token.
        ngrams: Index that proposes drafts; None without prompt lookup.
        num_pending: Number of its last tokens that are placeholders (see `overlap.py`).
        logprobs: Log probabilities of the tokens of its last step; empty if it asks for none.
        computed: Number of tokens whose keys and values are in its blocks.
        ever_computed: Maximum that `computed` has reached; work below it is recomputed.
        cached_tokens: Number of tokens found in the prefix cache and never computed.
        recomputed_tokens: Number of tokens computed again after preemptions.
        blocks: KV blocks in the order of the tokens.
        root: Chain of its first block: its cache salt, if it has one.
        chain: Chain of its last published block; see `kv.py`.
        num_published: Number of published blocks, counted from the first.
        sequence_slot: Row in the runner's tables while it runs, else -1.
        has_run: Whether it has been admitted at least once.
        has_ended: Whether it has finished or was cancelled; a step under way may still compute it.
        received: KV of its first tokens from a prefill engine; None once it is in the blocks.
        block_keys: Keys of the whole blocks of its prompt and of all that it has published; None
            if the prefix cache is not observed.
    """

    index: RequestIndex
    request_id: str
    tokens: list[int]
    num_prompt: int
    max_tokens: int
    sampling: Sampling
    stop_ids: frozenset[int]
    seed: int
    draft: list[int] = field(default_factory=list)
    ngrams: NgramIndex | None = None
    num_pending: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    computed: int = 0
    ever_computed: int = 0
    cached_tokens: int = 0
    recomputed_tokens: int = 0
    blocks: list[int] = field(default_factory=list)
    root: Chain = ROOT
    chain: Chain = ROOT
    num_published: int = 0
    sequence_slot: int = -1
    has_run: bool = False
    has_ended: bool = False
    received: ReceivedKv | None = None
    block_keys: PromptKeys | None = None

    @property
    def todo(self) -> int:
        """Number of known and proposed tokens that are not computed."""
        return len(self.tokens) + len(self.draft) - self.computed

    def token_at(self, position: int) -> int:
        """Return a known or proposed token."""
        tokens = self.tokens
        beyond = position - len(tokens)
        return tokens[position] if beyond < 0 else self.draft[beyond]

    @property
    def num_output(self) -> int:
        """Number of tokens generated so far."""
        return len(self.tokens) - self.num_prompt - self.num_pending

    def expect_token(self) -> None:
        """Append a placeholder for the token that a launched step samples."""
        self.tokens.append(-1 - self.sequence_slot)
        self.num_pending += 1

    def take_token(self, token: int) -> None:
        """Put a sampled token in place of the oldest placeholder, or append it."""
        if self.num_pending:
            self.tokens[-self.num_pending] = token
            self.num_pending -= 1
        else:
            self.tokens.append(token)

    def reasoning_tokens(self, end_of_thinking: int) -> int:
        """Return the number of output tokens up to the first `end_of_thinking`, which counts too.

        An output without it is all reasoning, unless the prompt holds the token: then a chat
        template has ended the reasoning before the output.
        """
        output = self.tokens[self.num_prompt : self.num_prompt + self.num_output]
        if end_of_thinking in output:
            return output.index(end_of_thinking) + 1
        is_over = end_of_thinking in self.tokens[: self.num_prompt]
        return 0 if is_over else len(output)

    def finish_after(self, token: int) -> Finish | None:
        """Return the finish reason if `token`, just taken, is the last; else None."""
        num_output = self.num_output
        if token in self.stop_ids and num_output >= self.sampling.min_tokens:
            return "stop"
        return "length" if num_output >= self.max_tokens else None
