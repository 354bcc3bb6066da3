"""Over real HTTP: what a client is given, and when, is what the front end's ring records."""

from __future__ import annotations

import asyncio
import contextvars
import http.client
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.applications import Starlette

from inferscope.adapters import edge as edge_module
from inferscope.adapters.edge import Edge
from inferscope.adapters.patching import Patches
from inferscope.probe import EngineInfo, Probe
from inferscope.records import COLUMNS, EVENTS, Emitted, Record, RequestEvent
from tests.adapters.asgi_server import BUSY_S, Front, served
from tests.probe.fakes import records


class Watched:
    """A served front end, its probe, and what is in its ring."""

    def __init__(self, url: str, front: Front, patches: Patches, probe: Probe) -> None:
        self.address = url.removeprefix("http://")
        self.front = front
        self.patches = patches
        self.probe = probe

    def post(self, path: str, **headers: str) -> tuple[int, bytes]:
        """Ask, and wait until the server is through with it: a client has its answer earlier."""
        due = self.front.num_done + 1
        connection = http.client.HTTPConnection(self.address, timeout=30)
        connection.request("POST", path, body=b"{}", headers=headers)
        answer = connection.getresponse()
        response = answer.status, answer.read()
        connection.close()
        self.wait_until_done(due)
        return response

    def wait_until_done(self, num: int) -> None:
        until = time.monotonic() + 90
        while self.front.num_done < num and time.monotonic() < until:
            time.sleep(0.002)
        assert self.front.num_done >= num

    def records(self) -> list[Record]:
        assert self.probe.path is not None
        return records(self.probe.path)

    def attributes(self, path: str, **others: str) -> dict[str, str]:
        """Return the other fields of the record of a request to this server."""
        host, _, port = self.address.partition(":")
        return {"endpoint": path, "server.address": host, "server.port": port, **others}

    def events(self) -> list[RequestEvent]:
        return [record for record in self.records() if isinstance(record, RequestEvent)]

    def kinds(self, index: int = 0) -> list[str]:
        return [EVENTS[event.kind] for event in self.events() if event.index == index]

    def tokens(self) -> list[tuple[int, int]]:
        counts: list[tuple[int, int]] = []
        for record in self.records():
            if isinstance(record, Emitted):
                indices = np.frombuffer(record.requests, "<u4").tolist()
                counts += zip(indices, np.frombuffer(record.tokens, "<u4").tolist(), strict=True)
        return counts


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    with watching(tmp_path, monkeypatch) as found:
        yield found


