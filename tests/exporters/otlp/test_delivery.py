"""Receivers that are dead, hang, refuse or are slow: the fold goes on, every trace is counted."""

from __future__ import annotations

import dataclasses
import os
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from http.client import responses
from pathlib import Path

import pytest
from inferscope_otlp import OtlpExporter
from inferscope_otlp.delivery_queue import MOST_AT_ONCE, DeliveryQueue, NotDelivered
from msgspec.structs import replace

from inferscope.errors import BadInput
from tests.exporters.otlp.conftest import Finals
from tests.exporters.otlp.sink import receiving

AT_ONCE_S = 10.0
"""Generous: what blocks waits for a receiver's 30 s, or for ever."""


def flood(exporter: OtlpExporter, finals: Finals, num: int) -> float:
    """Finish this many requests; return how long that took."""
    assert finals.view is not None
    exporter.on_snapshot(finals.view)
    originals = finals.requests
    began = time.monotonic()
    for number in range(num):
        exporter.on_request(replace(originals[number % len(originals)], request_id=f"r{number}"))
    return time.monotonic() - began


def wait_until(holds: Callable[[], bool], timeout_s: float = 90) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, "this never came to hold"
        time.sleep(0.01)


def close(exporter: OtlpExporter) -> float:
    began = time.monotonic()
    exporter.close()
    return time.monotonic() - began


def accounted(exporter: OtlpExporter) -> int:
    return exporter.num_sent + exporter.num_waiting + sum(exporter.num_dropped.values())


