"""The client against servers that misbehave, over real sockets."""

from __future__ import annotations

import asyncio
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inferscope.load.http import HttpClient, HttpOptions, open_session
from inferscope.load.open_loop import ClientTimes, OpenLoop
from inferscope.load.workload import PlannedRequest
from tests.load.asking import ask
from tests.load.raw_server import SSE, RawServer, Script, sending, whole

PROMPT = "the quick brown fox jumps over the lazy dog and goes home"
DONE = b"data: [DONE]\n\n"


def event(**fields: object) -> bytes:
    return b"data: " + json.dumps(fields, ensure_ascii=False).encode() + b"\n\n"


def text(words: str, *, finish: str | None = None, **fields: object) -> bytes:
    return event(choices=[{"delta": {"content": words}, "finish_reason": finish}], **fields)


def usage(prompt: int, output: int, **fields: object) -> dict[str, object]:
    return {"prompt_tokens": prompt, "completion_tokens": output, **fields}


def drive(
    url: str, asks: list[PlannedRequest], *, timeout_s: float = 30.0, counting: bool = False
) -> list[ClientTimes]:
    times: list[ClientTimes] = []

    async def run() -> None:
        async with open_session() as session:
            options = HttpOptions(url=url, model="raw", timeout_s=timeout_s, is_counting=counting)
            await OpenLoop(HttpClient(session, options), asks, times.append).run(None)

    asyncio.run(run())
    return times


def one(script: Script, *, timeout_s: float = 30.0, counting: bool = False) -> ClientTimes:
    """Return how one request fares."""
    with RawServer(script) as server:
        (times,) = drive(
            server.url, [ask(0.0, "a", prompt=PROMPT)], timeout_s=timeout_s, counting=counting
        )
    return times


async def never(_: asyncio.StreamWriter) -> None:
    await asyncio.Event().wait()


async def silent_after_one(writer: asyncio.StreamWriter) -> None:
    writer.write(SSE + text("a"))
    await writer.drain()
    await asyncio.Event().wait()


async def reset(writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()


BUSY = whole(
    "429 Too Many Requests",
    b'{"error": {"message": "queue full", "type": "rate_limit", "code": 429}}',
    headers="Retry-After: 9\r\n",
)
FAILS = event(error={"message": "out of blocks"})
TORN = b"40\r\n" + text("a")[:20]
CHUNKED = SSE.replace(b"Connection: close", b"Transfer-Encoding: chunked")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("script", "error", "detail", "tokens"),
    [
        (sending(BUSY), "HTTP 429", "queue full", 0),
        (sending(whole("500 Internal Server Error", b"<html>oops")), "HTTP 500", "", 0),
        (sending(whole("422 Unprocessable", b'{"detail": [{"input": "x"}]}')), "HTTP 422", "", 0),
        (sending(whole("307 Elsewhere", b"", headers="Location: /v2\r\n")), "HTTP 307", "", 0),
        (sending(whole("200 OK", b'{"choices": []}')), "no stream", "application/json", 0),
        (sending(b"SSH-2.0-OpenSSH_9.6\r\n"), "not HTTP", "no status line or headers", 0),
        (sending(SSE, text("a"), b"data: {]\n\n"), "garbage", "DecodeError", 1),
        (sending(SSE, text("a"), b'data: {"choices": 3}\n\n'), "garbage", "ValidationError", 1),
        (sending(SSE, text("a"), FAILS), "error in the stream", "out of blocks", 1),
        (sending(SSE, text("a"), text("b")), "cut off", "no finish_reason and no [DONE]", 2),
        (sending(CHUNKED, TORN), "disconnected", "in the middle of the answer", 0),
        (sending(b""), "disconnected", "before the answer", 0),
        (reset, "disconnected", "before the answer", 0),
        (never, "timeout", "after 1 s", 0),
        (silent_after_one, "timeout", "after 1 s", 1),
    ],
)  # fmt: skip
def test_each_misbehaviour_has_its_name(
    script: Script, error: str, detail: str, tokens: int
) -> None:
    times = one(script, timeout_s=1.0)
    assert (times.outcome, times.error, times.detail) == ("error", error, detail)
    assert times.tokens == tokens


