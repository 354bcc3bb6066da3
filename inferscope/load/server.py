"""Server properties queried before the load: its model, and its tokens per word."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec

from inferscope.errors import BadInput, NotFound
from inferscope.load.chunks import Endpoint
from inferscope.load.prompts import WORDS

_TIMEOUT = aiohttp.ClientTimeout(total=10)
_COUNTING = ("vllm", "sglang", "inferscope")
"""Servers that send a token count with every chunk, by the `owned_by` of their models."""
ASSUMED_TOKENS_PER_WORD = 1.0


@dataclass(frozen=True)
class TokenizerRatio:
    """Number of tokens in the words that prompts are made of."""

    tokens_per_word: float
    """Mean tokens of a word."""
    template_tokens: int
    """Tokens that the chat template adds to each prompt."""
    is_measured: bool
    """Whether the server's tokenizer was asked; if not, the numbers are assumed."""


class _ListedModel(msgspec.Struct):
    id: str
    owned_by: str | None = None


class _Models(msgspec.Struct):
    data: list[_ListedModel]


class _Tokens(msgspec.Struct):
    count: int | None = None  # vLLM, SGLang
    tokens: list[Any] | None = None  # llama-server has this one only


async def find_model(
    session: aiohttp.ClientSession, url: str, model: str | None
) -> tuple[str, bool]:
    """Return the model to request, and whether the server counts tokens in every chunk.

    Raises:
        NotFound: no server responds at this address.
        BadInput: no model was given and the server names none.
    """
    try:
        async with session.get(f"{url}/v1/models", timeout=_TIMEOUT) as response:
            status, body = response.status, await response.read()
    except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
        why = getattr(error, "strerror", None) or type(error).__name__
        raise NotFound(
            f"no server answers at {url} ({why}). "
            'Start one, e.g. "inferscope serve builtin", or correct the URL.'
        ) from None
    try:
        listed = msgspec.json.decode(body, type=_Models).data if status == 200 else []
    except msgspec.DecodeError:
        listed = []
    if model is None and not listed:
        raise BadInput(
            f"{url}/v1/models names no model (HTTP {status}). Give its name with --model."
        )
    chosen = next((one for one in listed if model in (None, one.id)), None)
    name = model if chosen is None or model is not None else chosen.id
    assert name is not None
    return name, chosen is not None and chosen.owned_by in _COUNTING


async def measure_tokens_per_word(
    session: aiohttp.ClientSession, url: str, *, model: str, endpoint: Endpoint
) -> TokenizerRatio:
    """Return the tokens of the prompts' words, by the server's tokenizer if it can be queried."""
    text = " ".join(WORDS)
    # One body for all servers: llama-server reads `content`, the others `prompt`.
    plain = await _count(session, url, {"model": model, "prompt": text, "content": text})
    if not plain:
        return TokenizerRatio(ASSUMED_TOKENS_PER_WORD, 0, is_measured=False)
    in_template = None
    if endpoint == "chat":
        messages = [{"role": "user", "content": text}]
        in_template = await _count(session, url, {"model": model, "messages": messages})
    template_tokens = max(0, in_template - plain) if in_template else 0
    return TokenizerRatio(plain / len(WORDS), template_tokens, is_measured=True)


async def _count(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> int | None:
    try:
        async with session.post(f"{url}/tokenize", json=body, timeout=_TIMEOUT) as response:
            if response.status != 200:
                return None
            tokens = msgspec.json.decode(await response.read(), type=_Tokens)
    except (aiohttp.ClientError, asyncio.TimeoutError, OSError, msgspec.DecodeError):
        return None
    return tokens.count if tokens.count is not None else len(tokens.tokens or [])


def server_url(text: str) -> str:
    """Return a server's base URL, without a trailing slash or /v1.

    Raises:
        BadInput: it is not a server's address.
    """
    parts = urlsplit(text if "://" in text else f"http://{text}")
    try:
        is_fine = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # an invalid port
        is_fine = False
    if not is_fine or parts.query or parts.fragment:
        raise BadInput(f"{text!r} is not a server URL. Give one like http://127.0.0.1:8000.")
    if "@" in parts.netloc:
        raise BadInput(
            "the URL carries a password, which would be shown. "
            "Name the variable that holds the key with --api-key-env."
        )
    path = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    return f"{parts.scheme}://{parts.netloc}{path}"
