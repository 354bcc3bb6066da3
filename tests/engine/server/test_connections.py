"""Tests of clients that are slow, silent, half-closed, or do not send HTTP."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import select
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from inferscope.engine.server.connection import Connection, limited
from tests.engine.server.running import Server, Stream, serving
from tests.engine.server.test_records import request_events

pytestmark = pytest.mark.thorough


def dial(server: Server, *, receive_bytes: int | None = None) -> socket.socket:
    made = socket.socket()
    if receive_bytes is not None:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    made.settimeout(25)  # less than the server's default timeout
    made.connect(("127.0.0.1", server.port))
    return made


def post(path: str, body: object, *lines: str) -> bytes:
    content = json.dumps(body).encode()
    head = [f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {len(content)}", *lines, "", ""]
    return "\r\n".join(head).encode() + content


def answer_of(connection: socket.socket) -> tuple[int, Any]:
    answer = http.client.HTTPResponse(connection)
    answer.begin()
    return answer.status, json.loads(answer.read())


def is_refused(connection: socket.socket, status: int, code: str | None) -> bool:
    """Return whether an error of OpenAI's form arrives, followed by the end."""
    got, body = answer_of(connection)
    assert set(body["error"]) == {"message", "type", "param", "code"}
    ended = connection.recv(1) == b""
    return (got, body["error"]["code"], ended) == (status, code, True)


def num_open(server: Server) -> int:
    return len(os.listdir(f"/proc/{server.children()[1]}/fd"))


def test_silent_clients_time_out(server: Server) -> None:
    server.wait_until_idle()
    before = num_open(server)
    whole = {"prompt": "x", "n": 8, "max_tokens": 400, "ignore_eos": True, "temperature": 3}
    unread = [dial(server, receive_bytes=1024) for _ in range(3)]
    unread[0].sendall(post("/v1/completions", whole, "X-Request-Id: unread-whole"))
    unread[1].sendall(post("/detokenize", {"tokens": [300] * 100_000}))
    unread[2].sendall(post("/detokenize", {"tokens": [300] * 100_000}, "Connection: close"))
    silent, in_head, in_body = dial(server), dial(server), dial(server)
    in_head.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n")
    in_body.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{")
    began_s = time.monotonic()
    for connection in (silent, in_head, in_body):
        assert is_refused(connection, 408, "request_timeout")
    assert time.monotonic() - began_s > 1
    deadline_s = time.monotonic() + 90
    while num_open(server) > before:
        assert time.monotonic() < deadline_s, f"{num_open(server) - before} connections are kept"
        time.sleep(0.05)
    found = request_events(server, "frontend", "unread-whole")
    finals = server.finals_of(set(found))
    assert {(final.finish, final.output_tokens) for final in finals} == {("timeout", 0)}
    for connection in (*unread, silent, in_head, in_body):
        connection.close()


@pytest.mark.parametrize("is_whole", [True, False])
def test_headers_are_bounded(server: Server, is_whole: bool) -> None:
    with dial(server) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nX-Long: ")
        connection.sendall(b"a" * (66 << 10) + b"\r\n\r\n" * is_whole)
        if not is_whole:
            time.sleep(0.05)
            connection.sendall(b"a" * (66 << 10))
        assert is_refused(connection, 431, "headers_too_large")


@pytest.mark.parametrize(
    "sent",
    [
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: many\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 a TLS greeting\r\n\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\n\r\n",
    ],
)
def test_invalid_http_gets_an_error_in_the_form_of_openai(server: Server, sent: bytes) -> None:
    with dial(server) as connection:
        connection.sendall(sent)
        assert is_refused(connection, 400, "invalid_http")
    assert "Invalid HTTP" not in server.said()


def test_half_closed_client_gets_its_response(server: Server) -> None:
    body = {"prompt": "def f", "max_tokens": 40, "ignore_eos": True}
    with dial(server) as connection:
        connection.sendall(post("/v1/completions", body))
        connection.shutdown(socket.SHUT_WR)
        status, answer = answer_of(connection)
        assert connection.recv(1) == b""
    assert status == 200
    assert answer["usage"]["completion_tokens"] == 40


def test_trailing_slash_is_not_redirected(server: Server) -> None:
    assert server.ask("GET", "/v1/models/")[0] == 404
    assert server.post("/v1/completions/", {"prompt": "x"})[0] == 404


def test_a_body_that_comes_byte_by_byte_has_a_deadline(server: Server) -> None:
    with dial(server) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9999\r\n\r\n"
        )
        for _ in range(500):
            connection.sendall(b" ")
            if select.select([connection], [], [], 0.02)[0]:
                break
        assert is_refused(connection, 408, "request_timeout")


def test_waiting_connections_are_closed_for_new_ones(tmp_path: Path) -> None:
    with serving(tmp_path, "builtin", "--max-connections", "4") as server:
        server.wait()
        held = [dial(server) for _ in range(12)]
        for connection in held[::2]:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nContent-Length: 9\r\n\r\n{")
        assert server.ask("GET", "/version")[0] == 200
        assert sum(bool(select.select([each], [], [], 0)[0]) for each in held) >= 8
        for connection in held:
            connection.close()
        assert server.stop() == 0


class Transport(asyncio.Transport):
    """Transport without a peer."""

    is_aborted = False

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Accept any limits."""

    def is_closing(self) -> bool:
        return self.is_aborted

    def close(self) -> None:
        """Do nothing: it is called for an aborted transport."""

    def abort(self) -> None:
        self.is_aborted = True


def test_a_burst_of_connections_evicts_the_oldest_at_a_constant_cost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    most, num_new = 100, 1000
    num_looked_at = 0
    is_waiting = vars(Connection)["_is_waiting"].fget

    def counted(connection: Connection) -> bool:
        nonlocal num_looked_at
        num_looked_at += 1
        return bool(is_waiting(connection))

    monkeypatch.setattr(Connection, "_is_waiting", property(counted))

    async def burst() -> list[Transport]:
        made = limited(30.0, most, lambda: pytest.fail("one could be closed"))
        config, state = uvicorn.Config(lambda: None, ws="none"), ServerState()
        config.load()
        transports = [Transport() for _ in range(most + num_new)]
        for transport in transports:
            connection = made(config, state, {})
            connection.connection_made(transport)
            for each in [each for each in state.connections if each.transport.is_closing()]:
                each.connection_lost(None)
        return transports

    transports = asyncio.run(burst())
    assert [each.is_aborted for each in transports] == [True] * num_new + [False] * most
    assert num_looked_at < 4 * num_new, "100 for each, if each is searched for"


def test_rejected_connection_is_recorded_as_shed(tmp_path: Path) -> None:
    endless = {"prompt": "x", "max_tokens": 4000, "ignore_eos": True}
    with serving(tmp_path, "builtin", "--max-connections", "1") as server:
        server.wait()
        with Stream(server.port, "/v1/completions", endless) as stream:
            next(stream.events())
            with dial(server) as connection:
                assert is_refused(connection, 503, "too_many_connections")
        finals = server.finals(until=2).values()
        assert {final.finish for final in finals} == {"shed", "client_cancel"}
        assert server.stop() == 0
