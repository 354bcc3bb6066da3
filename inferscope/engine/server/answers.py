"""OpenAI's answers: whole ones, and the chunks of streams."""

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
    """Numbers of tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: _Cached


def usage_of(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> Usage:
    """Return the numbers of tokens as clients know them."""
    total = prompt_tokens + completion_tokens
    return Usage(prompt_tokens, completion_tokens, total, _Cached(cached_tokens))


class _Said(msgspec.Struct, omit_defaults=True):
    role: str | None = None
    content: str | None = None


class _TextChoice(msgspec.Struct):
    index: int
    text: str
    finish_reason: str | None
    logprobs: None = None


class _MessageChoice(msgspec.Struct):
    index: int
    message: _Said
    finish_reason: str | None
    logprobs: None = None


class _DeltaChoice(msgspec.Struct):
    index: int
    delta: _Said
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
    """Writes the answer to one HTTP request."""

    def __init__(self, kind: Kind, model: str) -> None:
        """Begin an answer.

        Args:
            kind: completion or chat.
            model: the name under which it is served.
        """
        self._is_chat = kind == "chat"
        self.id = f"{'chatcmpl' if self._is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._model = model
        self._created = int(time.time())
        self._introduced: set[int] = set()

    def whole(self, texts: list[tuple[str, str | None]], usage: Usage) -> bytes:
        """Return all of it: by choice, the text and why it ended."""
        choices: list[_Choice] = [
            _MessageChoice(index, _Said("assistant", text), reason)
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
        """Return one choice's next piece as an event; a chat's first one is preceded by its role.

        Args:
            index: the choice.
            text: new text, which may be empty.
            finish_reason: with the last piece, why it is the last.
            usage: so far; None to say null, as OpenAI does where usage comes at the end.
        """
        if not self._is_chat:
            return self._event([_TextChoice(index, text, finish_reason)], usage)
        piece = self._event([_DeltaChoice(index, _Said(content=text), finish_reason)], usage)
        if index in self._introduced:
            return piece
        self._introduced.add(index)
        opening = _DeltaChoice(index, _Said("assistant", ""), None)
        return self._event([opening], usage) + piece

    def usage_chunk(self, usage: Usage) -> bytes:
        """Return the event that has only the numbers of tokens."""
        return self._event([], usage)

    def _event(self, choices: list[_Choice], usage: Usage | msgspec.UnsetType | None) -> bytes:
        name = "chat.completion.chunk" if self._is_chat else "text_completion"
        chunk = _Answer(self.id, name, self._created, self._model, choices, usage)
        return b"data: " + _encode(chunk) + b"\n\n"


DONE = b"data: [DONE]\n\n"


def error_event(body: bytes) -> bytes:
    """Return an error as the last event of a stream."""
    return b"data: " + body + b"\n\n"
