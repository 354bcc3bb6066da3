"""Bodies of OpenAI's streaming API: requests as sent, and the fields of a response that are read.

Only these fields are declared; servers add others, and omit or null any.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec

from inferscope.load.open_loop import TokenUsage
from inferscope.load.workload import PlannedRequest

Endpoint: TypeAlias = Literal["chat", "completions"]
PATHS: dict[Endpoint, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
_MOST_DETAIL = 200


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None  # vLLM, SGLang, llama-server
    reasoning: str | None = None  # vLLM's newer name
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None


class StreamChunk(msgspec.Struct):
    """One event of a streamed response."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None

    @property
    def has_text(self) -> bool:
        """Return whether it carries visible text: not a role, not an end."""
        for choice in self.choices:
            delta = choice.delta
            if choice.text or (
                delta
                and (
                    delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls
                )
            ):
                return True
        return False

    @property
    def is_last(self) -> bool:
        """Return whether it carries a finish reason."""
        return any(choice.finish_reason is not None for choice in self.choices)

    def account(self) -> TokenUsage | None:
        """Return the server's token count so far; None if it sends none."""
        usage = self.usage
        if usage is None:
            return None
        details = usage.prompt_tokens_details
        cached_tokens = None if details is None else details.cached_tokens
        return TokenUsage(usage.prompt_tokens, usage.completion_tokens, cached_tokens)


class _Refusal(msgspec.Struct):
    error: Any = None
    message: Any = None  # vLLM before it followed OpenAI's shape
    detail: Any = None  # FastAPI's own


_chunk = msgspec.json.Decoder(StreamChunk)
_refusal = msgspec.json.Decoder(_Refusal)


def read_chunk(data: bytes) -> StreamChunk:
    """Decode an event's data.

    Raises:
        msgspec.DecodeError: it is not a chunk.
    """
    return _chunk.decode(data)


def write_request(
    ask: PlannedRequest,
    *,
    model: str,
    endpoint: Endpoint,
    is_counting: bool,
    ignores_eos: bool,
    temperature: float | None,
    sends_seed: bool,
) -> bytes:
    """Return a request's body.

    Args:
        ask: the request.
        model: name of the model at the server.
        endpoint: chat or completions.
        is_counting: request a token count with every chunk, which few servers support.
        ignores_eos: request all of `max_tokens`; servers without this field ignore it.
        temperature: None leaves it to the server.
        sends_seed: request a reproducible response, which costs some servers time.
    """
    options = {"include_usage": True}
    if is_counting:
        options["continuous_usage_stats"] = True
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": ask.max_tokens,
        "stream": True,
        "stream_options": options,
    }
    if endpoint == "chat":
        body["messages"] = [{"role": "user", "content": ask.prompt}]
    else:
        body["prompt"] = ask.prompt
    if ignores_eos:
        body["ignore_eos"] = True
    if temperature is not None:
        body["temperature"] = temperature
    if sends_seed:
        body["seed"] = ask.seed
    return msgspec.json.encode(body)


def describe_error(error: object, *, prompt: str) -> str:
    """Return the message of an error object, short, on one line and without the prompt.

    Some servers quote the rejected prompt; prompts are never written.
    """
    if isinstance(error, dict):
        error = error.get("message") or error.get("type") or error.get("code")
    if not isinstance(error, str):
        return ""
    words = " ".join(error.split())[:_MOST_DETAIL]
    window = 16
    quotes = (words[at : at + window] for at in range(len(words) - window + 1))
    return "(it quotes the prompt)" if any(quote in prompt for quote in quotes) else words


def describe_refusal(body: bytes, *, prompt: str) -> str:
    """Return the reason in the body of an HTTP error, if it has one."""
    try:
        refusal = _refusal.decode(body)
    except msgspec.DecodeError:
        return ""
    return describe_error(refusal.error or refusal.message or refusal.detail, prompt=prompt)
