"""OpenAI responses: complete bodies, and the chunks of streams."""

from __future__ import annotations

import time
import uuid
from typing import Literal

import msgspec

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
    logprobs: None = None


class _MessageChoice(msgspec.Struct):
    index: int
    message: _ChatMessage
    finish_reason: str | None
    logprobs: None = None


class _DeltaChoice(msgspec.Struct):
    index: int
    delta: _ChatMessage
    finish_reason: str | None
    logprobs: None = None


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

    def __init__(self, kind: Kind, model: str) -> None:
        """Create the encoder of a response.

        Args:
            kind: completion or chat.
            model: served name of the model.
        """
        self._is_chat = kind == "chat"
        self.id = f"{'chatcmpl' if self._is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._model = model
        self._created = int(time.time())
        self._begun_choices: set[int] = set()

    def whole(self, texts: list[tuple[str, str | None]], usage: Usage) -> bytes:
        """Return the complete body from each choice's text and finish reason."""
        choices: list[_Choice] = [
            _MessageChoice(index, _ChatMessage("assistant", text), reason)
            if self._is_chat
            else _TextChoice(index, text, reason)
            for index, (text, reason) in enumerate(texts)
        ]
        name = "chat.completion" if self._is_chat else "text_completion"
        return _encode(_Answer(self.id, name, self._created, self._model, choices, usage))

    def chunk(
        self,
        index: int,
        text: str,
        finish_reason: str | None,
        usage: Usage | msgspec.UnsetType | None,
    ) -> bytes:
        """Return a choice's next chunk as an event; the first one of a chat is preceded by a role.

        Args:
            index: index of the choice.
            text: new text, which may be empty.
            finish_reason: finish reason on the last chunk, else None.
            usage: token counts so far; None encodes null, as OpenAI does if usage comes at the end.
        """
        if not self._is_chat:
            return self._event([_TextChoice(index, text, finish_reason)], usage)
        piece = self._event([_DeltaChoice(index, _ChatMessage(content=text), finish_reason)], usage)
        if index in self._begun_choices:
            return piece
        self._begun_choices.add(index)
        opening = _DeltaChoice(index, _ChatMessage("assistant", ""), None)
        return self._event([opening], usage) + piece

    def usage_chunk(self, usage: Usage) -> bytes:
        """Return the event that holds only the token counts."""
        return self._event([], usage)

    def _event(self, choices: list[_Choice], usage: Usage | msgspec.UnsetType | None) -> bytes:
        name = "chat.completion.chunk" if self._is_chat else "text_completion"
        chunk = _Answer(self.id, name, self._created, self._model, choices, usage)
        return b"data: " + _encode(chunk) + b"\n\n"


DONE = b"data: [DONE]\n\n"


def error_event(body: bytes) -> bytes:
    """Return an error as the last event of a stream."""
    return b"data: " + body + b"\n\n"
