"""A real OTLP/HTTP receiver on a loopback port, well or badly behaved."""

from __future__ import annotations

import gzip
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

ROOT, INTERNAL = Span.SPAN_KIND_SERVER, Span.SPAN_KIND_INTERNAL


def plain(value: AnyValue) -> Any:
    """Return a value as Python has it."""
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [plain(each) for each in value.array_value.values]
    return getattr(value, kind) if kind else None


def attributes(pairs: Any) -> dict[str, Any]:
    """Return attributes as a dict; a key that comes twice is an error."""
    found = {pair.key: plain(pair.value) for pair in pairs}
    assert len(found) == len(pairs)
    assert all(isinstance(pair, KeyValue) for pair in pairs)
    return found


@dataclass(frozen=True)
class Received:
    """A span with its resource."""

    span: Span
    resource: dict[str, Any]
    attributes: dict[str, Any]

    @property
    def name(self) -> str:
        """Return the span's name."""
        return str(self.span.name)


@dataclass
class Sink:
    """What arrived, and how the receiver behaves."""

    url: str = ""
    status: int = 200
    posts: list[ExportTraceServiceRequest] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    num_connections: int = 0
    delay_s: float = 0.0
    """Before each answer."""
    hold: threading.Event = field(default_factory=threading.Event)
    """An answer waits until this is set."""

    metrics: list[ExportMetricsServiceRequest] = field(default_factory=list)

    _read: list[Received] = field(default_factory=list)
    _num_read: int = 0

    def take(self, path: str, headers: dict[str, str], body: bytes) -> None:
        """Take a message that was posted there; what cannot be read is an error."""
        if path == "/v1/traces":
            self.headers.append(headers)
            self.posts.append(ExportTraceServiceRequest.FromString(body))
        elif path == "/v1/metrics":
            self.metrics.append(ExportMetricsServiceRequest.FromString(body))

    def spans(self) -> list[Received]:
        """Return all spans that were accepted."""
        posts = list(self.posts)
        self._read += [
            Received(span, attributes(group.resource.attributes), attributes(span.attributes))
            for post in posts[self._num_read :]
            for group in post.resource_spans
            for scope in group.scope_spans
            for span in scope.spans
        ]
        self._num_read = len(posts)
        return self._read

    def roots(self) -> list[Received]:
        """Return the SERVER spans."""
        return [each for each in self.spans() if each.span.kind == ROOT]

    def children(self, root: Received) -> list[Received]:
        """Return the spans below a root."""
        above = (root.span.trace_id, root.span.span_id)
        return [
            each for each in self.spans() if (each.span.trace_id, each.span.parent_span_id) == above
        ]


class _Server(ThreadingHTTPServer):
    """Cuts its connections when it is closed, as a process that ends does."""

    daemon_threads = True

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._open: set[socket.socket] = set()

    def process_request(self, request: Any, client_address: Any) -> None:
        self._open.add(request)
        super().process_request(request, client_address)

    def server_close(self) -> None:
        super().server_close()
        for each in self._open:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


@contextmanager
def receiving(*, status: int = 200, is_held: bool = False, port: int = 0) -> Iterator[Sink]:
    """Run a receiver; one that is held answers nothing until it is let go."""
    sink = Sink(status=status)
    if not is_held:
        sink.hold.set()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            sink.num_connections += 1
            body = self.rfile.read(int(self.headers["Content-Length"]))
            sink.hold.wait(30)
            time.sleep(sink.delay_s)
            if sink.status == 200:
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                assert self.headers["Content-Type"] == "application/x-protobuf"
                sink.take(self.path, dict(self.headers.items()), body)
            answer = ExportTraceServiceResponse().SerializeToString()
            try:
                self.send_response(sink.status)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)
            except ConnectionError:
                pass  # the client has given up by now

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = _Server(("127.0.0.1", port), Handler)
    sink.url = f"http://127.0.0.1:{server.server_port}/v1/traces"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield sink
    finally:
        sink.hold.set()
        server.shutdown()
        thread.join()
        server.server_close()
