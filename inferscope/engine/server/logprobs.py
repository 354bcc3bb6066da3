r"""Log probabilities in OpenAI's two forms: columns of a completion, rows of a chat.

A token whose bytes are not whole characters is written as `bytes:` and its escaped bytes, such as
`bytes:\xe2\x80`; a chat has the bytes of every token as numbers too.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from inferscope.engine.conversation import ScoredToken
from inferscope.engine.tokenizer import Tokenizer

_LEAST = -9999.0
"""OpenAI's value for a very unlikely token; JSON has no infinity."""


class CompletionLogprobs(msgspec.Struct):
    """Log probabilities of a completion's tokens, in columns.

    Attributes:
        text_offset: character of the text at which the token begins.
        top_logprobs: the likeliest tokens and the chosen one, by their text.
    """

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class _ChatToken(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class _ChosenChatToken(_ChatToken):
    top_logprobs: list[_ChatToken]


class ChatLogprobs(msgspec.Struct):
    """Log probabilities of a chat's tokens, one row each."""

    content: list[_ChosenChatToken]
    refusal: None = None


def completion_logprobs(tokenizer: Tokenizer, scored: Sequence[ScoredToken]) -> CompletionLogprobs:
    """Return the log probabilities of a completion's tokens."""
    columns = CompletionLogprobs([], [], [], [])
    for begin, logprobs in scored:
        text, logprob = _text(tokenizer.token_bytes(logprobs.token)), _bounded(logprobs.logprob)
        top: dict[str, float] = {}
        for token, value in logprobs.top:  # of tokens with equal text, the likeliest counts
            top.setdefault(_text(tokenizer.token_bytes(token)), _bounded(value))
        top.setdefault(text, logprob)
        columns.tokens.append(text)
        columns.token_logprobs.append(logprob)
        columns.top_logprobs.append(top)
        columns.text_offset.append(begin)
    return columns


def chat_logprobs(tokenizer: Tokenizer, scored: Sequence[ScoredToken]) -> ChatLogprobs:
    """Return the log probabilities of a chat's tokens."""

    def shown(token: int, logprob: float) -> tuple[str, float, list[int]]:
        content = tokenizer.token_bytes(token)
        return _text(content), _bounded(logprob), list(content)

    return ChatLogprobs(
        [
            _ChosenChatToken(
                *shown(logprobs.token, logprobs.logprob),
                [_ChatToken(*shown(token, value)) for token, value in logprobs.top],
            )
            for _, logprobs in scored
        ]
    )


def _text(content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)


def _bounded(logprob: float) -> float:
    return max(_LEAST, logprob)
