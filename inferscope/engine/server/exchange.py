"""One HTTP request for text: its engine requests and their results.

An HTTP request with several prompts or `n` > 1 returns several texts. Each text is a separate
request in the engine and in the records; all but the first name the first as their parent.
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
    TokenLogprobs,
    check_prompt,
    check_stop_ids,
)
from inferscope.engine.server.delivery_log import DeliveryLog
from inferscope.engine.server.errors import (
    ApiError,
    ClientDisconnected,
    bad_field,
    ended_early,
    refusal,
)
from inferscope.engine.server.protocol import GenerationCall
from inferscope.engine.server.router import EngineLink
from inferscope.engine.server.wire import Refusal, Refused, Submit
from inferscope.engine.tokenizer import Tokenizer, encode_sections
from inferscope.probe import LEAST_BLOCKED_NS, Parts, Probe
from inferscope.records import finish_of_status

LONG_PROMPT_CHARS = 20_000
"""Length from which a text is tokenized in a thread: it takes milliseconds."""
_MOST_TOKEN_CHARS = 256
"""Maximum characters per token of known vocabularies, which bounds a prompt's characters."""


@dataclass(frozen=True)
class FrontEndContext:
    """Shared context of all exchanges of an API server.

    Attributes:
        max_model_tokens: maximum prompt plus output tokens.
        vocab: number of token ids; all ids are below it.
    """

    tokenizer: Tokenizer
    link: EngineLink
    probe: Probe
    delivery_log: DeliveryLog
    exchanges: set[Exchange]
    max_model_tokens: int
    vocab: int


class ClientConnection(Protocol):
    """Interface of a client connection for an exchange."""

    @property
    def is_stuck(self) -> bool:
        """Whether sent bytes are not yet delivered."""

    async def drained(self) -> int:
        """Wait until all sent bytes are delivered; return how long the client did not read, in ns.

        Raises:
            ClientDisconnected: the connection was lost before.
        """

    def abort(self) -> None:
        """Close the connection and discard unsent bytes."""


@dataclass(frozen=True)
class Origin:
    """Origin of an HTTP request, for its records.

    Attributes:
        arrived_ns: monotonic time when its first bytes reached the application.
        external_id: the client's name of the request.
        trace: value of its `traceparent` header.
        endpoint: path of its URL.
        connection: connection of the client.
        parts: parts of its prompt in tokens, as declared by the client.
        attributes: further attributes to record.
    """

    arrived_ns: int
    external_id: str | None
    trace: str
    endpoint: str
    connection: ClientConnection
    parts: Parts = ()
    attributes: Mapping[str, str] = field(default_factory=dict)


_FINISHES: dict[Refusal, Finish] = {
    "bad_request": "rejected",
    "queue_full": "shed",
    "stopped": "error",
    "failed": "error",
    "no_kv": "error",
}


class Choice:
    """One text of a response, and its engine request.

    Attributes:
        conversation: state of the text.
        num_prompt: number of prompt tokens.
        cached_tokens: number of prompt tokens found in the prefix cache.
        num_delivered: number of tokens delivered to the client.
        refused: rejection by the engine; None without one.
        is_submitted: whether the engine has the request and records its end.
    """

    def __init__(
        self, number: int, request_id: str, conversation: Conversation, front: FrontEndContext
    ) -> None:
        self.number = number
        self.request_id = request_id
        self.conversation = conversation
        self.num_prompt = 0
        self.cached_tokens = 0
        self.refused: Refused | None = None
        self.is_submitted = False
        self._front = front
        self.num_delivered = 0

    def take_cached_tokens(self, num_tokens: int) -> None:
        """Set the number of prompt tokens found in the prefix cache."""
        self.cached_tokens = num_tokens

    def take_tokens(
        self,
        tokens: Sequence[int],
        finish: Finish | None,
        logprobs: Sequence[TokenLogprobs] = (),
    ) -> None:
        """Add the tokens of a step, and their log probabilities if the request asks for them."""
        self.conversation.push(tokens, finish, logprobs)
        if self.conversation.is_cut:
            # Recorded here too: the engine ends the request a step later, after undelivered tokens.
            self._front.probe.finished(self.conversation.index, "stop")
            self._front.link.cancel(self.request_id, "stop")

    def take_refusal(self, refused: Refused) -> None:
        """Set the engine's rejection and record the request's end."""
        self.refused = refused
        if refused.kind != "lost":
            self._front.probe.finished(self.conversation.index, _FINISHES[refused.kind])
        self.conversation.wake()

    def note_delivered(self, num_tokens: int, blocked_ns: int) -> None:
        """Record delivered tokens and how long the client did not read before."""
        if num_tokens and not self.num_delivered:
            self._front.probe.first_byte(self.conversation.index)
        if num_tokens or blocked_ns >= LEAST_BLOCKED_NS:
            self.num_delivered += num_tokens
            self._front.delivery_log.note(self.conversation.index, num_tokens, blocked_ns)


