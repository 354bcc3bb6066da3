"""OpenAI requests: parsing, validation, and conversion to generation calls.

Unknown fields are ignored. An unsupported field that would change the text is rejected unless its
value is neutral, so that no parameter is dropped silently.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Annotated, Any, TypeVar

import msgspec

from inferscope.engine.request import MOST_LOGPROBS, BadRequest, Sampling
from inferscope.engine.server.errors import ApiError, bad_field
from inferscope.engine.tokenizer import Sections

_RECORDED = ("max_tokens", "temperature", "top_p", "top_k", "seed", "n")
"""Request fields to record: numbers only, no text of the client's."""
MOST_CHOICES = 256
"""Maximum texts per HTTP request."""
MOST_CONTAINERS = 100_000
"""Maximum lists and objects in a body: decoding them holds the GIL for 0.13 s."""
MOST_MEMBERS = 250_000
"""Maximum object members in a body: with distinct names they take as long."""
MOST_MESSAGES = 10_000
"""Maximum messages in a chat; its template iterates over all of them."""
MOST_DETOKENIZED = 250_000
"""Maximum ids per detokenize request; the tokenizer holds the GIL meanwhile."""
MOST_LOGPROB_ENTRIES = 250_000
"""Maximum log probabilities per response: writing them takes the event loop up to 0.35 s."""
_MOST_STOPS, _MOST_STOP_CHARS = 64, 1024
_MOST_SALT_CHARS = 1024
_DEFAULT_MAX_TOKENS = 16
_MOST_SEED = 2**63 - 1
_NONE = (None, False)
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "length_penalty": (None, 1),
    "min_p": (None, 0),
    "logit_bias": (None, {}),
    "top_logprobs": (None, 0),
    "prompt_logprobs": (None,),
    "echo": _NONE,
    "bad_words": (None, []),
    "allowed_token_ids": (None,),
    "truncate_prompt_tokens": (None,),
    "include_stop_str_in_output": _NONE,
    "prompt_embeds": (None, []),
    "continue_final_message": _NONE,
    "add_generation_prompt": (None, True),
    "suffix": (None, ""),
    "best_of": (None, 1),
    "use_beam_search": _NONE,
    "tools": (None, []),
    "functions": (None, []),
    "response_format": (None, {"type": "text"}),
    "structured_outputs": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "guided_choice": (None,),
    "guided_grammar": (None,),
}


_Int = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
"""Integer of 64 bits, the range of the engine's messages and of torch."""


class StreamOptions(msgspec.Struct):
    """Options for token counts in a stream."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class _Generation(msgspec.Struct):
    """Fields of both kinds of request; null is equivalent to an omitted field."""

    model: str | None = None
    n: _Int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: _Int | None = None
    min_tokens: _Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: _Int | None = None
    seed: _Int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: Annotated[list[_Int], msgspec.Meta(max_length=1024)] | None = None
    ignore_eos: bool | None = None
    cache_salt: Annotated[str, msgspec.Meta(min_length=1, max_length=_MOST_SALT_CHARS)] | None = (
        None
    )


class CompletionRequest(_Generation, kw_only=True):
    """Body of POST /v1/completions."""

    prompt: str | list[str | _Int | list[_Int]]
    logprobs: _Int | bool | None = None


class ContentPart(msgspec.Struct):
    """A typed part of a message."""

    type: str
    text: str | None = None
    part: Any = None
    """Label of the part in the records (`server.parts`); the model does not see it."""


class FunctionCall(msgspec.Struct):
    """Call of a function in an earlier answer.

    The arguments are an object, or text that is none, as models write it at times.
    """

    name: str
    arguments: str | dict[str, Any] = ""


class ToolCall(msgspec.Struct):
    """Call of a tool in an earlier answer."""

    function: FunctionCall
    id: str | None = None


class Message(msgspec.Struct):
    """One turn of a chat."""

    role: str
    content: str | list[ContentPart] | None = None
    tool_calls: list[ToolCall] | None = None
    function_call: FunctionCall | None = None
    """OpenAI's former field for one call."""
    tool_call_id: str | None = None
    """Call whose result the message is."""
    name: str | None = None
    part: Any = None
    """Label of the whole message, as for a text part."""

    @property
    def calls(self) -> list[ToolCall]:
        """All calls of the message."""
        former = [] if self.function_call is None else [ToolCall(self.function_call)]
        return (self.tool_calls or []) + former


_Messages = Annotated[list[Message], msgspec.Meta(min_length=1, max_length=MOST_MESSAGES)]


