"""Open loop: requests are sent at their scheduled times, independently of responses.

A closed loop waits for the server and so never sees it fall behind (coordinated omission). Here
each request is a task that starts at its time. If the generator itself is late, `sent` is after
`scheduled` in the client's own timestamps, which are kept to check InferScope's against.

Every scheduled request ends as exactly one `ClientTimes`, reported when it ends.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Literal, Protocol, TypeAlias

import msgspec

from inferscope.load.workload import PlannedRequest

Outcome: TypeAlias = Literal["finished", "error", "refused", "abandoned"]
"""Outcomes. `refused`: by the generator, which had too many open; `abandoned`: the load stopped."""


class TokenUsage(msgspec.Struct, frozen=True, gc=False):
    """Token usage of a request, as the server reports it."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None = None


class ReceivedTokens(msgspec.Struct, frozen=True, gc=False):
    """One delivery to the client: tokens, or the server's usage of the whole request."""

    at_ns: int
    num_tokens: int = 0
    usage: TokenUsage | None = None


class RequestFailed(Exception):
    """Failure of a request, counted by its short kind."""

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(f"{kind}: {detail}" if detail else kind)
        self.kind = kind
        self.detail = detail


class Client(Protocol):
    """Client of a server, for the generator."""

    def ask(self, ask: PlannedRequest) -> AsyncIterator[ReceivedTokens]:
        """Send a request; yield each delivery as it arrives, in time order.

        Raises:
            RequestFailed: it did not complete.
        """


@dataclass
class ClientTimes:
    """One request as its client observed it.

    Times are monotonic nanoseconds, None for events that never came.

    Attributes:
        sent_ns: also the time of a refusal.
        sent_at_unix_ns: `sent_ns` on the wall clock, to compare with other machines' logs.
        tokens: tokens counted from the deliveries.
        repeated_share: see `PlannedRequest`.
        tbt_ns: gaps between deliveries of tokens.
        error: kind of the failure.
        detail: message of the failure.
    """

    name: str
    kind: str
    scheduled_ns: int
    sent_ns: int
    sent_at_unix_ns: int
    traceparent: str = ""
    first_token_ns: int | None = None
    last_token_ns: int | None = None
    ended_ns: int | None = None
    outcome: Outcome = "finished"
    tokens: int = 0
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    repeated_share: float | None = None
    tbt_ns: list[int] = field(default_factory=list)
    error: str = ""
    detail: str = ""

    def take(self, delivery: ReceivedTokens) -> None:
        """Record a delivery."""
        usage = delivery.usage
        if usage is not None:
            self.prompt_tokens = usage.prompt_tokens
            self.output_tokens = usage.output_tokens
            self.cached_tokens = usage.cached_tokens
        if delivery.num_tokens:
            self.tokens += delivery.num_tokens
            if self.last_token_ns is None:
                self.first_token_ns = delivery.at_ns
            else:
                self.tbt_ns.append(delivery.at_ns - self.last_token_ns)
            self.last_token_ns = delivery.at_ns

    def fail(self, outcome: Outcome, error: str, detail: str = "") -> None:
        """Record a failure."""
        self.outcome, self.error, self.detail = outcome, error, detail

    def to_json(self) -> bytes:
        """Return one line of JSON."""
        return msgspec.json.encode(asdict(self)) + b"\n"


class OpenLoop:
    """Driver of a client with a stream of planned requests.

    Attributes:
        num_scheduled: requests whose time has passed.
    """

    def __init__(
        self,
        client: Client,
        asks: Iterable[PlannedRequest],
        report: Callable[[ClientTimes], None],
        *,
        most_open: int | None = None,
    ) -> None:
        """Keep the client and the stream.

        Args:
            client: client of the server.
            asks: planned requests in time order.
            report: callback for each request as it ends.
            most_open: maximum number of open requests; further ones are refused, not delayed: a
                delay would close the loop.
        """
        self._client = client
        self._asks = asks
        self._report = report
        self._most_open = most_open
        self._tasks: set[asyncio.Task[None]] = set()
        self._alarm: asyncio.Future[None] | None = None
        self._is_stopped = False
        self.num_scheduled = 0

    @property
    def num_open(self) -> int:
        """Return the number of open requests."""
        return len(self._tasks)

    async def run(self, duration_s: float | None) -> None:
        """Send for this long (None: until stopped), then wait for the open requests."""
        began_ns = time.monotonic_ns()
        for ask in self._asks:
            if duration_s is not None and ask.at_s > duration_s:
                break
            scheduled_ns = began_ns + round(ask.at_s * 1e9)
            if not self._is_stopped:
                await self._until(scheduled_ns)
            if self._is_stopped:
                break
            self._send(ask, scheduled_ns)
        if self._tasks:
            await asyncio.wait(self._tasks)

    def stop(self) -> None:
        """Stop sending; `run` then waits for the open requests."""
        self._is_stopped = True
        if self._alarm is not None:
            _ring(self._alarm)

    def abandon(self) -> None:
        """Cancel the open requests."""
        self.stop()
        for task in self._tasks:
            task.cancel()

    async def _until(self, at_ns: int) -> None:
        """Wait for a time, or for the stop; always yield to the event loop."""
        loop = asyncio.get_running_loop()
        self._alarm = alarm = loop.create_future()
        wait_ns = max(0, at_ns - time.monotonic_ns())
        timer = loop.call_later(wait_ns / 1e9, _ring, alarm)
        try:
            await alarm
        finally:
            timer.cancel()

    def _send(self, ask: PlannedRequest, scheduled_ns: int) -> None:
        self.num_scheduled += 1
        times = ClientTimes(
            ask.name,
            ask.kind,
            scheduled_ns,
            time.monotonic_ns(),
            time.time_ns(),
            ask.traceparent,
            repeated_share=ask.repeated_share,
        )
        if self._most_open is not None and len(self._tasks) >= self._most_open:
            times.fail("refused", f"{self._most_open} open")
            times.ended_ns = times.sent_ns
            self._report(times)
            return
        task = asyncio.create_task(self._one(ask, times))
        self._tasks.add(task)
        task.add_done_callback(lambda task: self._end(task, times))

    async def _one(self, ask: PlannedRequest, times: ClientTimes) -> None:
        times.sent_ns, times.sent_at_unix_ns = time.monotonic_ns(), time.time_ns()
        try:
            async for delivery in self._client.ask(ask):
                times.take(delivery)
        except RequestFailed as error:
            times.fail("error", error.kind, error.detail)
        except Exception as error:
            times.fail("error", type(error).__name__, str(error))

    def _end(self, task: asyncio.Task[None], times: ClientTimes) -> None:
        """Report an ended request, also one cancelled before its task began."""
        self._tasks.discard(task)
        if task.cancelled():
            times.fail("abandoned", "abandoned")
        times.ended_ns = time.monotonic_ns()
        self._report(times)


def _ring(alarm: asyncio.Future[None]) -> None:
    if not alarm.done():
        alarm.set_result(None)
