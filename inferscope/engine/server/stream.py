"""Transmission of a response: as one body, or as server-sent events.

    steps ──> conversations ──> next_deliveries() ──> send() ──> drained() ──> records

A chunk counts as delivered when the connection has nothing left to send; `send` returns earlier.
While it waits for a slow client, outputs are merged into the next chunk, and no other request
waits.
"""

from __future__ import annotations

import msgspec
from starlette.types import Send

from inferscope.engine.conversation import Delivery
from inferscope.engine.server.answers import DONE, Answer, Usage, error_event, usage_of
from inferscope.engine.server.errors import ApiError
from inferscope.engine.server.exchange import Choice, Exchange
from inferscope.engine.server.protocol import GenerationCall

Headers = list[tuple[bytes, bytes]]


async def send_whole(exchange: Exchange, answer: Answer, send: Send, headers: Headers) -> None:
    """Send all texts in one body when they are complete."""
    parts: list[list[Delivery]] = [[] for _ in exchange.choices]
    while not all(part and part[-1].finish for part in parts):
        for choice, delivery in await exchange.next_deliveries():
            parts[choice.number].append(delivery)
    texts = [
        (
            "".join(delivery.text for delivery in part),
            part[-1].finish,
            [scored for delivery in part for scored in delivery.scored],
        )
        for part in parts
    ]
    body = answer.whole(texts, _total(exchange))
    exchange.is_answered = True
    await send_body(send, 200, body, headers)
    blocked_ns = await exchange.connection.drained()
    for choice, part in zip(exchange.choices, parts, strict=True):
        choice.note_delivered(sum(delivery.num_tokens for delivery in part), blocked_ns)


async def send_events(
    exchange: Exchange, answer: Answer, call: GenerationCall, send: Send, headers: Headers
) -> None:
    """Send texts as they arrive; an error before the first delivery is raised, not sent."""
    deliveries = await exchange.next_deliveries()
    await send({"type": "http.response.start", "status": 200, "headers": [*_EVENTS, *headers]})
    is_last = False
    while not is_last:
        events = [_event(answer, call, choice, delivery) for choice, delivery in deliveries]
        exchange.is_answered = is_last = exchange.is_drained
        if is_last:
            if call.has_usage:
                events.append(answer.usage_chunk(_total(exchange)))
            events.append(DONE)
        await send(
            {"type": "http.response.body", "body": b"".join(events), "more_body": not is_last}
        )
        exchange.note_delivered(deliveries, await exchange.connection.drained())
        if not is_last:
            try:
                deliveries = await exchange.next_deliveries()
            except ApiError as error:
                last = {"type": "http.response.body", "body": error_event(error.body)}
                await send(last)
                return


async def send_body(send: Send, status: int, body: bytes, headers: Headers) -> None:
    """Send a JSON response."""
    length = (b"content-length", str(len(body)).encode())
    start = {"type": "http.response.start", "status": status}
    await send({**start, "headers": [(b"content-type", b"application/json"), length, *headers]})
    await send({"type": "http.response.body", "body": body})


_EVENTS: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # otherwise nginx buffers the events
]


def _event(answer: Answer, call: GenerationCall, choice: Choice, delivery: Delivery) -> bytes:
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    if call.has_running_usage:
        num_tokens = choice.num_delivered + delivery.num_tokens
        usage = usage_of(choice.num_prompt, num_tokens, choice.cached_tokens)
    elif call.has_usage:
        usage = None
    return answer.chunk(choice.number, delivery.text, delivery.finish, usage, delivery.scored)


def _total(exchange: Exchange) -> Usage:
    choices = exchange.choices
    # A prompt with several texts counts once.
    prompts = choices[:: exchange.num_each]
    return usage_of(
        sum(choice.num_prompt for choice in prompts),
        sum(choice.conversation.num_tokens for choice in choices),
        sum(choice.cached_tokens for choice in prompts),
    )