def test_refused_connection_is_a_failed_request() -> None:
    with RawServer(never) as server:
        url = server.url
    (times,) = drive(url, [ask(0.0, "a")])
    assert times.error == "cannot connect"


def test_a_refusal_that_quotes_the_prompt_is_not_kept() -> None:
    body = json.dumps({"error": {"message": f"invalid input: {PROMPT[4:30]!r}"}}).encode()
    times = one(sending(whole("400 Bad Request", body)))
    assert times.error == "HTTP 400"
    assert times.detail == "(it quotes the prompt)"


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(1, 40), st.sampled_from([b"\n", b"\r\n", b"\r"]))
def test_an_answer_is_the_same_in_pieces_of_any_size(size: int, end: bytes) -> None:
    stream = text("é統🙂") + text("b") + text("", finish="length") + event(
        choices=[], usage=usage(9, 2, prompt_tokens_details={"cached_tokens": 4})
    ) + DONE  # fmt: skip
    stream = stream.replace(b"\n", end)
    pieces = [stream[at : at + size] for at in range(0, len(stream), size)]
    times = one(sending(SSE, *pieces))
    assert times.outcome == "finished", times.detail
    assert (times.tokens, times.prompt_tokens, times.output_tokens) == (2, 9, 2)
    assert times.cached_tokens == 4
    assert len(times.tbt_ns) == 1


def test_byte_by_byte_each_token_is_timed_when_its_last_byte_is_there() -> None:
    pieces = [bytes([byte]) for byte in text("a") + text("b", finish="stop")]
    times = one(sending(SSE, *pieces, pause_s=0.002))
    assert times.outcome == "finished"
    assert times.first_token_ns is not None
    assert times.first_token_ns - times.sent_ns >= len(text("a")) * 2_000_000
    assert times.tbt_ns[0] >= (len(text("b", finish="stop")) - 1) * 2_000_000


def test_a_stream_without_done_is_whole_if_it_states_why_it_ended() -> None:
    assert one(sending(SSE, text("a"), text("", finish="stop"))).outcome == "finished"


def test_roles_and_empty_ends_are_no_tokens_but_thoughts_and_calls_are() -> None:
    deltas: list[dict[str, object]] = [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "hm"},
        {"reasoning": "so"},
        {"tool_calls": [{"index": 0}]},
        {"content": None},
    ]
    stream = b"".join(event(choices=[{"delta": delta}], usage=None) for delta in deltas)
    times = one(sending(SSE, stream, text("", finish="stop"), DONE))
    assert (times.outcome, times.tokens, times.output_tokens) == ("finished", 3, None)


def test_a_server_that_counts_along_reports_how_many_tokens_came_at_once() -> None:
    stream = (
        text("", usage=usage(5, 0)),
        text("abc", usage=usage(5, 3)),
        text("", usage=usage(5, 4)),  # half a character: a token all the same
        text("d", finish="stop", usage=usage(5, 6)),
        event(choices=[], usage=usage(5, 6)) + DONE,
    )
    times = one(sending(SSE, *stream), counting=True)
    assert (times.tokens, times.output_tokens, len(times.tbt_ns)) == (6, 6, 2)


def test_a_server_that_only_sums_up_at_the_end_is_not_taken_for_one_that_counts() -> None:
    stream = (text("a"), text("b"), text("", finish="stop", usage=usage(5, 2)), DONE)
    times = one(sending(SSE, *stream), counting=True)
    assert (times.tokens, times.output_tokens, len(times.tbt_ns)) == (2, 2, 1)


def test_a_server_that_stalls_delays_no_later_request() -> None:
    asks = [ask(0.05 * number, str(number)) for number in range(20)]

    async def stall(writer: asyncio.StreamWriter) -> None:
        while len(server.asked_at) < len(asks):  # no response before the last request
            await asyncio.sleep(0.01)
        writer.write(SSE + text("a", finish="stop"))

    with RawServer(stall) as server:
        times = drive(server.url, asks, timeout_s=30)
    assert [one.outcome for one in times] == ["finished"] * 20
    assert max(one.sent_ns for one in times) < min(one.first_token_ns or 0 for one in times)
