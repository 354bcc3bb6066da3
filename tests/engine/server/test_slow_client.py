"""Tests that the `delivery` time of a client that does not read is booked to its request."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from inferscope.fold.final_records import FinalRequest
from inferscope.records import FINISHED
from tests.engine.server.running import Server, Stream, serving
from tests.engine.server.test_records import request_events

pytestmark = pytest.mark.thorough

_USAGE = {"include_usage": True, "continuous_usage_stats": True}
"""Options that make an event of 250 bytes per token. The response is then several times as large as
the buffers, even if a busy front end sends several tokens per event."""
_LEAST_UNREAD_S = 1.0


@pytest.fixture(scope="module")
def patient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that waits for its clients longer than a busy machine takes to serve them."""
    with serving(
        tmp_path_factory.mktemp("patient"), "--client-timeout", "180", "builtin"
    ) as running:
        yield running.wait()


def finished_ns(server: Server, name: str) -> int:
    """Wait until the core has finished a client's requests; return the time of the last end."""
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        ends = [
            [event.at_ns for event in events if event.kind == FINISHED]
            for events in request_events(server, "core", name).values()
        ]
        if ends and all(ends):
            return max(max(each) for each in ends)
        time.sleep(0.01)
    raise AssertionError(f"{name} is still under way")


@pytest.mark.parametrize("num_texts", [1, 2])
def test_unread_response_is_booked_as_its_own_delivery(patient: Server, num_texts: int) -> None:
    server = patient
    slow, quick = f"slow-{num_texts}", f"quick-{num_texts}"
    body = {"prompt": "def f", "max_tokens": 1000, "ignore_eos": True, "n": num_texts}
    with Stream(
        server.port,
        "/v1/completions",
        {**body, "stream_options": _USAGE},
        headers={"X-Request-Id": slow},
        receive_bytes=16 << 10,
    ) as stream:
        server.post("/v1/completions", body, {"X-Request-Id": quick})
        ended_ns = finished_ns(server, slow)
        while time.monotonic_ns() < ended_ns + _LEAST_UNREAD_S * 1e9:
            time.sleep(0.01)  # the time that the client does not read
        resumed_ns = time.monotonic_ns()
        assert list(stream.events())[-1] == "[DONE]"
    slow_ones, quick_ones = finals_of(server, slow), finals_of(server, quick)
    assert len(slow_ones) == len(quick_ones) == num_texts
    for final in slow_ones:
        assert final.ledger_ns["delivery"] >= resumed_ns - ended_ns
    for final in quick_ones:
        assert final.ledger_ns.get("delivery", 0) <= 0.1 * _LEAST_UNREAD_S * 1e9


def finals_of(server: Server, name: str) -> list[FinalRequest]:
    return server.finals_of(set(request_events(server, "core", name)))