class Exchange:
    """An HTTP request for text, from its receipt to its last byte.

    Attributes:
        choices: texts of the response.
        num_each: number of texts per prompt.
        connection: connection of the client.
        is_answered: whether the last chunk has been sent, delivered or not.
    """

    def __init__(self, front: FrontEndContext, origin: Origin, call: GenerationCall | None) -> None:
        """Record the receipt; `call` is None for a request that could not be parsed."""
        self._front = front
        self._origin = origin
        self._wakeup = asyncio.Event()
        self._end_reason: Finish | None = None
        self._refusal = "error"
        self.connection = origin.connection
        self.is_answered = False
        self.num_each = 1 if call is None else call.num_each
        self.choices: list[Choice] = []
        num_choices = 1 if call is None else len(call.prompts) * call.num_each
        is_stream = call is not None and call.is_stream
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
                    **({} if call is None else call.given),
                },
            )
            conversation = Conversation(
                index,
                front.tokenizer,
                self._wakeup.set,
                stops=() if call is None else call.stops,
                min_tokens=0 if call is None else call.sampling.min_tokens,
            )
            self.choices.append(Choice(number, request_id, conversation, front))
        front.exchanges.add(self)

    async def submit(self, call: GenerationCall) -> None:
        """Check, tokenize and submit all prompts.

        Raises:
            ApiError: a prompt or a stop token can never be served.
        """
        vocab = self._front.vocab
        try:
            check_stop_ids(call.sampling, vocab=vocab)
        except BadRequest as error:
            raise bad_field("stop_token_ids", str(error)) from None
        prompts, parts = await self._tokens(call)
        try:  # checked here, before the prompt is sent to the engine `n` times
            for prompt in prompts:
                check_prompt(prompt, max_model_tokens=self._front.max_model_tokens, vocab=vocab)
        except BadRequest as error:
            raise _bad_prompt(str(error)) from None
        for choice in self.choices:
            prompt = prompts[choice.number // call.num_each]
            choice.num_prompt = len(prompt)
            self._front.probe.tokenised(choice.conversation.index, len(prompt), prompt_parts=parts)
        for choice in self.choices:
            request = Submit(
                choice.request_id,
                prompts[choice.number // call.num_each],
                _of_number(call, choice.number % call.num_each),
                external_id=self._origin.external_id,
                parent=self.choices[0].request_id if choice.number else "",
                trace=self._origin.trace,
                cache_salt=call.cache_salt,
            )
            self._front.link.submit(request, choice)
            choice.is_submitted = True
        for choice in self.choices[:: call.num_each]:  # while the engine begins with them
            prompt = prompts[choice.number // call.num_each]
            index, salt = choice.conversation.index, call.cache_salt or None
            self._front.probe.compare_prompt(index, prompt, salt=salt)

    async def next_deliveries(self) -> list[tuple[Choice, Delivery]]:
        """Wait for at least one delivery and return all that are pending.

        Raises:
            ApiError: the engine rejects a request or ends it early.
            ClientDisconnected: the client disconnected.
        """
        while True:
            await self._wakeup.wait()
            self._wakeup.clear()
            if self._end_reason == "server_abort":
                raise ended_early(self._end_reason)
            if self._end_reason is not None:
                raise ClientDisconnected
            found = []
            for choice in self.choices:
                if choice.refused is not None:
                    raise refusal(choice.refused)
                delivery = choice.conversation.take()
                if delivery is None:
                    continue
                if delivery.finish not in (None, "stop", "length"):
                    raise ended_early(delivery.finish)
                found.append((choice, delivery))
            if found:
                return found

    def note_delivered(self, deliveries: list[tuple[Choice, Delivery]], blocked_ns: int) -> None:
        """Record deliveries and how long the client did not read before.

        All texts share the connection, so those without a delivery waited for it too.
        """
        num_tokens = {choice.number: delivery.num_tokens for choice, delivery in deliveries}
        choices = self.choices if blocked_ns else [choice for choice, _ in deliveries]
        for choice in choices:
            choice.note_delivered(num_tokens.get(choice.number, 0), blocked_ns)

    @property
    def is_drained(self) -> bool:
        """Whether all texts are complete and were returned by `next_deliveries`."""
        return all(
            choice.conversation.is_over and not choice.conversation.has_pending
            for choice in self.choices
        )

    def end_early(self, reason: Finish) -> None:
        """End the exchange early; the first reason counts."""
        self._end_reason = self._end_reason or reason
        self._wakeup.set()
        if reason == "server_abort" and self.connection.is_stuck:
            self.connection.abort()  # it would wait for a client that does not read

    def refuse(self, status: int) -> None:
        """Set the finish reason of requests that were not submitted from an HTTP error status."""
        self._refusal = finish_of_status(status)

    def close(self) -> None:
        """Record the last byte and cancel unfinished requests."""
        probe = self._front.probe
        self._front.delivery_log.flush()
        for choice in self.choices:
            if not choice.is_submitted:
                probe.finished(choice.conversation.index, self._end_reason or self._refusal)
            elif not choice.conversation.is_over:
                self._front.link.cancel(choice.request_id, self._end_reason or "server_abort")
            elif (
                self._end_reason is not None
                and choice.num_delivered < choice.conversation.num_tokens
            ):
                probe.finished(
                    choice.conversation.index, self._end_reason
                )  # generated, and not delivered
            probe.last_byte(choice.conversation.index)
        self._front.exchanges.discard(self)

    async def _tokens(self, call: GenerationCall) -> tuple[list[list[int]], Parts]:
        """Return the prompts as tokens, and their parts; prompts are all texts or all tokens."""
        prompts = call.prompts
        # Parts declared for one prompt do not apply to several.
        parts = self._origin.parts if len(prompts) == 1 else ()
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        for text in texts:
            check_length(text, max_model_tokens=self._front.max_model_tokens)
        if not texts:
            return [prompt for prompt in prompts if isinstance(prompt, list)], parts
        tokenizer = self._front.tokenizer
        is_long = sum(map(len, texts)) >= LONG_PROMPT_CHARS
        if call.sections and not parts:
            encode = partial(encode_sections, tokenizer, texts[0], call.sections)
            tokens, parts = await asyncio.to_thread(encode) if is_long else encode()
            return [tokens], parts
        if is_long:
            return await asyncio.to_thread(tokenizer.encode_all, texts), parts
        return tokenizer.encode_all(texts), parts


def check_length(text: str, *, max_model_tokens: int) -> None:
    """Reject a text that is too long for a prompt, before it is tokenized.

    Raises:
        ApiError: the text is too long for any tokenizer.
    """
    if len(text) > max_model_tokens * _MOST_TOKEN_CHARS:
        raise _bad_prompt(
            f"the prompt has {len(text)} characters, which is more than the {max_model_tokens} "
            "tokens that prompt and output together may have. Shorten it."
        )


def _bad_prompt(message: str) -> ApiError:
    return ApiError(400, message, param="prompt", code="invalid_prompt")


def _of_number(call: GenerationCall, number: int) -> Sampling:
    """Return the sampling of one of several texts of a prompt, each with its own seed."""
    if call.sampling.seed is None or not number:
        return call.sampling
    return replace(call.sampling, seed=call.sampling.seed + number)
