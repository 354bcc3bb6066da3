"""The open loop: requests leave at their own times, however late the answers are.

A closed loop waits for the server and so never sees it fall behind (coordinated omission). Here
each request is a task that starts at its time; when the generator itself is late, that shows as
`sent` after `scheduled` in the client's own timestamps, which are kept to check ours against.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import asdict, dataclass
from typing import IO, Protocol

import msgspec

from inferscope.load.workload import Ask


class Client(Protocol):
    """What the generator needs of a server."""

    def ask(self, ask: Ask) -> AsyncIterator[int]:
        """Send a request; yield the number of tokens of each delivery as it arrives."""


@dataclass
class ClientTimes:
    """One request as its client saw it; monotonic nanoseconds, None for what never came."""

    name: str
    kind: str
    scheduled_ns: int
    sent_ns: int
    first_token_ns: int | None = None
    last_token_ns: int | None = None
    tokens: int = 0
    error: str = ""


class OpenLoop:
    """Drives a client with a stream of asks.

    Attributes:
        times: of finished requests, in the order in which they ended.
    """

    def __init__(self, client: Client, asks: Iterable[Ask]) -> None:
        """Take the client and the stream."""
        self._client = client
        self._asks = asks
        self._tasks: set[asyncio.Task[None]] = set()
        self.times: list[ClientTimes] = []

    async def run(self, duration_s: float | None) -> None:
        """Send for this long (None: until cancelled), then wait for what is under way."""
        began_ns = time.monotonic_ns()
        for ask in self._asks:
            if duration_s is not None and ask.at_s > duration_s:
                break
            scheduled_ns = began_ns + round(ask.at_s * 1e9)
            wait_ns = scheduled_ns - time.monotonic_ns()
            # Late or not, the others in this event loop get their turn.
            await asyncio.sleep(max(0, wait_ns) / 1e9)
            task = asyncio.create_task(self._one(ask, scheduled_ns))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _one(self, ask: Ask, scheduled_ns: int) -> None:
        times = ClientTimes(ask.name, ask.kind, scheduled_ns, time.monotonic_ns())
        try:
            async for num_tokens in self._client.ask(ask):
                now_ns = time.monotonic_ns()
                times.tokens += num_tokens
                times.last_token_ns = now_ns
                if times.first_token_ns is None:
                    times.first_token_ns = now_ns
        except Exception as error:
            times.error = f"{type(error).__name__}: {error}"
        self.times.append(times)

    def write(self, out: IO[bytes]) -> None:
        """Write the client's timestamps as JSON lines."""
        for times in self.times:
            out.write(msgspec.json.encode(asdict(times)) + b"\n")
