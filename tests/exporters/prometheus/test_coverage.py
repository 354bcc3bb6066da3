"""How much is seen, by the engine's own count."""

from __future__ import annotations

import http.server
import threading
import time
from collections.abc import Iterator

import pytest
from inferscope_prometheus.coverage import Coverage, Covered, own_count

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
    assert covered.ratio is None  # too few to say
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
        coverage.ours = {"e": 7}
        end_s = time.monotonic() + 30
        while coverage.ratio("e") != 0.0:
            assert time.monotonic() < end_s
            time.sleep(0.005)
        assert asked[0] == "http://host:1/metrics"
        assert coverage.ratio("another") is None
    finally:
        coverage.close()
