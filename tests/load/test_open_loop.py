from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator

from inferscope.load.open_loop import OpenLoop
from inferscope.load.workload import Ask


def ask(at_s: float, name: str) -> Ask:
    return Ask(at_s, name, "chat", "?", 3, 0)


class SlowServer:
    """Answers nobody before all have asked."""

    def __init__(self, num: int) -> None:
        self.everybody = asyncio.Event()
        self.num = num
        self.seen = 0

    async def ask(self, ask: Ask) -> AsyncIterator[int]:
        self.seen += 1
        if self.seen == self.num:
            self.everybody.set()
        await self.everybody.wait()
        yield 1
        yield 2


class BrokenServer:
    """Fails after the first token."""

    async def ask(self, ask: Ask) -> AsyncIterator[int]:
        yield 1
        raise ConnectionError("gone")


def test_requests_leave_however_late_the_answers_are() -> None:
    async def run() -> OpenLoop:
        loop = OpenLoop(SlowServer(3), [ask(0.0, "a"), ask(0.01, "b"), ask(0.02, "c")])
        await asyncio.wait_for(loop.run(1.0), 10)
        return loop

    # A closed loop would never finish: the server answers only when all three have asked.
    times = asyncio.run(run()).times
    assert {one.name for one in times} == {"a", "b", "c"}
    for one in times:
        assert one.tokens == 3
        assert one.first_token_ns is not None
        assert one.last_token_ns is not None
        assert one.scheduled_ns <= one.sent_ns <= one.first_token_ns <= one.last_token_ns


def test_what_comes_after_the_duration_is_not_sent() -> None:
    async def run() -> OpenLoop:
        loop = OpenLoop(SlowServer(1), [ask(0.0, "in"), ask(5.0, "out")])
        await asyncio.wait_for(loop.run(1.0), 10)
        return loop

    assert [one.name for one in asyncio.run(run()).times] == ["in"]


def test_a_failure_is_kept_with_the_request() -> None:
    async def run() -> OpenLoop:
        loop = OpenLoop(BrokenServer(), [ask(0.0, "a")])
        await loop.run(1.0)
        return loop

    loop = asyncio.run(run())
    out = io.BytesIO()
    loop.write(out)
    (row,) = map(json.loads, out.getvalue().splitlines())
    assert row["error"] == "ConnectionError: gone"
    assert row["tokens"] == 1
