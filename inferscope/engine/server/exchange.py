"""One HTTP request for text: its requests to the engine, and what became of them.

An HTTP request asks for several texts where it has several prompts or `n` > 1. Each text is a
request of its own to the engine and in the records; all but the first name the first as their
parent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from inferscope.engine.conversation import Conversation, Delivery
from inferscope.engine.request import (
    BadRequest,
    Finish,
    Sampling,
    check_prompt,
    check_stop_ids,
)
from inferscope.engine.server.errors import ApiError, Left, bad_field, ended_early, refusal
from inferscope.engine.server.link import Link
from inferscope.engine.server.protocol import Ask
from inferscope.engine.server.wire import Refusal, Refused
from inferscope.engine.server.written import Written
from inferscope.engine.tokenizer import Tokenizer, encode_sections
from inferscope.probe import LEAST_BLOCKED_NS, Probe
from inferscope.probe.parts import Parts
from inferscope.records import finish_of_status

LONG_PROMPT_CHARS = 20_000
"""From here on tokenising takes milliseconds, which other clients would wait."""
_MOST_TOKEN_CHARS = 256
"""No known vocabulary has a longer token: a text of more for each token that fits is too long."""


@dataclass(frozen=True)
class Front:
    """What all exchanges of an API server share.

    Attributes:
        max_model_tokens: of prompt and output together.
        vocab: token ids are below it.
    """

    tokenizer: Tokenizer
    link: Link
    probe: Probe
    written: Written
    exchanges: set[Exchange]
    max_model_tokens: int
    vocab: int


class Line(Protocol):
    """What an exchange needs of its connection."""

    @property
    def is_stuck(self) -> bool:
        """The client has not taken all that was sent."""

    async def drained(self) -> int:
        """Wait until the client has what was sent; raises `Left` if it never will.

        Returns:
            for how long, in nanoseconds, the client had not read.
        """

    def abort(self) -> None:
        """End it, whatever is still to be sent."""


@dataclass(frozen=True)
class Origin:
    """Where an HTTP request comes from, for the records.

    Attributes:
        arrived_ns: when its first bytes reached the application.
        external_id: its own name for itself.
        trace: the `traceparent` that came with it.
        endpoint: its path.
        line: its connection.
        parts: of its prompt, in tokens, as the client says.
        attributes: what else is noted of it.
    """

    arrived_ns: int
    external_id: str | None
    trace: str
    endpoint: str
    line: Line
    parts: Parts = ()
    attributes: Mapping[str, str] = field(default_factory=dict)


_FINISHES: dict[Refusal, Finish] = {
    "bad_request": "rejected",
    "queue_full": "shed",
    "stopped": "error",
    "failed": "error",
}


class Choice:
    """One text of an answer, a request to the engine.

    Attributes:
        talk: its text.
        num_prompt: tokens of its prompt.
        cached_tokens: of the prompt, found in the engine's prefix cache.
        num_written: tokens that the client has.
        refused: the engine's no.
        is_submitted: the engine has it, and tells its end.
    """

    def __init__(self, number: int, request_id: str, talk: Conversation, front: Front) -> None:
        self.number = number
        self.request_id = request_id
        self.talk = talk
        self.num_prompt = 0
        self.cached_tokens = 0
        self.refused: Refused | None = None
        self.is_submitted = False
        self._front = front
        self.num_written = 0

    def take_cached_tokens(self, num_tokens: int) -> None:
        """Take how much of the prompt was in the prefix cache."""
        self.cached_tokens = num_tokens

    def take_tokens(self, tokens: Sequence[int], finish: Finish | None) -> None:
        """Take what a step brought."""
        self.talk.push(tokens, finish)
        if self.talk.is_cut:
            # Said here too: the engine will say it a step late, and of tokens that nobody gets.
            self._front.probe.finished(self.talk.index, "stop")
            self._front.link.cancel(self.request_id, "stop")

    def take_refusal(self, refused: Refused) -> None:
        """Take the engine's no."""
        self.refused = refused
        if refused.kind != "lost":
            self._front.probe.finished(self.talk.index, _FINISHES[refused.kind])
        self.talk.wake()

    def wrote(self, num_tokens: int, blocked_ns: int) -> None:
        """Note that tokens are with the client, which had not read for some time before."""
        if num_tokens and not self.num_written:
            self._front.probe.first_byte(self.talk.index)
        if num_tokens or blocked_ns >= LEAST_BLOCKED_NS:
            self.num_written += num_tokens
            self._front.written.note(self.talk.index, num_tokens, blocked_ns)


