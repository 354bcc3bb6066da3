"""How much is seen, by the engine's own count."""

from __future__ import annotations

import http.server
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from inferscope_prometheus import PrometheusExporter
from inferscope_prometheus.coverage import Coverage, Covered, own_count
from inferscope_prometheus.names import REFUSALS

from inferscope.errors import BadInput
from inferscope.metrics_page.dialects import dialect_of
from inferscope.metrics_page.fetching import MetricsPage, PageSample
from inferscope.metrics_page.reading import read
from inferscope.records import FINISHES
from tests.daemon.running import eventually

_PAGE = """# HELP vllm:request_success_total Count
# TYPE vllm:request_success_total counter
vllm:request_success_total{finished_reason="stop",model_name="m"} 40.0
vllm:request_success_total{finished_reason="length",model_name="m"} 2.0
"""


def test_both_counts_are_taken_over_the_same_time() -> None:
    covered = Covered()
    covered.add(1000, 10)
    assert covered.ratio is None
    covered.add(1040, 48)
    assert covered.ratio is None  # too few to judge
    covered.add(1100, 90)
    assert covered.ratio == pytest.approx(0.8)


def test_a_restart_of_either_begins_anew() -> None:
    for theirs, ours in ((3, 1000), (2000, 3)):
        covered = Covered()
        covered.add(1000, 500)
        covered.add(1100, 600)
        assert covered.ratio == 1.0
        covered.add(theirs, ours)
        assert covered.ratio is None
        covered.add(theirs + 100, ours + 90)
        assert covered.ratio == pytest.approx(0.9)


def test_old_counts_are_left_behind() -> None:
    covered = Covered()
    for minute in range(60):
        seen = 100 * minute if minute < 30 else 3000
        covered.add(100 * minute, seen)
    assert covered.ratio == 0.0


@pytest.fixture
def engine() -> Iterator[str]:
    """Serve the page of an engine."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(_PAGE.encode())

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_an_engines_page_is_read(engine: str) -> None:
    assert own_count(f"{engine}/metrics") == 42
    assert own_count("http://127.0.0.1:1/metrics") is None


@pytest.mark.parametrize(
    ("name", "label"),
    [("inferscope_serve_requests_total", "reason"), ("inferscope_requests_total", "finish_reason")],
)
def test_what_an_engine_refused_is_not_among_what_it_finished(name: str, label: str) -> None:
    samples = tuple(PageSample(name, {label: finish}, 10.0) for finish in FINISHES)
    page = MetricsPage("http://engine/metrics", 0, 0, samples)
    counted = len(FINISHES) - len(REFUSALS)
    assert read(page, dialect_of(page)).counters["finished"] == 10 * counted


def test_an_engine_is_asked_again_and_again() -> None:
    theirs = iter(range(0, 100_000, 100))
    asked: list[str] = []

    def finished_of(url: str) -> float:
        asked.append(url)
        return float(next(theirs))

    coverage = Coverage(
        {"e": "http://host:1"}, finished_of=finished_of, every_s=0.002, behind_s=0.001
    )
    try:
        coverage.update({"e": 7}, ["e"])
        end_s = time.monotonic() + 90
        while coverage.ratio("e") != 0.0:
            assert time.monotonic() < end_s
            time.sleep(0.005)
        assert asked[0] == "http://host:1/metrics"
        assert coverage.ratio("another") is None
    finally:
        coverage.close()


@contextmanager
def covering(urls: dict[str, str], theirs: dict[str, int]) -> Iterator[Coverage]:
    """Read pages whose counts grow by a step at every read."""
    counts = dict.fromkeys(theirs, 0)

    def finished_of(url: str) -> float:
        counts[url] += theirs[url]
        return float(counts[url])

    coverage = Coverage(urls, finished_of=finished_of, every_s=0.002, behind_s=0.001)
    try:
        yield coverage
    finally:
        coverage.close()


_OWN, _ANY = "http://host:1/metrics", "http://host:2/metrics"


def test_a_star_is_the_only_engine_that_is_not_named(caplog: pytest.LogCaptureFixture) -> None:
    urls = {"named": "http://host:1", "*": "http://host:2"}
    with covering(urls, {_OWN: 100, _ANY: 1000}) as coverage:
        ours = {"named": 7, "a-pods": 8, "gone": 9, "another": 10}
        coverage.update(ours, ["named", "a-pods"])
        eventually(lambda: coverage.ratio("a-pods") == coverage.ratio("named") == 0.0)
        assert coverage.ratio("gone") is None
        # The engine that replaced it owns the page now and starts a new count.
        coverage.update(ours, ["another", "named"])
        eventually(lambda: coverage.ratio("another") == 0.0)
        assert coverage.ratio("a-pods") is None
        assert caplog.messages == []
        # No engine is left: the page belongs to none, and no warning is due.
        coverage.update(ours, ["named"])
        eventually(lambda: coverage.ratio("another") is None)
        assert caplog.messages == []


def test_a_star_among_several_engines_is_none_and_reported_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with covering({"*": "http://host:2"}, {_ANY: 1000}) as coverage:
        for _ in range(2):
            coverage.update({"a": 1, "b": 2}, ["a"])
            eventually(lambda: coverage.ratio("a") == 0.0)
            coverage.update({"a": 1, "b": 2}, ["b", "a"])
            eventually(lambda: coverage.ratio("a") is None and bool(caplog.messages))
            assert coverage.ratio("b") is None
        (line,) = caplog.messages
    assert "there are 2 (a, b): the page is ignored. Use ENGINE_ID: http://HOST:PORT" in line


def test_shards_must_name_their_engines() -> None:
    exporter = PrometheusExporter({"engine_metrics": {"*": "http://host:2"}})
    with pytest.raises(BadInput, match=r"engine_metrics has '\*', .* 2 shards have several"):
        exporter.share(1, 2)
