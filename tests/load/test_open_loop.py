from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator

from hypothesis import given, settings
from hypothesis import strategies as st

from inferscope.load.open_loop import (
    ClientTimes,
    OpenLoop,
    ReceivedTokens,
    RequestFailed,
    TokenUsage,
)
from inferscope.load.workload import PlannedRequest
from tests.load.asking import ask, now


class SlowServer:
    """Client that responds only after all requests were sent."""

    def __init__(self, num: int) -> None:
        self.everybody = asyncio.Event()
        self.num = num
        self.seen = 0

    async def ask(self, ask: PlannedRequest) -> AsyncIterator[ReceivedTokens]:
        self.seen += 1
        if self.seen == self.num:
            self.everybody.set()
        await self.everybody.wait()
        yield ReceivedTokens(now(), 1)
        yield ReceivedTokens(now(), 2)
        yield ReceivedTokens(now(), usage=TokenUsage(7, 3))


class BrokenServer:
    """Fails after the first token, in one of two ways."""

    async def ask(self, ask: PlannedRequest) -> AsyncIterator[ReceivedTokens]:
        yield ReceivedTokens(now(), 1)
        if ask.seed:
            raise RequestFailed("HTTP 503", "busy")
        raise ConnectionError("gone")


class MoodyServer:
    """Answers, fails or hangs, by the request's seed."""

    async def ask(self, ask: PlannedRequest) -> AsyncIterator[ReceivedTokens]:
        if ask.seed == 2:
            await asyncio.Event().wait()
        yield ReceivedTokens(now(), 1)
        if ask.seed == 1:
            raise RequestFailed("moody")


def test_requests_leave_however_late_the_answers_are() -> None:
    times: list[ClientTimes] = []

    async def run() -> None:
        asks = [ask(0.0, "a"), ask(0.01, "b"), ask(0.02, "c")]
        await asyncio.wait_for(OpenLoop(SlowServer(3), asks, times.append).run(1.0), 30)

    # A closed loop would never finish: the server answers only when all three have asked.
    asyncio.run(run())
    assert {one.name for one in times} == {"a", "b", "c"}
    for one in times:
        assert one.outcome == "finished"
        assert one.tokens == 3
        assert (one.prompt_tokens, one.output_tokens) == (7, 3)
        assert one.first_token_ns is not None
        assert one.last_token_ns is not None
        assert one.ended_ns is not None
        assert one.scheduled_ns <= one.sent_ns <= one.first_token_ns
        assert one.first_token_ns + sum(one.tbt_ns) == one.last_token_ns <= one.ended_ns


def test_what_comes_after_the_duration_is_not_sent() -> None:
    times: list[ClientTimes] = []

    async def run() -> None:
        asks = [ask(0.0, "in"), ask(5.0, "out")]
        await asyncio.wait_for(OpenLoop(SlowServer(1), asks, times.append).run(1.0), 30)

    asyncio.run(run())
    assert [one.name for one in times] == ["in"]


def test_a_failure_is_kept_with_the_request() -> None:
    times: list[ClientTimes] = []
    asks = [ask(0.0, "a"), ask(0.0, "b", seed=1)]
    asyncio.run(OpenLoop(BrokenServer(), asks, times.append).run(1.0))
    rows = {row["name"]: row for row in map(json.loads, (one.to_json() for one in times))}
    assert (rows["a"]["error"], rows["a"]["detail"]) == ("ConnectionError", "gone")
    assert (rows["b"]["error"], rows["b"]["detail"]) == ("HTTP 503", "busy")
    assert {row["outcome"] for row in rows.values()} == {"error"}
    assert {row["tokens"] for row in rows.values()} == {1}


def test_too_many_open_are_refused_and_never_delayed() -> None:
    times: list[ClientTimes] = []

    async def run() -> None:
        server = SlowServer(99)
        asks = [ask(0.0, str(number)) for number in range(5)]
        load = OpenLoop(server, asks, times.append, most_open=2)
        running = asyncio.create_task(load.run(1.0))
        while load.num_scheduled < 5:  # no response so far
            await asyncio.sleep(0.001)
        server.everybody.set()
        await asyncio.wait_for(running, 30)

    asyncio.run(run())
    assert Counter(one.outcome for one in times) == {"finished": 2, "refused": 3}
    assert {one.name for one in times if one.outcome == "refused"} == {"2", "3", "4"}


def test_a_stop_ends_the_sending_and_not_what_is_under_way() -> None:
    times: list[ClientTimes] = []

    async def run() -> None:
        server = SlowServer(2)
        load = OpenLoop(server, [ask(0.0, "a"), ask(0.0, "b"), ask(60.0, "c")], times.append)
        running = asyncio.create_task(load.run(None))
        await server.everybody.wait()
        load.stop()
        await asyncio.wait_for(running, 30)

    asyncio.run(run())
    assert Counter(one.outcome for one in times) == {"finished": 2}


@settings(max_examples=60, deadline=None)
@given(
    moods=st.lists(st.integers(0, 2), max_size=12),
    most_open=st.none() | st.integers(1, 6),
    num_turns=st.integers(0, 12),
)
def test_every_scheduled_request_is_accounted_for_once(
    moods: list[int], most_open: int | None, num_turns: int
) -> None:
    times: list[ClientTimes] = []

    async def run() -> int:
        asks = [ask(0.0, str(number), seed=mood) for number, mood in enumerate(moods)]
        load = OpenLoop(MoodyServer(), asks, times.append, most_open=most_open)
        running = asyncio.create_task(load.run(None))
        for _ in range(num_turns):  # abandoned at any moment, also before a task's first step
            await asyncio.sleep(0)
        load.abandon()
        await asyncio.wait_for(running, 30)
        assert load.num_open == 0
        return load.num_scheduled

    num_scheduled = asyncio.run(run())
    assert sorted(one.name for one in times) == sorted(map(str, range(num_scheduled)))
    for one in times:
        assert one.ended_ns is not None
        if one.outcome in ("finished", "error"):
            assert one.outcome == ("finished", "error")[moods[int(one.name)]]
