"""A real `inferscope serve` process, and its HTTP clients."""

from __future__ import annotations

import http.client
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from inferscope.fold.final_records import FinalRequest
from inferscope.readers.source import RingSource
from tests.children import child


class Server:
    """A running server, its rings and its stderr."""

    def __init__(self, process: subprocess.Popen[bytes], rings: Path, log: Path) -> None:
        self.process = process
        self.rings = rings
        self.log = log
        self.port = 0

    def wait(self) -> Server:
        """Wait until the server is ready, and return it."""
        deadline_s = time.monotonic() + 90
        while self.process.poll() is None and time.monotonic() < deadline_s:
            found = re.search(r"serving .* on http://127\.0\.0\.1:(\d+);", self.said())
            if found:
                self.port = int(found.group(1))
                return self
            time.sleep(0.02)
        raise AssertionError(f"the server did not come up: {self.said()}")

    def said(self) -> str:
        """Return the server's output on stderr."""
        return self.log.read_text(encoding="utf-8")

    def post(
        self, path: str, body: object, headers: dict[str, str] | None = None
    ) -> tuple[int, Any, dict[str, str]]:
        """Post JSON or raw bytes; return status, body and headers."""
        return self.ask("POST", path, body, headers)

    def ask(
        self, method: str, path: str, body: object = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any, dict[str, str]]:
        """Send a request; return status, body and headers."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            raw = body if isinstance(body, bytes | None) else json.dumps(body).encode()
            connection.request(method, path, raw, headers or {})
            answer = connection.getresponse()
            content = answer.read()
            names = {name.lower(): value for name, value in answer.getheaders()}
            return answer.status, json.loads(content) if content else None, names
        finally:
            connection.close()

    def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """Stream a request; return the events, with the text [DONE] as the last if it arrived."""
        with Stream(self.port, path, body) as stream:
            return list(stream.events())

    def children(self) -> list[int]:
        """Return the process IDs of the children, the core first."""
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(pid) for pid in path.read_text().split()]

    def finals(self, *, until: int) -> dict[str, FinalRequest]:
        """Fold the rings until `until` requests are final; return them by their internal id."""
        found = self._fold(lambda requests: len(requests) >= until)
        return {request.request_id: request for request in found}

    def final(self, external_id: str) -> FinalRequest:
        """Fold the rings until the request with this external id is final, and return it."""
        found = self._fold(lambda requests: any(r.external_id == external_id for r in requests))
        named = [request for request in found if request.external_id == external_id]
        assert len(named) == 1, f"{external_id} is final {len(named)} times"
        return named[0]

    def finals_of(self, request_ids: set[str]) -> list[FinalRequest]:
        """Fold the rings until these requests are final, and return them."""
        found = self._fold(lambda requests: request_ids <= {r.request_id for r in requests})
        return [request for request in found if request.request_id in request_ids]

    def _fold(self, is_enough: Callable[[list[FinalRequest]], bool]) -> list[FinalRequest]:
        sink = Finals()
        source = RingSource(lambda: self.rings.glob("served/*.ring"), name="test", sinks=(sink,))
        deadline_s = time.monotonic() + 90
        while not (is_enough(sink.requests) or source.has_ended):
            if not source.advance():
                assert time.monotonic() < deadline_s, "what is waited for does not become final"
                time.sleep(0.02)
        source.close()
        return sink.requests

    def wait_until_idle(self) -> None:
        """Wait until the server has served one more request."""
        deadline_s = time.monotonic() + 90
        while self.post("/v1/completions", {"prompt": "x", "max_tokens": 1})[0] != 200:
            assert time.monotonic() < deadline_s, "the queue stays full"
            time.sleep(0.02)

    def stop(self) -> int:
        """Send SIGINT; return the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        try:
            return self.process.wait(60)
        finally:
            self.process.kill()
            self.process.wait()


@contextmanager
def serving(folder: Path, *options: str, recording: Path | None = None) -> Iterator[Server]:
    """Start a server with these options, recorded if asked; kill it at the end of the context."""
    rings, said = folder / "rings", folder / "stderr.txt"
    ours = [sys.executable, "-m", "inferscope"]
    words = [*ours, "serve", "--port", "0", *options]
    if recording is not None:
        words = [*ours, "run", "--record", str(recording), "--", *words]
    environment = {
        **os.environ,
        "INFERSCOPE_DIR": str(rings),
        "INFERSCOPE_RING_MB": "4",
        "INFERSCOPE_ENGINE_ID": "served",
    }
    with (
        said.open("wb") as log,
        child(words, env=environment, stderr=log, stdout=subprocess.DEVNULL) as process,
    ):
        yield Server(process, rings, said)


class Finals:
    """Sink that keeps final requests."""

    def __init__(self) -> None:
        self.requests: list[FinalRequest] = []

    def on_step(self, step: object) -> None:
        """Ignore a step."""

    def on_request(self, request: FinalRequest) -> None:
        """Keep a final request."""
        self.requests.append(request)


class Stream:
    """A streaming request on its own socket, read on demand."""

    def __init__(
        self,
        port: int,
        path: str,
        body: dict[str, Any],
        *,
        headers: dict[str, str] | None = None,
        receive_bytes: int | None = None,
    ) -> None:
        self._answer: http.client.HTTPResponse | None = None
        self.socket = socket.socket()
        if receive_bytes is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        self.socket.settimeout(30)
        self.socket.connect(("127.0.0.1", port))
        content = json.dumps({**body, "stream": True}).encode()
        lines = [f"POST {path} HTTP/1.1", "Host: x", "Connection: close"]
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        lines += [f"Content-Length: {len(content)}", "", ""]
        self.socket.sendall("\r\n".join(lines).encode() + content)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def events(self) -> Iterator[Any]:
        """Yield the events that arrive from now on."""
        if self._answer is None:
            self._answer = http.client.HTTPResponse(self.socket)
            self._answer.begin()
        assert self._answer.status == 200, self._answer.read()
        for line in self._answer:
            if line.startswith(b"data: "):
                data = line[len(b"data: ") :].decode().strip()
                yield data if data == "[DONE]" else json.loads(data)

    def is_cut_off(self, num_events: int) -> bool:
        """Return whether the connection ends before `num_events` events arrive."""
        try:
            return len(list(itertools.islice(self.events(), num_events))) < num_events
        except (OSError, http.client.HTTPException):
            return True

    def close(self) -> None:
        """Close the connection."""
        if self._answer is not None:
            self._answer.close()
        self.socket.close()


def is_alive(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")


def all_gone(pids: list[int], within_s: float = 90) -> bool:
    """Return whether all processes exit within the time."""
    deadline_s = time.monotonic() + within_s
    while any(map(is_alive, pids)) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    return not any(map(is_alive, pids))


def in_background(task: Any, *arguments: Any) -> tuple[threading.Thread, list[Any]]:
    """Run a call in a thread; return the thread and the list for its result or error."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(task(*arguments))
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, results
