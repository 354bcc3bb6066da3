"""OpenAI responses: complete bodies, and the chunks of streams."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Literal

import msgspec

from inferscope.engine.conversation import ScoredToken
from inferscope.engine.server.logprobs import (
    ChatLogprobs,
    CompletionLogprobs,
    chat_logprobs,
    completion_logprobs,
)
from inferscope.engine.tokenizer import Tokenizer

_encode = msgspec.json.Encoder().encode

Kind = Literal["completion", "chat"]


class _Cached(msgspec.Struct):
    cached_tokens: int


class Usage(msgspec.Struct):
    """Token counts of a response."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: _Cached


def usage_of(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> Usage:
    """Return the token counts in OpenAI's form."""
    total = prompt_tokens + completion_tokens
    return Usage(prompt_tokens, completion_tokens, total, _Cached(cached_tokens))


class _ChatMessage(msgspec.Struct, omit_defaults=True):
    role: str | None = None
    content: str | None = None


class _TextChoice(msgspec.Struct):
    index: int
    text: str
    finish_reason: str | None
    logprobs: CompletionLogprobs | None


class _MessageChoice(msgspec.Struct):
    index: int
    message: _ChatMessage
    finish_reason: str | None
    logprobs: ChatLogprobs | None


class _DeltaChoice(msgspec.Struct):
    index: int
    delta: _ChatMessage
    finish_reason: str | None
    logprobs: ChatLogprobs | None


_Choice = _TextChoice | _MessageChoice | _DeltaChoice


class _Answer(msgspec.Struct):
    id: str
    object: str
    created: int
    model: str
    choices: list[_Choice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET


class Answer:
    """Encoder of the response to one HTTP request."""

    def __init__(self, kind: Kind, model: str, tokenizer: Tokenizer) -> None:
        """Create the encoder of a response.

        Args:
            kind: completion or chat.
            model: served name of the model.
            tokenizer: its tokenizer, for tokens with log probabilities.
        """
        self._is_chat = kind == "chat"
        self.id = f"{'chatcmpl' if self._is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._model = model
        self._tokenizer = tokenizer
        self._created = int(time.time())
        self._begun_choices: set[int] = set()

    def whole(self, texts: list[tuple[str, str | None, list[ScoredToken]]], usage: Usage) -> bytes:
        """Return the complete body from each choice's text, finish reason and log probabilities."""
        choices: list[_Choice] = [
            _MessageChoice(index, _ChatMessage("assistant", text), reason, self._of_chat(scored))
            if self._is_chat
            else _TextChoice(index, text, reason, self._of_completion(scored))
            for index, (text, reason, scored) in enumerate(texts)
        ]
        name = "chat.completion" if self._is_chat else "text_completion"
        return _encode(_Answer(self.id, name, self._created, self._model, choices, usage))

    def chunk(
        self,
        index: int,
        text: str,
        finish_reason: str | None,
        usage: Usage | msgspec.UnsetType | None,
        scored: Sequence[ScoredToken],
    ) -> bytes:
        """Return a choice's next chunk as an event; the first one of a chat is preceded by a role.

        Args:
            index: index of the choice.
            text: new text, which may be empty.
            finish_reason: finish reason on the last chunk, else None.
            usage: token counts so far; None encodes null, as OpenAI does if usage comes at the end.
            scored: log probabilities of the text's tokens; empty without.
        """
        if not self._is_chat:
            logprobs = self._of_completion(scored)
            return self._event([_TextChoice(index, text, finish_reason, logprobs)], usage)
        delta = _ChatMessage(content=text)
        piece = self._event(
            [_DeltaChoice(index, delta, finish_reason, self._of_chat(scored))], usage
        )
        if index in self._begun_choices:
            return piece
        self._begun_choices.add(index)
        opening = _DeltaChoice(index, _ChatMessage("assistant", ""), None, None)
        return self._event([opening], usage) + piece

    def usage_chunk(self, usage: Usage) -> bytes:
        """Return the event that holds only the token counts."""
        return self._event([], usage)

    def _of_completion(self, scored: Sequence[ScoredToken]) -> CompletionLogprobs | None:
        return completion_logprobs(self._tokenizer, scored) if scored else None

    def _of_chat(self, scored: Sequence[ScoredToken]) -> ChatLogprobs | None:
        return chat_logprobs(self._tokenizer, scored) if scored else None

    def _event(self, choices: list[_Choice], usage: Usage | msgspec.UnsetType | None) -> bytes:
        name = "chat.completion.chunk" if self._is_chat else "text_completion"
        chunk = _Answer(self.id, name, self._created, self._model, choices, usage)
        return b"data: " + _encode(chunk) + b"\n\n"


DONE = b"data: [DONE]\n\n"


def error_event(body: bytes) -> bytes:
    """Return an error as the last event of a stream."""
    return b"data: " + body + b"\n\n"
