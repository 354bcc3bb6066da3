"""Clients of an OpenAI-compatible server that keep their own account of what they were given."""

from __future__ import annotations

import asyncio
import json
import random
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import aiohttp


@dataclass
class Ask:
    """A request, and what became of it by the client's own clock and the server's `usage`."""

    name: str
    body: dict[str, Any]
    give_up_after: int | None = None
    """Events after which the client hangs up."""
    status: int = 0
    sent_ns: int = 0
    first_ns: int = 0
    ended_ns: int = 0
    usage: dict[str, Any] = field(default_factory=dict)
    text: str = ""

    @property
    def is_whole(self) -> bool:
        """Return whether the response was complete."""
        return self.status == 200 and self.give_up_after is None


def mixed_asks(
    seed: int, num: int, *, prompts: tuple[int, int], outputs: tuple[int, int]
) -> list[Ask]:
    """Make streams, plain requests, twins (n=2), requests that are given up, and refused ones."""
    rng = random.Random(seed)
    shared = [rng.randrange(10, 4000) for _ in range(300)]
    asks = []
    for number in range(num):
        prompt = [rng.randrange(10, 4000) for _ in range(rng.randint(*prompts))]
        if number % 4 == 1:
            prompt = shared + prompt[:40]
        body: dict[str, Any] = {
            "model": "tiny",
            "prompt": prompt,
            "max_tokens": rng.randint(*outputs),
            "ignore_eos": True,
            "temperature": 0,
            "stream": number % 5 != 3,
        }
        if body["stream"]:
            body["stream_options"] = {"include_usage": True}
        if number % 6 == 2:
            # No seed: vLLM on a CPU dies of one in a prompt that is computed in chunks.
            body |= {"n": 2, "temperature": 0.9}
        give_up = 4 if number % 8 == 6 and body["stream"] else None
        asks.append(Ask(f"ask-{seed}-{number}", body, give_up))
    asks.append(Ask(f"ask-{seed}-long", {"model": "tiny", "prompt": [7] * 4000, "max_tokens": 4}))
    asks.append(Ask(f"ask-{seed}-lost", {"model": "absent", "prompt": "x", "max_tokens": 4}))
    return asks


def ask_all(url: str, asks: list[Ask], *, at_once: int, path: str = "/v1/completions") -> None:
    """Send requests with bounded concurrency while another task checks the server's health."""
    asyncio.run(_ask_all(url, asks, at_once, path))


async def _ask_all(url: str, asks: list[Ask], at_once: int, path: str) -> None:
    waiting = list(reversed(asks))
    connector = aiohttp.TCPConnector(limit=0)
    sending = aiohttp.TraceConfig()
    sending.on_request_headers_sent.append(_note_sent)
    async with aiohttp.ClientSession(url, connector=connector, trace_configs=[sending]) as session:

        async def work() -> None:
            while waiting:
                await _ask(session, waiting.pop(), path)

        nurse = asyncio.create_task(_look_after(session))
        await asyncio.gather(*(work() for _ in range(at_once)))
        nurse.cancel()
        with suppress(asyncio.CancelledError):
            await nurse


async def _note_sent(_: aiohttp.ClientSession, context: Any, __: Any) -> None:
    """Note when a request left: a client that sends twelve at once gets to the last one late."""
    ask = context.trace_request_ctx
    if ask is not None:
        ask.sent_ns = time.monotonic_ns()


async def _look_after(session: aiohttp.ClientSession) -> None:
    while True:
        async with session.get("/health") as answer:
            await answer.read()
        await asyncio.sleep(0.05)


async def _ask(session: aiohttp.ClientSession, ask: Ask, path: str) -> None:
    num_events = 0
    headers = {"X-Request-Id": ask.name}
    async with session.post(path, json=ask.body, headers=headers, trace_request_ctx=ask) as answer:
        ask.status = answer.status
        if not ask.body.get("stream"):
            whole = await answer.read()
            ask.first_ns = ask.ended_ns = time.monotonic_ns()
            if answer.status == 200:
                document = json.loads(whole)
                ask.usage = document["usage"]
                ask.text = "".join(choice["text"] for choice in document["choices"])
            return
        async for line in answer.content:
            if not line.startswith(b"data: {"):
                continue
            ask.first_ns = ask.first_ns or time.monotonic_ns()
            event = json.loads(line[6:])
            if "error" in event:
                raise ConnectionError(f"{ask.name}: {event['error']}")
            ask.usage = event.get("usage") or ask.usage
            ask.text += "".join(choice.get("text", "") for choice in event["choices"])
            num_events += 1
            if ask.give_up_after is not None and num_events >= ask.give_up_after:
                answer.close()
                break
    ask.ended_ns = time.monotonic_ns()