@pytest.mark.thorough
def test_a_dead_receiver_costs_nothing_that_fits_and_one_line(
    finals: Finals, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    exporter = OtlpExporter({"endpoint": f"http://127.0.0.1:{port}/v1/traces", "queue_size": 300})
    exporter.open()
    assert flood(exporter, finals, 300) < AT_ONCE_S
    wait_until(lambda: any("delivery failed" in line.getMessage() for line in caplog.records))
    flood(exporter, finals, 50)
    wait_until(lambda: exporter.num_dropped["queue_full"] == 50)
    assert exporter.num_waiting == 300
    assert close(exporter) < AT_ONCE_S
    assert exporter.num_sent == exporter.num_waiting == 0
    assert exporter.num_dropped == {"queue_full": 50, "not_delivered": 0, "closed": 300}
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 3, lines  # that it begins, that there is no more room, and how it ended
    assert "delivery failed" in lines[0]
    assert "more than 300 traces are waiting" in lines[1]
    assert "dropped of 350" in lines[2]


@pytest.mark.thorough
def test_what_a_receiver_misses_while_it_is_away_it_gets_when_it_is_back(
    finals: Finals, caplog: pytest.LogCaptureFixture
) -> None:
    """Failures: connection refused, a proxy's error, overload, disconnection."""
    with receiving(status=503) as sink:
        exporter = OtlpExporter({"endpoint": sink.url, "timeout_s": 5})
        exporter.open()
        flood(exporter, finals, 3 * MOST_AT_ONCE)
        for status in (429, 502, 504, 503):
            before = sink.num_connections
            sink.status = status
            wait_until(lambda before=before: sink.num_connections > before)
        sink.status = 200
        wait_until(lambda: exporter.num_sent == 3 * MOST_AT_ONCE)
        close(exporter)
        assert not any(exporter.num_dropped.values())
        ids = [root.attributes["inferscope.request.id"] for root in sink.roots()]
        assert len(ids) == len(set(ids)) == 3 * MOST_AT_ONCE
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2, lines
    assert "wait for a retry" in lines[0]
    assert "delivery resumed; 0 items were dropped" in lines[1]


@pytest.mark.thorough
def test_a_receiver_that_is_started_late_or_again_gets_everything(finals: Finals) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    exporter = OtlpExporter({"endpoint": f"http://127.0.0.1:{port}/v1/traces"})
    exporter.open()
    flood(exporter, finals, 10)
    arrived: set[str] = set()
    for round_ in range(2):
        with receiving(port=port) as sink:
            wait_until(lambda: exporter.num_waiting == 0)
            arrived |= {root.attributes["inferscope.request.id"] for root in sink.roots()}
        for number in range(10, 20) if not round_ else ():
            exporter.on_request(replace(finals.requests[0], request_id=f"r{number}"))
    close(exporter)
    assert exporter.num_sent == len(arrived) == 20
    assert not any(exporter.num_dropped.values())


def test_a_receiver_may_ask_to_be_left_alone(finals: Finals) -> None:
    waits: list[float] = []

    def deliver(batch: object) -> None:
        waits.append(time.monotonic())
        if len(waits) == 1:
            raise NotDelivered("later", retry_after_s=0.3)

    courier: DeliveryQueue[int] = DeliveryQueue(
        deliver, lambda: None, max_waiting=9, name="test", gather_s=0.0, first_pause_s=0.0
    )
    courier.start()
    courier.put(1)
    wait_until(lambda: courier.num_sent == 1)
    courier.close()
    assert waits[1] - waits[0] >= 0.3


def test_what_waits_is_left_to_another_with_what_is_on_the_way() -> None:
    arrived = list[int]()
    is_on_the_way, may_fail = threading.Event(), threading.Event()

    def fail(batch: Sequence[int]) -> None:
        is_on_the_way.set()
        may_fail.wait(30)
        raise NotDelivered("cut", retry_after_s=60.0)

    former: DeliveryQueue[int] = DeliveryQueue(
        fail, may_fail.set, max_waiting=500, name="one", gather_s=0
    )
    for number in range(200):
        former.put(number)
    former.start()
    wait_until(is_on_the_way.is_set)
    successor: DeliveryQueue[int] = DeliveryQueue(
        arrived.extend, lambda: None, max_waiting=500, name="other", gather_s=0
    )
    former.transfer_to(successor)
    for number in range(200, 210):
        successor.put(number)
    former.close()
    assert sum(former.num_dropped.values()) == former.num_sent == former.num_waiting == 0
    successor.start()
    wait_until(lambda: successor.num_sent == 210)
    successor.close()
    assert sorted(arrived) == list(range(210))
    assert arrived[-10:] == list(range(200, 210))
    assert sum(successor.num_dropped.values()) == 0


def test_another_endpoint_gets_what_the_former_one_missed(finals: Finals) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    former = OtlpExporter({"endpoint": f"http://127.0.0.1:{port}/v1/traces"})
    former.open()
    flood(former, finals, 30)
    with receiving() as sink:
        successor = OtlpExporter({"endpoint": sink.url})
        successor.open_replacing(former)
        successor.take_over(former)
        former.close()
        assert sum(former.num_dropped.values()) == 0
        flood(successor, finals, 5)
        wait_until(lambda: successor.num_sent == 35)
        successor.close()


def test_a_child_of_a_fork_sends_nothing_and_does_not_wait(finals: Finals) -> None:
    """Its parent's thread is not there, and its locks may be held for ever."""
    with receiving(is_held=True) as sink:
        exporter = OtlpExporter({"endpoint": sink.url})
        exporter.open()
        flood(exporter, finals, MOST_AT_ONCE + 5)
        wait_until(lambda: sink.num_connections == 1)
        assert exporter._traces is not None
        with exporter._traces[1]._changed:  # as if another thread had it at this moment
            child = os.fork()
            if not child:
                code = 1
                try:
                    exporter.on_request(finals.requests[0])
                    exporter.close()
                    code = 0 if (exporter.num_sent, exporter.num_waiting) == (0, 0) else 2
                finally:
                    os._exit(code)
        deadline = time.monotonic() + 90
        while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
            assert time.monotonic() < deadline, "the child hangs"
            time.sleep(0.01)
        assert os.waitstatus_to_exitcode(ended[1]) == 0
        sink.hold.set()
        wait_until(lambda: exporter.num_sent == MOST_AT_ONCE + 5)
        close(exporter)
        assert len(sink.roots()) == MOST_AT_ONCE + 5


@pytest.mark.thorough
def test_a_hanging_receiver_blocks_neither_requests_nor_closing(finals: Finals) -> None:
    with receiving(is_held=True) as sink:
        exporter = OtlpExporter({"endpoint": sink.url, "timeout_s": 30, "queue_size": 200})
        exporter.open()
        flood(exporter, finals, MOST_AT_ONCE)
        wait_until(lambda: sink.num_connections == 1)
        assert flood(exporter, finals, 1000) < AT_ONCE_S
        assert exporter.num_waiting == 200 + MOST_AT_ONCE
        assert exporter.num_dropped["queue_full"] == 800
        assert accounted(exporter) == 1000 + MOST_AT_ONCE
        assert close(exporter) < AT_ONCE_S
        counted = (exporter.num_sent, exporter.num_waiting, exporter.num_dropped)
        assert counted == (0, 0, {"queue_full": 800, "not_delivered": 0, "closed": 328})
        # What arrives after all is not counted twice.
        sink.hold.set()
        wait_until(lambda: bool(sink.posts))
        time.sleep(0.05)
        assert (exporter.num_sent, exporter.num_waiting, exporter.num_dropped) == counted


def test_waiting_requests_do_not_keep_their_tokens(finals: Finals) -> None:
    """Their memory is bounded by their number."""
    with receiving(is_held=True) as sink:
        exporter = OtlpExporter({"endpoint": sink.url})
        exporter.open()
        num_tokens = 100_000
        tracemalloc.start()
        try:
            before, _ = tracemalloc.get_traced_memory()
            for number in range(50):
                times = array("q", bytes(8 * num_tokens))
                long = replace(
                    finals.requests[0], request_id=f"r{number}", token_times_ns=times,
                    tokens_per_event=(1,) * num_tokens,
                )  # fmt: skip
                exporter.on_request(long)
                del times, long
            grown, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert exporter.num_waiting == 50
        assert grown - before < 2_000_000  # one request's tokens alone take 1.6 MB
        exporter.close()


@pytest.mark.parametrize("status", [400, 401, 413, 500])
def test_a_receiver_that_refuses_is_named_with_its_answer(
    finals: Finals, caplog: pytest.LogCaptureFixture, status: int
) -> None:
    with receiving(status=status) as sink:
        exporter = OtlpExporter({"endpoint": f"{sink.url}?key=hunter2", "timeout_s": 0.5})
        exporter.open()
        flood(exporter, finals, MOST_AT_ONCE)
        wait_until(lambda: exporter.num_dropped["not_delivered"] == MOST_AT_ONCE)
        close(exporter)
    line = caplog.records[0].getMessage()
    assert str(status) in line or responses[status] in line  # by the SDK's version
    assert "hunter2" not in caplog.text
    assert exporter.num_sent == 0


def test_recovered_receiver_is_logged(finals: Finals, caplog: pytest.LogCaptureFixture) -> None:
    with receiving(status=500) as sink:
        exporter = OtlpExporter({"endpoint": sink.url, "timeout_s": 0.5})
        exporter.open()
        for _ in range(2):
            flood(exporter, finals, MOST_AT_ONCE)
            wait_until(lambda: exporter.num_waiting == 0)
        sink.status = 200
        flood(exporter, finals, MOST_AT_ONCE)
        wait_until(lambda: exporter.num_sent == MOST_AT_ONCE)
        close(exporter)
    lines = [record.getMessage() for record in caplog.records]
    assert [("delivery failed" in line, "resumed" in line) for line in lines[:2]] == [
        (True, False),
        (False, True),
    ]
    assert f"{2 * MOST_AT_ONCE} items were dropped" in lines[1]


@pytest.mark.thorough
def test_a_slow_receiver_gets_what_fits_and_the_rest_is_counted(finals: Finals) -> None:
    with receiving() as sink:
        sink.delay_s = 0.5
        exporter = OtlpExporter({"endpoint": sink.url})
        exporter.open()
        flood(exporter, finals, 8 * MOST_AT_ONCE)
        assert close(exporter) < AT_ONCE_S
        assert exporter.num_waiting == 0
        assert accounted(exporter) == 8 * MOST_AT_ONCE
        assert exporter.num_dropped["closed"] > 0
        assert exporter.num_sent >= 2 * MOST_AT_ONCE
        assert len(sink.roots()) >= exporter.num_sent


def test_nothing_is_sent_before_the_wall_clock_is_known(finals: Finals) -> None:
    with receiving() as sink:
        exporter = OtlpExporter({"endpoint": sink.url})
        exporter.open()
        for request in finals.requests:
            exporter.on_request(request)
        time.sleep(0.05)
        assert exporter.num_waiting == len(finals.requests)
        assert close(exporter) < AT_ONCE_S
        assert exporter.num_dropped["closed"] == len(finals.requests)
        assert sink.num_connections == 0


@pytest.mark.thorough
def test_a_wall_clock_that_is_set_while_traces_wait_does_not_move_them(finals: Finals) -> None:
    view, request = finals.view, finals.requests[0]
    assert view is not None
    set_by_ns = 600_000_000_000
    with receiving(status=503) as sink:
        exporter = OtlpExporter({"endpoint": sink.url})
        exporter.open()
        exporter.on_snapshot(view)
        exporter.on_request(request)
        wait_until(lambda: sink.num_connections > 0)
        exporter.on_snapshot(dataclasses.replace(view, real_ns=view.real_ns + set_by_ns))
        exporter.on_request(replace(request, request_id="later"))
        sink.status = 200
        wait_until(lambda: exporter.num_sent == 2)
        close(exporter)
        starts = {
            root.attributes["inferscope.request.id"]: root.span.start_time_unix_nano
            for root in sink.roots()
        }
    offset_ns = view.real_ns - view.mono_ns
    assert starts[request.request_id] == request.arrived_ns + offset_ns
    assert starts["later"] == request.arrived_ns + offset_ns + set_by_ns


@pytest.mark.thorough
def test_an_hour_without_a_receiver_is_bounded_counted_and_made_up_for_by_the_newest(
    finals: Finals, caplog: pytest.LogCaptureFixture
) -> None:
    """One request ends every second."""
    num, room = 3600, 300
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    exporter = OtlpExporter({"endpoint": f"http://127.0.0.1:{port}/v1/traces", "queue_size": room})
    exporter.open()
    flood(exporter, finals, num // 2)
    wait_until(lambda: any("delivery failed" in line.getMessage() for line in caplog.records))
    flood(exporter, finals, num // 2)
    assert room <= exporter.num_waiting <= room + MOST_AT_ONCE
    assert accounted(exporter) == num
    with receiving(port=port) as sink:
        wait_until(lambda: exporter.num_waiting == 0)
        arrived = [root.attributes["inferscope.request.id"] for root in sink.roots()]
    assert close(exporter) < AT_ONCE_S
    assert exporter.num_sent == len(arrived) >= room
    assert exporter.num_dropped["queue_full"] == num - exporter.num_sent
    # The second half of the ids came again: all that arrived are the newest of it.
    assert set(arrived[-room:]) == {f"r{number}" for number in range(num // 2 - room, num // 2)}
    assert len(caplog.records) == 4  # that it begins, that it is too much, its end, and the count


@pytest.mark.thorough
def test_closing_does_not_wait_for_a_receiver_that_is_not_there(finals: Finals) -> None:
    """Its queue of connections is full: a connection is neither made nor refused."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as taken:
        held = [socket.socket() for _ in range(4)]
        for each in held:
            each.setblocking(False)
            with suppress(BlockingIOError):
                each.connect(taken.getsockname())
        port = taken.getsockname()[1]
        exporter = OtlpExporter({"endpoint": f"http://127.0.0.1:{port}/v1/traces", "timeout_s": 30})
        exporter.open()
        flood(exporter, finals, MOST_AT_ONCE)
        wait_until(
            lambda: exporter._traces is not None and exporter._traces[0]._connection is not None
        )
        assert close(exporter) < AT_ONCE_S
        assert exporter.num_dropped["closed"] == MOST_AT_ONCE
        for each in held:
            each.close()


def test_a_trace_arrives_soon_and_closing_is_safe_twice(finals: Finals) -> None:
    with receiving() as sink:
        exporter = OtlpExporter({"endpoint": sink.url})
        exporter.open()
        flood(exporter, finals, 1)
        wait_until(lambda: len(sink.roots()) == 1)
        exporter.close()
        assert close(exporter) < AT_ONCE_S
        exporter.on_request(finals.requests[0])
        assert exporter.num_dropped["closed"] == 1


def test_one_batch_that_cannot_be_made_does_not_end_the_thread(
    caplog: pytest.LogCaptureFixture,
) -> None:
    arrived: list[int] = []

    def deliver(batch: object) -> None:
        assert isinstance(batch, list)
        if "odd" in batch:
            raise ValueError("odd")
        arrived.extend(batch)

    courier: DeliveryQueue[object] = DeliveryQueue(
        deliver, lambda: None, max_waiting=1, name="test", gather_s=0.001
    )
    courier.start()
    for thing in ("odd", 1, "odd", 2):
        courier.put(thing)
        wait_until(lambda: courier.num_waiting == 0)
    courier.close()
    assert arrived == [1, 2]
    assert (courier.num_sent, courier.num_dropped["not_delivered"]) == (2, 2)
    assert "ValueError: odd" in caplog.text


def test_only_grpc_needs_a_package_and_its_absence_is_one_line() -> None:
    code = (
        "import sys\n"
        "import inferscope_otlp\n"
        "exporter = inferscope_otlp.OtlpExporter({'protocol': 'grpc'})\n"
        "known = ('opentelemetry', 'google', 'grpc', 'requests')\n"
        "assert not [m for m in sys.modules if m.partition('.')[0] in known]\n"
        "sys.modules['grpc'] = None\n"
        "from inferscope.errors import BadInput\n"
        "try:\n"
        "    exporter.open()\n"
        "except BadInput as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    (line,) = done.stdout.splitlines()
    assert 'pip install "inferscope-llm[grpc]"' in line


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"endpont": "x"}, "'endpont'. Did you mean endpoint?"),
        ({"zzz": 1}, "Known: endpoint, protocol, headers"),
        ({"endpoint": "127.0.0.1:4318"}, "endpoint is '127.0.0.1:4318'"),
        ({"endpoint": "http://h:port/"}, "endpoint is"),
        ({"endpoint": None}, "endpoint must be a string"),
        ({"keep_share": 2}, "keep_share is 2"),
        ({"keep_share": float("nan")}, "keep_share is nan"),
        ({"keep_share": True}, "keep_share is True"),
        ({"ttft_ms": "fast"}, "ttft_ms is 'fast'"),
        ({"timeout_s": 0}, "timeout_s is 0"),
        ({"queue_size": 0}, "queue_size is 0"),
        ({"queue_size": 1.5}, "queue_size is 1.5"),
        ({"compression": "zip"}, "gzip or none"),
        ({"protocol": "http/json"}, "http/protobuf or grpc"),
        ({"metrics_interval_s": -1}, "metrics_interval_s is -1"),
        ({"metrics_endpoint": "x"}, "metrics_endpoint is 'x'"),
        ({"certificate": 5}, "certificate is 5"),
        ({"headers": ["authorization"]}, "headers"),
        ({"headers": {"authorization": 7}}, "'authorization'"),
        ({"service_name": ""}, "service_name"),
        ("http://127.0.0.1:4318", "must be a mapping"),
    ],
)
def test_bad_settings_name_the_value_and_what_to_do(section: object, message: str) -> None:
    with pytest.raises(BadInput) as caught:
        OtlpExporter(section)  # type: ignore[arg-type]
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_secrets_are_shown_nowhere() -> None:
    exporter = OtlpExporter(
        {
            "endpoint": "https://user:hunter2@host:4318/v1/traces?key=hunter2",
            "headers": {"authorization": "hunter2"},
            "keep_share": 0.25,
        }
    )
    assert exporter.describe() == (
        "OTLP traces to https://host:4318/v1/traces, 0.25 of the unremarkable requests"
    )
    assert "hunter2" not in exporter.describe()


@pytest.mark.parametrize(
    "section",
    [
        {"headers": {"authorization": "Bearer hunter2\n"}},
        {"headers": {"authorization": " hunter2"}},
        {"headers": {"authorization": "hunter2\r\nx: y"}},
        {"headers": {"authorization": "hunter2\u20ac"}},
        {"headers": {"author\nization": "hunter2"}},
        {"headers": {"": "hunter2"}},
        {"endpoint": "ftp://user:hunter2@host//v1"},
        {"endpoint": "user:hunter2@host:4318/v1/traces?key=hunter2"},
        {"endpoint": "https://user:hunter2@host:x/v1?key=hunter2#hunter2"},
        {"endpoint": "https://host/v1\n?key=hunter2"},
        {"endpoint": ["https://host/v1?key=hunter2"]},
    ],
)
def test_what_is_refused_does_not_repeat_a_secret(section: dict[str, object]) -> None:
    with pytest.raises(BadInput) as caught:
        OtlpExporter(section)
    assert "hunter2" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_header_of_the_environment_that_cannot_be_sent_is_refused_without_its_value(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "api-key=hunter2%0Aand-more")
    with pytest.raises(BadInput) as caught:
        OtlpExporter({}).check()
    assert "api-key" in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_headers_of_the_environment_are_sent_and_ours_take_precedence(
    finals: Finals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "api-key=a%20b,x-scope=general")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "x-scope=traces")
    with receiving() as sink:
        exporter = OtlpExporter({"endpoint": sink.url, "headers": {"API-Key": "ours"}})
        exporter.open()
        flood(exporter, finals, 1)
        wait_until(lambda: exporter.num_sent == 1)
        close(exporter)
    (sent,) = sink.headers
    assert {name.lower(): value for name, value in sent.items()}.items() >= {
        ("api-key", "ours"),
        ("x-scope", "traces"),
    }


def test_a_certificate_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    broken = tmp_path / "ca.pem"
    broken.write_text("no certificate", encoding="utf-8")
    for path in (broken, tmp_path / "none.pem"):
        with pytest.raises(BadInput, match=path.name):
            OtlpExporter({"endpoint": "https://h/v1/traces", "certificate": str(path)}).check()
