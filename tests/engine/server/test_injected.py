"""Tests of injected waits over HTTP: their rows, and the blamed requests."""

from __future__ import annotations

import threading
import time
from collections import Counter

import pytest

from inferscope.attribution.metric_breakdown import breakdown
from inferscope.fold.final_records import FinalRequest
from inferscope.records import ADMITTED
from tests.engine.server.running import Server, Stream
from tests.engine.server.test_records import request_events

pytestmark = pytest.mark.thorough

BIG_TOKENS = 3900
"""Prompt tokens that fill eight steps, during which no other prompt is admitted."""
NAMED_SHARE = 0.95


def make_body(num_tokens: int, max_tokens: int) -> dict[str, object]:
    """Return a request whose prompt shares no prefix with an earlier one."""
    salt = time.monotonic_ns()
    prompt = [(salt >> at % 48) % 251 for at in range(num_tokens)]
    return {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}


def wait_for(server: Server, name: str, kind: int) -> None:
    """Wait until the core has recorded this event of a request."""
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        for events in request_events(server, "core", name).values():
            if any(event.kind == kind for event in events):
                return
        time.sleep(0.005)
    raise AssertionError(f"{name} never reached {kind}")


@pytest.fixture(scope="module")
def struck(server: Server) -> dict[str, FinalRequest]:
    """A decoding request, a long prefill of another, and a third that arrives during it."""
    big = threading.Thread(
        target=server.post,
        args=("/v1/completions", make_body(BIG_TOKENS, 1), {"X-Request-Id": "big"}),
    )
    with Stream(
        server.port, "/v1/completions", make_body(10, 300), headers={"X-Request-Id": "decoding"}
    ) as decoding:
        events = decoding.events()
        next(events)
        big.start()
        wait_for(server, "big", ADMITTED)
        server.post("/v1/completions", make_body(13, 4), {"X-Request-Id": "victim"})
        assert list(events)[-1] == "[DONE]"
    big.join(60)
    return {name: server.final(name) for name in ("decoding", "big", "victim")}


def share_of(final: FinalRequest, cause: str, of: FinalRequest) -> float:
    """Return the share of a cause's row that is blamed on another request."""
    named = sum(ns for why, name, ns in final.blame if (why, name) == (cause, of.request_id))
    return named / final.ledger_ns[cause]


def test_wait_behind_a_prefill_is_queue_time_blamed_on_it(
    struck: dict[str, FinalRequest],
) -> None:
    victim, big = struck["victim"], struck["big"]
    assert victim.queued_ns is not None
    assert victim.admitted_ns is not None
    assert big.first_token_ns is not None
    waited_ns = victim.admitted_ns - victim.queued_ns
    assert waited_ns > 0.5 * (big.first_token_ns - victim.queued_ns) > 0, "it did not wait"
    queue_ns = victim.ttft_ledger_ns["queue"] + victim.ttft_ledger_ns.get("queue_idle", 0)
    assert queue_ns >= NAMED_SHARE * waited_ns
    assert share_of(victim, "queue", big) >= NAMED_SHARE


def test_a_decode_beside_a_prefill_is_slowed_by_it(struck: dict[str, FinalRequest]) -> None:
    decoding, big = struck["decoding"], struck["big"]
    assert big.first_token_ns is not None
    assert big.admitted_ns is not None
    beside_ns = big.first_token_ns - big.admitted_ns
    # Other load of the host makes steps slower than their work explains, and the gaps longer.
    by_load_ns = sum(decoding.ledger_ns.get(cause, 0) for cause in ("slowdown", "cpu_gap"))
    # The rest is the steps' own decodes.
    assert decoding.ledger_ns["decode_interference"] >= 0.3 * (beside_ns - by_load_ns)
    assert decoding.ledger_ns["decode_interference"] > decoding.ledger_ns["decode_co_batched"]
    assert share_of(decoding, "decode_interference", big) >= NAMED_SHARE


@pytest.mark.parametrize("name", ["decoding", "big", "victim"])
def test_rows_before_the_first_token_are_within_the_totals(
    struck: dict[str, FinalRequest], name: str
) -> None:
    final = struck[name]
    assert final.first_token_ns is not None
    assert sum(final.ledger_ns.values()) == final.delivered_ns - final.arrived_ns
    assert sum(final.ttft_ledger_ns.values()) == final.first_token_ns - final.arrived_ns
    for cause, ns in final.ttft_ledger_ns.items():
        assert ns <= final.ledger_ns[cause], cause
    after = breakdown(final, "tpot")
    if after is not None:
        assert sum(after.by_cause.values()) == after.whole_ns
    blamed: Counter[str] = Counter()
    for cause, _, ns in final.blame:
        blamed[cause] += ns
    for cause, ns in blamed.items():
        assert ns == final.ledger_ns[cause], cause