@contextmanager
def watching(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    """Watch a server for as long as the context lasts."""
    monkeypatch.setenv("INFERSCOPE_DIR", str(tmp_path))
    monkeypatch.setenv("INFERSCOPE_ENGINE_ID", "edge")
    monkeypatch.setenv("INFERSCOPE_RING_MB", "1")
    patches, front = Patches("toy"), Front()
    probe = Probe.open(EngineInfo(0, "toy"), role="frontend")
    patches.probes.append(probe)
    front.edge = Edge(probe, patches)
    assert front.edge.watch(Starlette)
    try:
        with served(front.app()) as url:
            yield Watched(url, front, patches, probe)
    finally:
        patches.restore()
        probe.close()


def test_a_stream_is_received_emitted_and_delivered(watched: Watched) -> None:
    before_ns = time.monotonic_ns()
    trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    response = watched.post("/stream?n=1", **{"X-Request-Id": "mine", "traceparent": trace})
    after_ns = time.monotonic_ns()
    assert response == (200, b"data: xx\n\n" * 3)
    assert watched.kinds() == ["received", "tokenised", "first_byte", "last_byte"]
    received, tokenised, first, last = watched.events()
    assert (received.request_id, received.external_id) == ("engine-1", "mine")
    assert received.trace == trace
    assert received.attributes == watched.attributes("/stream")
    assert tokenised.prompt_tokens == 5
    assert before_ns <= received.at_ns <= tokenised.at_ns <= first.at_ns <= last.at_ns <= after_ns
    assert watched.tokens() == [(0, 2)] * 3


def test_requests_of_another_engine_are_recorded_in_its_own_ring(watched: Watched) -> None:
    other = Probe.open(EngineInfo(0, "toy"), role="frontend", engine_id="edge-2")
    watched.front.probes["second"] = other
    assert other.path is not None
    assert other.path.parent.name == "edge-2"
    threads = [
        threading.Thread(target=watched.post, args=(f"/stream?n={at}{engine}",))
        for at, engine in enumerate(["", "&engine=second"] * 3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    watched.wait_until_done(6)
    other.close()
    theirs = [record for record in records(other.path) if isinstance(record, RequestEvent)]
    for events, numbers in ((watched.events(), "024"), (theirs, "135")):
        names = {event.index: event.request_id for event in events if event.request_id}
        assert set(names.values()) == {f"engine-{number}" for number in numbers}
        for index in names:
            kinds = [EVENTS[event.kind] for event in events if event.index == index]
            assert kinds == ["received", "tokenised", "first_byte", "last_byte"]


def test_headers_that_the_operator_allows_become_attributes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFERSCOPE_HEADERS", "tenant=x-tenant")
    with watching(tmp_path, monkeypatch) as watched:
        watched.post("/stream?n=1", **{"X-Tenant": "acme", "X-Other": "not-listed"})
        received, *_ = watched.events()
    assert received.attributes == watched.attributes("/stream", tenant="acme")


def test_what_was_asked_is_of_the_request_that_is_joined(watched: Watched) -> None:
    watched.post("/plain?n=1&asked=12")
    watched.post("/plain?n=2")
    first, second = [event.attributes for event in watched.events() if event.request_id]
    assert first == watched.attributes("/plain", max_tokens="12")
    assert second == watched.attributes("/plain")


def test_a_client_may_declare_the_parts_of_its_prompt(watched: Watched) -> None:
    watched.post("/stream?n=1", **{"X-InferScope-Parts": "system=2, Retrieved=2,user=1"})
    watched.post("/twins?n=2", **{"x-inferscope-parts": "user=5"})
    parts = [event.prompt_parts for event in watched.events() if event.request_id]
    assert parts == [(("system", 2), ("other", 2), ("user", 1)), (("user", 5),), (("user", 5),)]


def test_parts_that_cannot_be_read_are_reported_once_and_the_request_goes_on(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    canary = "a-word-of-the-prompt"
    for _ in range(3):
        response = watched.post("/twins?n=1", **{"X-InferScope-Parts": f"{canary}=many"})
        assert response[0] == 200
    assert [event.prompt_parts for event in watched.events() if event.request_id] == [()] * 6
    watched.probe._life.write_messages()
    lines = [record.getMessage() for record in caplog.records if "Parts" in record.getMessage()]
    assert len(lines) == 1
    assert canary not in lines[0]
    assert watched.front.edge is not None
    assert watched.front.edge.labels.num_unreadable == 3
    assert watched.probe.path is not None
    assert canary.encode() not in watched.probe.path.read_bytes()


def test_without_a_name_of_the_clients_the_engines_is_kept(watched: Watched) -> None:
    watched.post("/plain?n=7")
    assert watched.events()[0].external_id == "ours"


def test_an_answer_in_one_piece_brings_all_tokens_at_once(watched: Watched) -> None:
    watched.post("/plain?n=2")
    assert watched.tokens() == [(0, 4)]
    assert watched.kinds() == ["received", "tokenised", "finished", "first_byte", "last_byte"]
    assert watched.events()[2].reason == "stop"


def test_several_engine_requests_may_belong_to_one_exchange(watched: Watched) -> None:
    watched.post("/twins?n=3")
    entered = [event.request_id for event in watched.events() if event.request_id]
    assert entered == ["engine-3-0", "engine-3-1"]
    assert sorted(watched.tokens()) == [(0, 1), (1, 2)]
    assert watched.kinds(0)[-1] == watched.kinds(1)[-1] == "last_byte"


def test_a_mounted_application_is_watched_once(watched: Watched) -> None:
    watched.post("/under/stream?n=4")
    assert watched.kinds().count("received") == 1
    assert watched.tokens() == [(0, 2)] * 3


def test_a_request_has_come_before_its_handler_has_its_turn(watched: Watched) -> None:
    """The second and the third come while the first keeps the server busy, and wait in turn."""
    due = watched.front.num_done + 6
    connections = [http.client.HTTPConnection(watched.address, timeout=30) for _ in range(3)]
    for connection in connections:  # accepted, so that what comes next is read at once
        connection.request("POST", "/plain?n=0", body=b"{}")
        connection.getresponse().read()
    for number, connection in enumerate(connections, 1):
        connection.request("POST", f"/busy-loop?n={number}", body=b"{}")
        assert watched.front.is_busy.wait(30)
    watched.front.may_go_on.set()
    for connection in connections:
        connection.getresponse().read()
        connection.close()
    watched.wait_until_done(due)
    ends_ns = {e.index: e.at_ns for e in watched.events() if EVENTS[e.kind] == "last_byte"}
    came_ns = {e.index: e.at_ns for e in watched.events() if EVENTS[e.kind] == "received"}
    *_, second, third = sorted(came_ns, key=lambda index: ends_ns[index])
    assert ends_ns[third] - ends_ns[second] >= 0.9e9 * BUSY_S
    assert came_ns[third] <= ends_ns[second] - 0.9e9 * BUSY_S


def test_a_client_that_hangs_up_ends_the_exchange(watched: Watched) -> None:
    connection = http.client.HTTPConnection(watched.address, timeout=30)
    connection.request("POST", "/slow?n=5", body=b"{}")
    answer = connection.getresponse()
    answer.read(9)
    answer.close()
    connection.close()
    watched.wait_until_done(1)
    assert watched.kinds() == ["received", "tokenised", "first_byte", "last_byte"]
    assert watched.tokens() == [(0, 1)]


def test_no_byte_is_noted_after_the_client_has_read_it(watched: Watched) -> None:
    watched.front.linger_s = 0.03
    connection = http.client.HTTPConnection(watched.address, timeout=10)
    connection.request("POST", "/stream?n=8", body=b"{}")
    answer = connection.getresponse()
    seen_ns = []
    for _ in range(3):
        assert answer.read(10) == b"data: xx\n\n"
        seen_ns.append(time.monotonic_ns())
    assert answer.read() == b""
    seen_ns.append(time.monotonic_ns())
    connection.close()
    watched.wait_until_done(1)
    emitted = [record.left_ns for record in watched.records() if isinstance(record, Emitted)]
    first, last = watched.events()[-2:]
    assert first.at_ns == emitted[0]
    assert all(ours <= theirs for ours, theirs in zip([*emitted, last.at_ns], seen_ns, strict=True))


def test_what_waits_for_a_client_that_does_not_read_is_noted_when_it_has(watched: Watched) -> None:
    connection = http.client.HTTPConnection(watched.address, timeout=10)
    connection.request("POST", "/flood?n=9", body=b"{}")
    answer = connection.getresponse()
    until = time.monotonic() + 90
    while "first_byte" not in watched.kinds():
        assert time.monotonic() < until
        time.sleep(0.002)  # its first byte is noted, and it waits for room for the rest
    woken_ns = time.monotonic_ns()
    assert len(answer.read()) == 32_000_000
    connection.close()
    watched.wait_until_done(1)
    first, last = watched.events()[-2:]
    assert first.at_ns < woken_ns < last.at_ns
    emitted = [record for record in watched.records() if isinstance(record, Emitted)]
    # The last message waited for the room: from before the client read on, until it had read.
    blocked_ns = np.frombuffer(emitted[-1].blocked_ns, COLUMNS["blocked_ns"]).tolist()
    assert [record.blocked_ns for record in emitted[:-1]] == [b""]
    assert len(blocked_ns) == 1
    assert last.at_ns - blocked_ns[0] < woken_ns
    assert emitted[-1].left_ns == last.at_ns


def test_a_client_that_reads_is_not_reported_as_blocked(watched: Watched) -> None:
    watched.front.linger_s = 0.005  # a busy server is not a slow client
    watched.post("/stream?n=1")
    emitted = [record for record in watched.records() if isinstance(record, Emitted)]
    assert [record.blocked_ns for record in emitted] == [b""] * 3


@pytest.mark.parametrize(
    ("path", "status", "reason"),
    [("/busy", 429, "shed"), ("/nowhere", 404, "rejected"), ("/broken", 500, "error")],
)
def test_what_never_reaches_the_engine_is_counted_by_status(
    watched: Watched, path: str, status: int, reason: str
) -> None:
    assert watched.post(path, **{"X-Request-Id": "mine"})[0] == status
    assert watched.kinds() == ["received", "finished", "last_byte"]
    received, finished, _ = watched.events()
    assert received.external_id == "mine"
    assert received.attributes == watched.attributes(path, status=str(status))
    assert finished.reason == reason


def test_what_is_no_request_leaves_nothing(watched: Watched) -> None:
    assert watched.post("/tokenize")[0] == 200
    connection = http.client.HTTPConnection(watched.address, timeout=30)
    connection.request("GET", "/health")
    assert connection.getresponse().status == 503
    connection.close()
    watched.wait_until_done(2)
    assert watched.events() == []


HOOKS = ["_begin", "_leaving", "Edge._sent", "Edge._end"]


@pytest.mark.parametrize("hook", HOOKS)
def test_a_fault_of_ours_changes_no_answer(
    watched: Watched, hook: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*args: object) -> None:
        raise RuntimeError("our own mistake")

    owner, _, name = hook.rpartition(".")
    monkeypatch.setattr(getattr(edge_module, owner) if owner else edge_module, name, broken)
    with caplog.at_level(logging.WARNING):
        for number in range(2):
            assert watched.post(f"/stream?n={number}") == (200, b"data: xx\n\n" * 3)
    assert caplog.text.count("our own mistake") == 1
    assert watched.patches.is_off
    assert not watched.probe.on


async def _answered(message: object = None) -> dict[str, str]:
    return {"type": "http.request"}


def _call(app: Callable[..., Awaitable[None]]) -> Coroutine[Any, Any, None]:
    """Return the call of an application of a watched class for one POST."""
    outer = Starlette()
    outer.middleware_stack = app
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    return outer(scope, _answered, _answered)


@pytest.mark.parametrize("status", [200, 400, 429, 500, 503])
def test_a_request_that_was_joined_ends_with_its_status(watched: Watched, status: int) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert watched.front.edge is not None
        watched.front.edge.join("engine-1", prompt_tokens=3)
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b"x"})

    asyncio.run(_call(app))
    reasons = {200: [], 400: ["rejected"], 429: ["shed"], 500: ["error"], 503: ["shed"]}[status]
    times_ns = [event.at_ns for event in watched.events()]
    assert times_ns == sorted(times_ns), "a reader takes events in this order"
    ends = watched.events()[2:]
    assert [event.reason for event in ends[:-1]] == reasons
    assert [EVENTS[event.kind] for event in ends] == ["finished"] * len(reasons) + ["last_byte"]


def test_an_application_that_fails_ends_its_request_with_an_error(watched: Watched) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert watched.front.edge is not None
        watched.front.edge.join("engine-1")
        raise error

    for error in (ValueError("their own fault"), asyncio.CancelledError()):
        with pytest.raises(type(error)):
            asyncio.run(_call(app))
    assert watched.kinds(0) == ["received", "finished", "last_byte"]
    assert watched.kinds(1) == ["received", "last_byte"], "it was cancelled, and has not failed"


def test_a_call_that_is_closed_in_another_context_ends_its_request(watched: Watched) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert watched.front.edge is not None
        watched.front.edge.join("engine-1")
        await _Forever()

    call = _call(app)
    contextvars.copy_context().run(call.send, None)
    contextvars.copy_context().run(call.close)
    assert watched.kinds() == ["received", "last_byte"]


class _Forever:
    def __await__(self) -> Iterator[None]:
        while True:
            yield
