"""Traces and metrics over gRPC, to a real server of the protocol's services."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from inferscope_otlp import OtlpExporter
from inferscope_otlp.delivery_queue import MOST_AT_ONCE
from msgspec.structs import replace

from tests.exporters.otlp.conftest import Finals
from tests.exporters.otlp.sink import Sink

grpc = pytest.importorskip(
    "grpc", reason='gRPC is not installed: pip install "inferscope-llm[grpc]"'
)

AT_ONCE_S = 10.0


@contextmanager
def receiving(*, code: Any = None, is_held: bool = False, port: int = 0) -> Iterator[Sink]:
    """Run a receiver; its `status` is a code of gRPC's, or 200."""
    from inferscope_otlp.grpc_post import SERVICES

    sink = Sink(status=code or 200)
    if not is_held:
        sink.hold.set()
    path_of = {SERVICES["TRACES"]: "/v1/traces", SERVICES["METRICS"]: "/v1/metrics"}

    class Services(grpc.GenericRpcHandler):  # type: ignore[misc, unused-ignore]
        def service(self, details: Any) -> Any:
            def answer(message: bytes, context: Any) -> bytes:
                sink.num_connections += 1
                sink.hold.wait(30)
                if sink.status != 200:
                    context.abort(sink.status, "as the test wants it")
                sink.take(path_of[details.method], dict(details.invocation_metadata), message)
                return b""

            return grpc.unary_unary_rpc_method_handler(answer)

    server = grpc.server(ThreadPoolExecutor(4), handlers=[Services()])
    sink.url = f"http://127.0.0.1:{server.add_insecure_port(f'127.0.0.1:{port}')}"
    server.start()
    try:
        yield sink
    finally:
        sink.hold.set()
        server.stop(0).wait()


def opened(sink: Sink, **settings: object) -> OtlpExporter:
    exporter = OtlpExporter({"protocol": "grpc", "endpoint": sink.url, **settings})
    exporter.open()
    return exporter


def flood(exporter: OtlpExporter, finals: Finals, num: int) -> None:
    assert finals.view is not None
    exporter.on_snapshot(finals.view)
    for number in range(num):
        like = finals.requests[number % len(finals.requests)]
        exporter.on_request(replace(like, request_id=f"r{number}"))


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 90
    while not holds():
        assert time.monotonic() < deadline, "this never came to hold"
        time.sleep(0.01)


@pytest.mark.thorough
def test_traces_and_metrics_arrive(finals: Finals) -> None:
    with receiving() as sink:
        exporter = opened(sink, metrics_interval_s=3600, headers={"API-Key": "secret"})
        finals.export_to(exporter)
        exporter.close()
        assert len(sink.roots()) == exporter.num_sent == len(finals.requests)
        assert sink.headers[0]["api-key"] == "secret"
        assert len(sink.metrics) == 1


@pytest.mark.thorough
def test_what_a_receiver_misses_while_it_is_away_it_gets_when_it_is_back(finals: Finals) -> None:
    with receiving(code=grpc.StatusCode.UNAVAILABLE) as sink:
        exporter = opened(sink, timeout_s=5)
        flood(exporter, finals, 2 * MOST_AT_ONCE)
        wait_until(lambda: sink.num_connections >= 2)
        sink.status = 200
        wait_until(lambda: exporter.num_sent == 2 * MOST_AT_ONCE)
        exporter.close()
        assert not any(exporter.num_dropped.values())
        assert len(sink.roots()) == 2 * MOST_AT_ONCE


def test_what_is_refused_is_counted_and_named(
    finals: Finals, caplog: pytest.LogCaptureFixture
) -> None:
    with receiving(code=grpc.StatusCode.UNAUTHENTICATED) as sink:
        exporter = opened(sink, headers={"api-key": "hunter2"})
        flood(exporter, finals, MOST_AT_ONCE)
        wait_until(lambda: exporter.num_dropped["not_delivered"] == MOST_AT_ONCE)
        exporter.close()
    assert "UNAUTHENTICATED" in caplog.text
    assert "hunter2" not in caplog.text


@pytest.mark.thorough
def test_a_hanging_receiver_does_not_keep_it_from_closing(finals: Finals) -> None:
    with receiving(is_held=True) as sink:
        exporter = opened(sink, timeout_s=30)
        flood(exporter, finals, MOST_AT_ONCE + 3)
        wait_until(lambda: sink.num_connections == 1)
        began_s = time.monotonic()
        exporter.close()
        assert time.monotonic() - began_s < AT_ONCE_S
        assert exporter.num_waiting == 0
        assert exporter.num_dropped["closed"] == MOST_AT_ONCE + 3
