"""Client of an OpenAI-compatible server: streamed responses, timed as bytes arrive.

A delivery is timed when the bytes that complete it leave the socket, before they are parsed; events
that arrive in one read have one time. A request is sent once: no retry, no redirect, no cookie, no
proxy from the environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

import aiohttp
import msgspec

from inferscope.load import chunks
from inferscope.load.open_loop import ReceivedTokens, RequestFailed, TokenUsage
from inferscope.load.sse import EndlessEvent, SseParser
from inferscope.load.workload import PlannedRequest

_KEEP_ALIVE_S = 3.0
"""Seconds to keep an idle connection.

Uvicorn closes idle connections after 5 s; a request sent into a closing connection would fail
through no fault of the server.
"""
_LINGER_S = 1.0
_MOST_ERROR_BYTES = 1 << 16
_DONE = b"[DONE]"


@dataclass(frozen=True, kw_only=True)
class HttpOptions:
    """Options of requests.

    Attributes:
        url: URL of the server, without a path.
        model: name of the model there.
        endpoint: chat or completions.
        timeout_s: timeout of a whole request.
        ignores_eos: whether to request responses of full length.
        is_counting: whether to request a token count with every chunk.
        temperature: sampling temperature; None leaves it to the server.
        sends_seed: whether requests carry their sampling seeds.
        tokens_per_word: mean tokens of a word in prompts; None omits `X-InferScope-Parts`.
    """

    url: str
    model: str
    endpoint: chunks.Endpoint = "chat"
    timeout_s: float = 120.0
    ignores_eos: bool = False
    is_counting: bool = False
    temperature: float | None = None
    sends_seed: bool = False
    tokens_per_word: float | None = None


def open_session(*, api_key: str | None = None) -> aiohttp.ClientSession:
    """Open a session without defaults of its own; the caller closes it.

    It has no connection limit, at which requests would wait unseen: the open loop has one.
    """
    headers = {"Accept-Encoding": "identity"}
    if api_key is not None:
        headers["Authorization"] = f"Bearer {api_key}"
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(
            limit=0, keepalive_timeout=_KEEP_ALIVE_S, ttl_dns_cache=3600
        ),
        cookie_jar=aiohttp.DummyCookieJar(),
        headers=headers,
    )


class HttpClient:
    """HTTP client of a server."""

    def __init__(self, session: aiohttp.ClientSession, options: HttpOptions) -> None:
        """Keep an open session, which the caller closes."""
        self._session = session
        self._options = options
        self._url = options.url + chunks.PATHS[options.endpoint]
        self._timeout = aiohttp.ClientTimeout(total=options.timeout_s)

    async def ask(self, ask: PlannedRequest) -> AsyncIterator[ReceivedTokens]:
        """Send a request; yield a delivery for each event with tokens, and the usage.

        Raises:
            RequestFailed: any failure, by its kind.
        """
        options = self._options
        headers = {"Content-Type": "application/json", "X-Request-Id": ask.name}
        if ask.traceparent:
            headers["traceparent"] = ask.traceparent
        if options.tokens_per_word is not None:
            headers["X-InferScope-Parts"] = parts_of(ask, options.tokens_per_word)
        body = chunks.write_request(
            ask,
            model=options.model,
            endpoint=options.endpoint,
            is_counting=options.is_counting,
            ignores_eos=options.ignores_eos,
            temperature=options.temperature,
            sends_seed=options.sends_seed,
        )
        with self._naming_failures():
            async with self._session.post(
                self._url, data=body, headers=headers, timeout=self._timeout, allow_redirects=False
            ) as response:
                if response.status != 200:
                    refusal = await response.content.read(_MOST_ERROR_BYTES)
                    detail = chunks.describe_refusal(refusal, prompt=ask.prompt)
                    raise RequestFailed(f"HTTP {response.status}", detail)
                if response.content_type != "text/event-stream":
                    raise RequestFailed("no stream", response.content_type)
                answer = _ResponseReader(ask, is_counting=options.is_counting)
                async for piece in response.content.iter_any():
                    for delivery in answer.take(piece, time.monotonic_ns()):
                        yield delivery
                    if answer.is_done:
                        break
                answer.close()
                await _reach_end(response.content)

    @contextlib.contextmanager
    def _naming_failures(self) -> Iterator[None]:
        try:
            yield
        except asyncio.TimeoutError:
            raise RequestFailed("timeout", f"after {self._options.timeout_s:g} s") from None
        except aiohttp.ClientConnectorError as error:
            raise RequestFailed("cannot connect", error.strerror or type(error).__name__) from None
        except aiohttp.ClientConnectionError:
            raise RequestFailed("disconnected", "before the answer") from None
        except aiohttp.ClientPayloadError:
            raise RequestFailed("disconnected", "in the middle of the answer") from None
        except aiohttp.ClientResponseError:
            raise RequestFailed("not HTTP", "no status line or headers") from None
        except (msgspec.DecodeError, EndlessEvent) as error:
            raise RequestFailed("garbage", type(error).__name__) from None


def parts_of(ask: PlannedRequest, tokens_per_word: float) -> str:
    """Return the parts of a prompt of words, in the header's format."""
    parts, at = [], 0
    for name, num_chars in ask.sections:
        num_words = len(ask.prompt[at : at + num_chars].split())
        parts.append(f"{name}={round(num_words * tokens_per_word)}")
        at += num_chars
    return ",".join(parts)


class _ResponseReader:
    """Reader of one streamed response."""

    def __init__(self, ask: PlannedRequest, *, is_counting: bool) -> None:
        self._ask = ask
        self._parser = SseParser()
        self._is_counting = is_counting
        self._num_counted = 0
        self._has_finish = False
        self.is_done = False

    def take(self, piece: bytes, at_ns: int) -> Iterator[ReceivedTokens]:
        """Yield the deliveries that the bytes complete.

        Raises:
            RequestFailed: the server reports an error inside the stream.
        """
        for data in self._parser.feed(piece):
            if data == _DONE:
                self.is_done = True
                break
            chunk = chunks.read_chunk(data)
            if chunk.error is not None:
                detail = chunks.describe_error(chunk.error, prompt=self._ask.prompt)
                raise RequestFailed("error in the stream", detail)
            self._has_finish |= chunk.is_last
            usage = chunk.account()
            num_tokens = self._count(chunk, usage)
            if num_tokens or usage:
                yield ReceivedTokens(at_ns, num_tokens, usage)

    def close(self) -> None:
        """Check that the response was completed.

        Raises:
            RequestFailed: the stream ended without a finish reason.
        """
        if not (self.is_done or self._has_finish):
            raise RequestFailed("cut off", "no finish_reason and no [DONE]")

    def _count(self, chunk: chunks.StreamChunk, usage: TokenUsage | None) -> int:
        """Return the number of tokens in a chunk: one, unless the server counts along.

        Usage alone proves nothing: many servers send it once, in the last chunk. A server that
        sends a chunk of text without it does not count along.
        """
        if usage is None and chunk.has_text:
            self._is_counting = False
        if not self._is_counting or usage is None or not chunk.choices:
            return int(chunk.has_text)
        num_new = max(0, usage.output_tokens - self._num_counted)
        self._num_counted += num_new
        return num_new


async def _reach_end(content: aiohttp.StreamReader) -> None:
    """Read a complete response to its end, so that its connection can be reused."""
    if not content.at_eof():
        with contextlib.suppress(asyncio.TimeoutError, aiohttp.ClientError):
            await asyncio.wait_for(content.read(1), _LINGER_S)