class ChatRequest(_Generation, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: _Messages
    max_completion_tokens: _Int | None = None
    logprobs: bool | None = None
    top_logprobs: _Int | None = None
    chat_template_kwargs: dict[str, Any] | None = None


_WHOLE = frozenset(
    (
        *("n", "max_tokens", "max_completion_tokens", "min_tokens", "top_k", "seed"),
        *("logprobs", "top_logprobs"),
    )
)


class TokenizeRequest(msgspec.Struct):
    """Body of POST /tokenize: a prompt, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: _Messages | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of POST /detokenize."""

    model: str | None = None
    tokens: list[_Int]


class GenerationCall(msgspec.Struct, frozen=True, kw_only=True):
    """A validated request for text.

    Attributes:
        prompts: prompts, all texts or all token lists.
        num_each: number of texts per prompt.
        stops: strings that end a text.
        has_usage: whether a stream ends with the token counts.
        has_running_usage: whether each chunk has the token counts.
        sections: names and lengths in characters of the sections of a chat's prompt.
        given: numbers that the client gave, for the records.
        cache_salt: text that keeps the cached blocks of the prompts apart; empty for none.
    """

    prompts: list[str | list[int]]
    num_each: int
    sampling: Sampling
    stops: tuple[str, ...]
    is_stream: bool
    has_usage: bool
    has_running_usage: bool
    sections: Sections = ()
    given: Mapping[str, str] = {}
    cache_salt: str = ""


_Body = TypeVar("_Body")


def parse(body: bytes, kind: type[_Body]) -> _Body:
    """Parse a request body.

    Raises:
        ApiError: the body is not JSON or has too many lists and objects, a field is missing or of
            the wrong type, or an unsupported field is not neutral.
    """
    _check_amounts(*_amounts(body))
    try:
        given = msgspec.json.decode(body)
        if isinstance(given, dict):
            _make_whole(given)
        read = msgspec.convert(given, kind)
        if isinstance(read, ChatRequest | TokenizeRequest) and read.messages:
            _read_arguments(read.messages)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$")
        param = path.strip("`").lstrip(".")
        where = f"{param}: " if param else ""
        raise bad_field(param or "body", f"{where}{message}. See docs/serve.md.") from None
    except RecursionError:
        raise ApiError(400, "body is nested too deeply. Flatten it.", code="invalid_json") from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        # The decoder's message would quote the body.
        raise ApiError(
            400, "the body is not valid JSON. Correct it.", code="invalid_json"
        ) from None
    if isinstance(read, _Generation):
        _check_neutral(given, read.__struct_fields__)
    return read


def _amounts(body: bytes) -> tuple[int, int]:
    """Return the number of lists and objects in a body, and of object members.

    The numbers are upper bounds if these are within the limits.
    """
    num_containers, num_members = body.count(b"[") + body.count(b"{"), body.count(b":")
    if num_containers > MOST_CONTAINERS or num_members > MOST_MEMBERS:
        # Strings may contain these characters.
        body = b"".join(body.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')[::2])
        num_containers, num_members = body.count(b"[") + body.count(b"{"), body.count(b":")
    return num_containers, num_members


def _check_amounts(num_containers: int, num_members: int) -> None:
    if num_containers > MOST_CONTAINERS or num_members > MOST_MEMBERS:
        raise ApiError(
            413,
            f"the body holds too many lists and objects. Send at most {MOST_CONTAINERS}, and "
            f"{MOST_MEMBERS} members of objects.",
            code="body_too_large",
        )


def _read_arguments(messages: list[Message]) -> None:
    """Parse the arguments of calls, which are JSON in a string; templates expect objects.

    All together are limited as a body is, whose count leaves out what is inside a string.
    """
    num_containers, num_members = 0, 0
    for call in (call.function for message in messages for call in message.calls):
        if not isinstance(call.arguments, str):
            continue
        content = call.arguments.encode()
        more_containers, more_members = _amounts(content)
        num_containers += more_containers
        num_members += more_members
        _check_amounts(num_containers, num_members)
        with suppress(msgspec.DecodeError):
            arguments = msgspec.json.decode(content)
            if isinstance(arguments, dict):
                call.arguments = arguments


def _make_whole(given: dict[str, object]) -> None:
    """Convert `5.0` to `5` in integer fields: some clients have only floating-point numbers."""
    for name in _WHOLE & given.keys():
        if isinstance(value := given[name], float) and value.is_integer():
            given[name] = int(value)


def _check_neutral(given: Mapping[str, object], supported: Collection[str]) -> None:
    """Reject unsupported fields whose value is not neutral."""
    for name in (_NEUTRAL.keys() & given.keys()).difference(supported):
        value, allowed = given[name], _NEUTRAL[name]
        is_bool = isinstance(value, bool)
        if not any(value == one and isinstance(one, bool) == is_bool for one in allowed):
            shown = msgspec.json.encode(allowed[-1]).decode()
            raise bad_field(name, f"{name} is not supported. Leave it out, or give {shown}.")


def completion_call(request: CompletionRequest, *, max_model_tokens: int) -> GenerationCall:
    """Convert a completion request to a generation call."""
    given = request.prompt
    prompts: list[str | list[int]] = []
    if isinstance(given, str):
        prompts = [given]
    elif given and all(isinstance(part, int) for part in given):
        prompts = [[part for part in given if isinstance(part, int)]]
    else:
        prompts = [part for part in given if not isinstance(part, int)]
        if len(prompts) < len(given) or len({type(part) for part in prompts}) > 1:
            raise bad_field(
                "prompt",
                "prompt mixes texts and tokens. Give a string, a list of strings, a list of token "
                "ids, or a list of lists of token ids.",
            )
    if not prompts:
        raise bad_field("prompt", "prompt is an empty list. Give at least one prompt.")
    limit = _or(request.max_tokens, _DEFAULT_MAX_TOKENS)
    return _generation_call(request, prompts, limit, max_model_tokens)


def chat_call(
    request: ChatRequest, prompt: str, *, max_model_tokens: int, sections: Sections = ()
) -> GenerationCall:
    """Convert a chat request and its rendered prompt to a generation call."""
    limit = _or(request.max_completion_tokens, _or(request.max_tokens, max_model_tokens))
    return _generation_call(request, [prompt], limit, max_model_tokens, sections)


def _generation_call(
    request: _Generation,
    prompts: list[str | list[int]],
    max_tokens: int,
    max_model_tokens: int,
    sections: Sections = (),
) -> GenerationCall:
    num_each = _or(request.n, 1)
    most_each = MOST_CHOICES // len(prompts)
    if not 1 <= num_each <= most_each:
        raise bad_field(
            "n",
            f"n is {num_each} for {len(prompts)} prompts. Give at least 1; one request may ask "
            f"for {MOST_CHOICES} texts.",
        )
    if request.seed is not None and request.seed + num_each - 1 > _MOST_SEED:
        raise bad_field(
            "seed",
            f"seed is {request.seed} for n = {num_each}, whose answers take the seeds from there "
            f"on. Give at most {_MOST_SEED - num_each + 1}.",
        )
    num_logprobs = _num_logprobs(request)
    if num_logprobs is not None:
        num_tokens = len(prompts) * num_each * min(max_tokens, max_model_tokens)
        most_tokens = MOST_LOGPROB_ENTRIES // (1 + num_logprobs)
        if num_tokens > most_tokens:
            raise bad_field(
                "max_tokens",
                f"{num_tokens} tokens with the log probabilities of {num_logprobs} others each are "
                f"too many. Lower max_tokens, n or the number of others: at most {most_tokens} "
                "tokens.",
            )
    options = request.stream_options or StreamOptions()
    return GenerationCall(
        prompts=prompts,
        num_each=num_each,
        sampling=_sampling(request, max_tokens, num_logprobs),
        stops=_stops(request.stop),
        is_stream=bool(request.stream),
        has_usage=bool(options.include_usage),
        has_running_usage=bool(options.continuous_usage_stats and options.include_usage),
        sections=sections,
        given=_given(request),
        cache_salt=request.cache_salt or "",
    )


def _given(request: _Generation) -> dict[str, str]:
    """Return the numbers that a client gave, by the exporters' names."""
    numbers: dict[str, int | float | None] = {name: getattr(request, name) for name in _RECORDED}
    if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
        numbers["max_tokens"] = request.max_completion_tokens
    return {name: str(number) for name, number in numbers.items() if number is not None}


def _num_logprobs(request: _Generation) -> int | None:
    """Return the number of likeliest tokens per position that a client asks for."""
    if isinstance(request, ChatRequest):
        name, num = "top_logprobs", _or(request.top_logprobs, 0)
        if not request.logprobs:
            if num:
                raise bad_field(name, f"{name} is {num} without logprobs. Set logprobs to true.")
            return None
    else:
        assert isinstance(request, CompletionRequest)
        if request.logprobs is None or request.logprobs is False:
            return None
        name, num = "logprobs", request.logprobs
    if num is True or not 0 <= num <= MOST_LOGPROBS:
        shown = msgspec.json.encode(num).decode()
        raise bad_field(name, f"{name} is {shown}. Give a number from 0 to {MOST_LOGPROBS}.")
    return num


def _sampling(request: _Generation, max_tokens: int, num_logprobs: int | None) -> Sampling:
    top_k = _or(request.top_k, 0)
    try:
        return Sampling(
            max_tokens=max_tokens,
            min_tokens=_or(request.min_tokens, 0),
            temperature=_or(request.temperature, 1.0),
            top_k=0 if top_k == -1 else top_k,  # vLLM's value for all tokens
            top_p=_or(request.top_p, 1.0),
            seed=request.seed,
            stop_token_ids=tuple(request.stop_token_ids or ()),
            ignore_eos=bool(request.ignore_eos),
            logprobs=num_logprobs,
        )
    except BadRequest as error:
        name = re.match(r"\w+", str(error))
        raise bad_field(name.group() if name else "body", str(error)) from None


def _stops(given: str | list[str] | None) -> tuple[str, ...]:
    stops = (given,) if isinstance(given, str) else tuple(given or ())
    if not all(0 < len(stop) <= _MOST_STOP_CHARS for stop in stops) or len(stops) > _MOST_STOPS:
        raise bad_field(
            "stop",
            f"stop holds {len(stops)} strings of {min(map(len, stops))} to {max(map(len, stops))} "
            f"characters. Give at most {_MOST_STOPS}, of 1 to {_MOST_STOP_CHARS} characters.",
        )
    return stops


_Value = TypeVar("_Value")


def _or(value: _Value | None, default: _Value) -> _Value:
    return default if value is None else value
