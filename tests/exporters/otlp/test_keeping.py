"""Which requests become traces."""

from __future__ import annotations

import pytest
from inferscope_otlp import OtlpExporter
from inferscope_otlp.trace_sampling import FAILURES
from msgspec.structs import replace

from inferscope.fold.final_records import FinalRequest
from inferscope.records import FINISHES
from tests.exporters.otlp.conftest import Finals
from tests.exporters.otlp.sink import receiving


def kept(finals: Finals, requests: list[FinalRequest], **settings: object) -> dict[str, dict]:
    """Return the root attributes of what arrived, by request."""
    with receiving() as sink:
        exporter = OtlpExporter({"endpoint": sink.url, **settings})
        exporter.open()
        for request in requests:
            exporter.on_request(request)
        assert finals.view is not None
        exporter.on_snapshot(finals.view)
        exporter.close()
        assert exporter.num_sent + exporter.num_left_out == len(requests)
        return {root.attributes["inferscope.request.id"]: root.attributes for root in sink.roots()}


def test_an_answer_in_one_piece_breaches_no_threshold_of_tokens(finals: Finals) -> None:
    one = finals.requests[0]
    requests = [
        replace(
            one, request_id=stream or "unknown", attributes={"stream": stream} if stream else {}
        )
        for stream in ("true", "false", "")
    ]
    arrived = kept(finals, requests, ttft_ms=1e-6, tbt_ms=1e-6)
    for name, root in arrived.items():
        has = name != "false"
        assert (root.get("inferscope.slo.ttft") == "bad") is has
        assert (root.get("inferscope.slo.tbt") == "bad") is has
        assert ("gen_ai.latency.time_to_first_token" in root) is has
    assert len(arrived) == 3


def test_breaches_are_kept_whatever_the_share(finals: Finals) -> None:
    ttfts = {
        request.request_id: (request.first_token_ns or 0) - request.arrived_ns
        for request in finals.requests
    }
    limit_ns = sorted(ttfts.values())[len(ttfts) // 2]
    arrived = kept(finals, finals.requests, keep_share=0, ttft_ms=limit_ns / 1e6)
    assert set(arrived) == {name for name, ttft_ns in ttfts.items() if ttft_ns > limit_ns}
    assert 0 < len(arrived) < len(ttfts)
    assert {found["inferscope.slo.ttft"] for found in arrived.values()} == {"bad"}

    gaps = {request.request_id: max(request.tbt_ns) for request in finals.requests}
    limit_ns = sorted(gaps.values())[-10]
    arrived = kept(finals, finals.requests, keep_share=0, tbt_ms=limit_ns / 1e6)
    assert set(arrived) == {name for name, gap_ns in gaps.items() if gap_ns > limit_ns}
    assert len(arrived) == 9
    assert {found["inferscope.slo.tbt"] for found in arrived.values()} == {"bad"}


def test_what_is_kept_beside_breaches_states_that_it_was_good(finals: Finals) -> None:
    arrived = kept(finals, finals.requests, ttft_ms=1e6, tbt_ms=1e6)
    assert len(arrived) == len(finals.requests)
    for found in arrived.values():
        assert (found["inferscope.slo.ttft"], found["inferscope.slo.tbt"]) == ("good", "good")


def test_a_deadline_that_passed_without_a_token_is_a_breach(finals: Finals) -> None:
    silent = replace(finals.requests[0], first_token_ns=None, finish="client_cancel")
    life_ms = (silent.delivered_ns - silent.arrived_ns) / 1e6
    assert kept(finals, [silent], keep_share=0, ttft_ms=life_ms * 0.9)
    assert not kept(finals, [silent], keep_share=0, ttft_ms=life_ms * 1.1)


@pytest.mark.parametrize("finish", FINISHES)
def test_failures_are_kept_whatever_the_share(finals: Finals, finish: str) -> None:
    request = replace(finals.requests[0], finish=finish)
    assert bool(kept(finals, [request], keep_share=0)) is (finish in FAILURES)


def test_the_share_is_drawn_alike_each_time_and_grows_with_it(finals: Finals) -> None:
    many = [replace(finals.requests[0], request_id=f"r{number}") for number in range(400)]
    drawn = {share: set(kept(finals, many, keep_share=share)) for share in (0, 0.1, 0.5, 1)}
    assert drawn[0] <= drawn[0.1] <= drawn[0.5] <= drawn[1]
    assert (len(drawn[0]), len(drawn[1])) == (0, 400)
    assert 15 < len(drawn[0.1]) < 70
    assert 150 < len(drawn[0.5]) < 250
    assert set(kept(finals, many, keep_share=0.1)) == drawn[0.1]


def test_the_clients_decision_holds_except_for_breaches(finals: Finals) -> None:
    recorded = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    ignored = recorded[:-2] + "00"
    one, other = finals.requests[:2]
    both = [replace(one, trace=recorded), replace(other, trace=ignored)]
    assert set(kept(finals, both, keep_share=0)) == {one.request_id}
    assert set(kept(finals, both, keep_share=1)) == {one.request_id}
    failed = [replace(request, finish="error") for request in both]
    assert set(kept(finals, failed, keep_share=0)) == {one.request_id, other.request_id}


def test_clients_that_record_every_trace_are_kept_to_a_rate(finals: Finals) -> None:
    one = finals.requests[0]

    def recorded(number: int, at_s: float) -> FinalRequest:
        trace = f"00-{'f' * 28}{number:04x}-b7ad6b7169203331-01"
        ended_ns = one.delivered_ns + round(at_s * 1e9)
        return replace(one, request_id=f"r{number}", trace=trace, delivered_ns=ended_ns)

    at_once = [recorded(number, 0) for number in range(400)]
    assert len(kept(finals, at_once, keep_share=0, client_traces_per_s=5)) == 5
    assert not kept(finals, at_once, keep_share=0, client_traces_per_s=0)
    assert len(kept(finals, at_once, keep_share=1, client_traces_per_s=0)) == 400
    # A client chooses its trace's id, which would always be drawn.
    assert 15 < len(kept(finals, at_once, keep_share=0.1, client_traces_per_s=0)) < 70
    spread = [recorded(number, number / 10) for number in range(100)]
    assert 45 <= len(kept(finals, spread, keep_share=0, client_traces_per_s=5)) <= 55
    failed = [replace(request, finish="error") for request in at_once]
    assert len(kept(finals, failed, keep_share=0, client_traces_per_s=0)) == 400
