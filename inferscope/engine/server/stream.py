"""Writing an answer to its client: whole, or as server-sent events.

    engine's steps ──> conversations ──> news() ──> one piece ──> send() ──> drained() ──> records

A piece counts as written when the connection has nothing left to send; `send` alone returns
before. While it waits for a slow client, what the steps bring is gathered, so that the next piece
is larger; nobody else waits.
"""

from __future__ import annotations

import msgspec
from starlette.types import Send

from inferscope.engine.conversation import Delivery
from inferscope.engine.server.answers import DONE, Answer, Usage, error_event, usage_of
from inferscope.engine.server.errors import ApiError
from inferscope.engine.server.exchange import Choice, Exchange
from inferscope.engine.server.protocol import Ask

Headers = list[tuple[bytes, bytes]]


async def send_whole(exchange: Exchange, answer: Answer, send: Send, headers: Headers) -> None:
    """Wait for all texts and send them in one body."""
    parts: list[list[Delivery]] = [[] for _ in exchange.choices]
    while not all(part and part[-1].finish for part in parts):
        for choice, delivery in await exchange.news():
            parts[choice.number].append(delivery)
    texts = [("".join(delivery.text for delivery in part), part[-1].finish) for part in parts]
    body = answer.whole(texts, _total(exchange))
    exchange.is_answered = True
    await send_body(send, 200, body, headers)
    blocked_ns = await exchange.line.drained()
    for choice, part in zip(exchange.choices, parts, strict=True):
        choice.wrote(sum(delivery.num_tokens for delivery in part), blocked_ns)


async def send_events(
    exchange: Exchange, answer: Answer, ask: Ask, send: Send, headers: Headers
) -> None:
    """Send texts as they come; the first piece decides whether the status is an error's."""
    news = await exchange.news()
    await send({"type": "http.response.start", "status": 200, "headers": [*_EVENTS, *headers]})
    is_last = False
    while not is_last:
        events = [_event(answer, ask, choice, delivery) for choice, delivery in news]
        exchange.is_answered = is_last = exchange.is_taken
        if is_last:
            if ask.has_usage:
                events.append(answer.usage_chunk(_total(exchange)))
            events.append(DONE)
        await send(
            {"type": "http.response.body", "body": b"".join(events), "more_body": not is_last}
        )
        exchange.wrote(news, await exchange.line.drained())
        if not is_last:
            try:
                news = await exchange.news()
            except ApiError as error:
                last = {"type": "http.response.body", "body": error_event(error.body)}
                await send(last)
                return


async def send_body(send: Send, status: int, body: bytes, headers: Headers) -> None:
    """Send a JSON body."""
    length = (b"content-length", str(len(body)).encode())
    start = {"type": "http.response.start", "status": status}
    await send({**start, "headers": [(b"content-type", b"application/json"), length, *headers]})
    await send({"type": "http.response.body", "body": body})


_EVENTS: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would gather the events
]


def _event(answer: Answer, ask: Ask, choice: Choice, delivery: Delivery) -> bytes:
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    if ask.has_running_usage:
        num_tokens = choice.num_written + delivery.num_tokens
        usage = usage_of(choice.num_prompt, num_tokens, choice.cached_tokens)
    elif ask.has_usage:
        usage = None
    return answer.chunk(choice.number, delivery.text, delivery.finish, usage)


def _total(exchange: Exchange) -> Usage:
    choices = exchange.choices
    # Of several answers to one prompt, the prompt counts once.
    prompts = choices[:: exchange.num_each]
    return usage_of(
        sum(choice.num_prompt for choice in prompts),
        sum(choice.talk.num_tokens for choice in choices),
        sum(choice.cached_tokens for choice in prompts),
    )
