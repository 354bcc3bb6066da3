"""Pages that are broken on purpose: what they can make a reader wait for, print or compute."""

from __future__ import annotations

import base64
import math
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st
from inferscope_prometheus.coverage import own_count

from inferscope.errors import BadInput, NotFound
from inferscope.insight.page import page_findings
from inferscope.metrics_page.dialects import dialect_of
from inferscope.metrics_page.fetching import MetricsPage, PageSample, fetch, page_url
from inferscope.metrics_page.reading import PageTotals, read
from inferscope.metrics_page.view import make_view
from inferscope.text.page.lines import page_text
from tests.metrics_page.page_server import serving

PAGE = b"vllm:num_requests_running 3\n"
ALL = ("ttft", "tbt", "e2e", "queue")
HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n"


class Answering:
    """A server that sends one raw answer, piece by piece, and then ends the connection."""

    def __init__(self, pieces: list[bytes], pause_s: float) -> None:
        self._pieces = pieces
        self._pause_s = pause_s
        self._is_over = threading.Event()
        self.num_unsent = len(pieces)
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}/metrics"

    def serve(self) -> None:
        """Answer one client."""
        try:
            connection, _ = self._listening.accept()
        except OSError:
            return
        with connection:
            try:
                connection.recv(1 << 16)
                for piece in self._pieces:
                    connection.sendall(piece)
                    self.num_unsent -= 1
                    if self._is_over.wait(self._pause_s):
                        return
            except OSError:
                return

    def stop(self) -> None:
        """End what is under way."""
        self._is_over.set()
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()


@contextmanager
def answering(*pieces: bytes, pause_s: float = 0.0) -> Iterator[Answering]:
    server = Answering(list(pieces), pause_s)
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join()


@pytest.mark.parametrize("begun", [b"HTTP/1.1 200 OK\r\nX: ", HEAD], ids=["head", "body"])
def test_a_page_that_never_ends_is_waited_for_until_the_deadline(begun: bytes) -> None:
    with answering(begun, *[b"a"] * 200, pause_s=0.03) as server:
        with pytest.raises(NotFound, match="timed out"):
            fetch(server.url, timeout_s=0.15)
        assert server.num_unsent > 0


def test_what_a_server_calls_its_error_is_not_repeated() -> None:
    with answering(b"HTTP/1.1 500 \x1b[2Jgone\r\nContent-Length: 0\r\n\r\n") as server:
        with pytest.raises(NotFound, match="answers 500 Internal Server Error") as caught:
            fetch(server.url)
        assert str(caught.value).isprintable()


def test_an_answer_that_is_no_http_is_shown_without_escapes() -> None:
    with answering(b"\x1b]0;gone\x07 and more\r\n\r\n") as server:
        with pytest.raises(NotFound, match="cannot be reached") as caught:
            fetch(server.url)
        assert str(caught.value).isprintable()


def test_names_on_an_unknown_page_are_shown_without_escapes() -> None:
    page = MetricsPage("http://x", 0, 0, (PageSample("\x1b[31mred", {}, 1.0),))
    with pytest.raises(NotFound) as caught:
        dialect_of(page)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("to", ["{other}/metrics", "ftp://127.0.0.1/x", "file:///etc/passwd"])
def test_no_redirect_is_followed(to: str) -> None:
    with serving(PAGE.decode()) as other:
        location = to.format(other=other.url).encode()
        head = b"HTTP/1.1 302 Found\r\nContent-Length: 0\r\nLocation: " + location + b"\r\n\r\n"
        with answering(head) as server, pytest.raises(NotFound, match="not followed"):
            fetch(server.url)
        assert other.asked == []


def test_credentials_of_an_address_are_sent_and_not_shown() -> None:
    with serving(PAGE.decode()) as server:
        url = page_url(server.url.replace("://", "://reader:pass-word@"))
        assert fetch(url).url == server.url + "/metrics"
        assert server.authorizations == ["Basic " + base64.b64encode(b"reader:pass-word").decode()]
    for broken in (url, "http://reader:pass/word@host/metrics", "http://reader:pass-word@:80"):
        with pytest.raises((NotFound, BadInput)) as caught:
            fetch(page_url(broken), timeout_s=1)
        assert "word" not in str(caught.value)


def test_a_line_that_takes_long_to_read_is_left_out() -> None:
    labels = ",".join(f'a{number}=""' for number in range(4000))
    with serving(f"go_threads{{{labels}}} 1\nvllm:num_requests_running 3\n") as server:
        found = fetch(page_url(server.url))
    assert [sample.name for sample in found.samples] == ["vllm:num_requests_running"]


def test_counts_that_are_none_are_unknown() -> None:
    for number in ("NaN", "+Inf", "-1", "1e308"):
        with serving(f"vllm:request_success_total {number}\n") as server:
            assert own_count(page_url(server.url)) is None
    with serving("vllm:request_success_total 7\n") as server:
        assert own_count(page_url(server.url)) == 7


_ANY = st.one_of(
    st.floats(), st.sampled_from([math.inf, -math.inf, math.nan, 1e308, -1.0, 0.0, 3.0])
)


@given(
    gauges=st.tuples(_ANY, _ANY, _ANY),
    counters=st.lists(st.tuples(_ANY, _ANY), min_size=2, max_size=2),
    buckets=st.lists(st.tuples(st.one_of(_ANY.map(str), st.text(max_size=5)), _ANY), max_size=5),
    model=st.text(max_size=300),
)
def test_any_numbers_make_a_view_that_fits_the_screen(
    gauges: tuple[float, float, float],
    counters: list[tuple[float, float]],
    buckets: list[tuple[str, float]],
    model: str,
) -> None:
    ttft = "vllm:time_to_first_token_seconds"
    readings = []
    for look_no, (prompt, cached) in enumerate(counters):
        samples = [
            PageSample("vllm:num_requests_running", {"model_name": model}, gauges[0]),
            PageSample("vllm:num_requests_waiting", {}, gauges[1]),
            PageSample("vllm:kv_cache_usage_perc", {}, gauges[2]),
            PageSample("vllm:prompt_tokens_total", {}, prompt),
            PageSample("vllm:prompt_tokens_cached_total", {}, cached),
            *(PageSample(f"{ttft}_bucket", {"le": le}, number) for le, number in buckets),
            PageSample(f"{ttft}_sum", {}, gauges[0]),
        ]
        page = MetricsPage("http://x/metrics", 10**9 * look_no, 10**18, tuple(samples))
        readings.append(read(page, dialect_of(page)))
    view = make_view("http://x/metrics", dialect_of(page), readings, 60 * 10**9)
    last = readings[-1]
    totals = PageTotals(
        *(view.url, view.server, view.models, None, (readings[0].gauges, last.gauges)),
        *({"finished": 100.0}, {word: last.histograms["ttft"] for word in ALL if last.histograms}),
    )
    found = page_findings(totals).findings
    assert all(0 <= finding.lost_share <= 1 for finding in found or ())
    text = page_text(view, findings=found or (), width=100)
    assert max(map(len, text.splitlines())) <= 100
    assert all(line.isprintable() for line in text.splitlines())