class Exchange:
    """One HTTP request for text, from its receipt to its last byte.

    Attributes:
        choices: its texts.
        num_each: how many of them each prompt has.
        line: its connection.
        is_answered: its last piece has been sent, whether or not the client has it.
    """

    def __init__(self, front: Front, origin: Origin, ask: Ask | None) -> None:
        """Note the receipt; `ask` is None for a request that could not be read."""
        self._front = front
        self._origin = origin
        self._news = asyncio.Event()
        self._left: Finish | None = None
        self._refusal = "error"
        self.line = origin.line
        self.is_answered = False
        self.num_each = 1 if ask is None else ask.num_each
        self.choices: list[Choice] = []
        num_choices = 1 if ask is None else len(ask.prompts) * ask.num_each
        is_stream = ask is not None and ask.is_stream
        for number in range(num_choices):
            request_id = front.link.name_request()
            index = front.probe.received(
                request_id,
                external_id=origin.external_id,
                trace=origin.trace,
                at_ns=origin.arrived_ns,
                attributes={
                    "endpoint": origin.endpoint,
                    "stream": str(is_stream).lower(),
                    **origin.attributes,
                    **({} if ask is None else ask.given),
                },
            )
            talk = Conversation(
                index,
                front.tokenizer,
                self._news.set,
                stops=() if ask is None else ask.stops,
                min_tokens=0 if ask is None else ask.sampling.min_tokens,
            )
            self.choices.append(Choice(number, request_id, talk, front))
        front.exchanges.add(self)

    async def submit(self, ask: Ask) -> None:
        """Check, tokenise and hand in all prompts.

        Raises:
            ApiError: a prompt or a stop token can never be served.
        """
        vocab = self._front.vocab
        try:
            check_stop_ids(ask.sampling, vocab=vocab)
        except BadRequest as error:
            raise bad_field("stop_token_ids", str(error)) from None
        prompts, parts = await self._tokens(ask)
        try:  # here what the engine would refuse, before it is sent there `n` times
            for prompt in prompts:
                check_prompt(prompt, max_model_tokens=self._front.max_model_tokens, vocab=vocab)
        except BadRequest as error:
            raise _bad_prompt(str(error)) from None
        for choice in self.choices:
            prompt = prompts[choice.number // ask.num_each]
            choice.num_prompt = len(prompt)
            self._front.probe.tokenised(choice.talk.index, len(prompt), prompt_parts=parts)
        for choice in self.choices:
            self._front.link.submit(
                choice.request_id,
                prompts[choice.number // ask.num_each],
                _of_number(ask, choice.number % ask.num_each),
                choice,
                external_id=self._origin.external_id,
                parent=self.choices[0].request_id if choice.number else "",
            )
            choice.is_submitted = True

    async def news(self) -> list[tuple[Choice, Delivery]]:
        """Wait for what is new, at least one delivery.

        Raises:
            ApiError: the engine refuses, or ends a request before its time.
            Left: nobody waits for it any more.
        """
        while True:
            await self._news.wait()
            self._news.clear()
            if self._left == "server_abort":
                raise ended_early(self._left)
            if self._left is not None:
                raise Left
            found = []
            for choice in self.choices:
                if choice.refused is not None:
                    raise refusal(choice.refused)
                delivery = choice.talk.take()
                if delivery is None:
                    continue
                if delivery.finish not in (None, "stop", "length"):
                    raise ended_early(delivery.finish)
                found.append((choice, delivery))
            if found:
                return found

    def wrote(self, news: list[tuple[Choice, Delivery]], blocked_ns: int) -> None:
        """Note that deliveries are with the client, and for how long it had not read before.

        All texts share the connection: those without a delivery had to wait for it too.
        """
        num_tokens = {choice.number: delivery.num_tokens for choice, delivery in news}
        choices = self.choices if blocked_ns else [choice for choice, _ in news]
        for choice in choices:
            choice.wrote(num_tokens.get(choice.number, 0), blocked_ns)

    @property
    def is_taken(self) -> bool:
        """All of it has been generated, and taken by `news`."""
        return all(choice.talk.is_over and not choice.talk.has_news for choice in self.choices)

    def leave(self, reason: Finish) -> None:
        """End it before its time; the first reason counts."""
        self._left = self._left or reason
        self._news.set()
        if reason == "server_abort" and self.line.is_stuck:
            self.line.abort()  # it waits for a client that does not read

    def refuse(self, status: int) -> None:
        """Note that the client gets an HTTP error; how a request ends that was not handed in."""
        self._refusal = finish_of_status(status)

    def close(self) -> None:
        """Note that the client has all that it will get, and cancel the rest."""
        probe = self._front.probe
        self._front.written.tell()
        for choice in self.choices:
            if not choice.is_submitted:
                probe.finished(choice.talk.index, self._left or self._refusal)
            elif not choice.talk.is_over:
                self._front.link.cancel(choice.request_id, self._left or "server_abort")
            elif self._left is not None and choice.num_written < choice.talk.num_tokens:
                probe.finished(choice.talk.index, self._left)  # generated, and not delivered
            probe.last_byte(choice.talk.index)
        self._front.exchanges.discard(self)

    async def _tokens(self, ask: Ask) -> tuple[list[list[int]], Parts]:
        """Return prompts as tokens, and their parts; a request's are all texts, or all tokens."""
        prompts = ask.prompts
        # What the client says of one prompt cannot be true of several.
        parts = self._origin.parts if len(prompts) == 1 else ()
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        for text in texts:
            check_length(text, max_model_tokens=self._front.max_model_tokens)
        if not texts:
            return [prompt for prompt in prompts if isinstance(prompt, list)], parts
        tokenizer = self._front.tokenizer
        is_long = sum(map(len, texts)) >= LONG_PROMPT_CHARS
        if ask.sections and not parts:
            encode = partial(encode_sections, tokenizer, texts[0], ask.sections)
            tokens, parts = await asyncio.to_thread(encode) if is_long else encode()
            return [tokens], parts
        if is_long:
            return await asyncio.to_thread(tokenizer.encode_all, texts), parts
        return tokenizer.encode_all(texts), parts


def check_length(text: str, *, max_model_tokens: int) -> None:
    """Refuse a text that cannot be a prompt, before it is tokenised.

    Raises:
        ApiError: it is too long for any tokenizer.
    """
    if len(text) > max_model_tokens * _MOST_TOKEN_CHARS:
        raise _bad_prompt(
            f"the prompt has {len(text)} characters, which is more than the {max_model_tokens} "
            "tokens that prompt and output together may have. Shorten it."
        )


def _bad_prompt(message: str) -> ApiError:
    return ApiError(400, message, param="prompt", code="invalid_prompt")


def _of_number(ask: Ask, number: int) -> Sampling:
    """Return the sampling of one of several answers to a prompt: each needs a seed of its own."""
    if ask.sampling.seed is None or not number:
        return ask.sampling
    return replace(ask.sampling, seed=ask.sampling.seed + number)
