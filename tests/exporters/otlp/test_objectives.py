"""What a collector's objectives leave in traces."""

from __future__ import annotations

from msgspec.structs import replace

from inferscope.slo.verdicts import Judged
from tests.exporters.otlp.conftest import Finals
from tests.exporters.otlp.test_keeping import kept


def test_what_missed_an_objective_is_kept_with_its_cause(finals: Finals) -> None:
    one = replace(finals.requests[0], finish="stop", trace="")
    fine = Judged({"ttft": True, "chat-tbt": True})
    missed = Judged({"ttft": True, "chat-tbt": False}, "decode_interference")
    unexplained = Judged({"availability": False})
    requests = [
        replace(one, request_id=name, judged=judged)
        for name, judged in (("fine", fine), ("missed", missed), ("who knows", unexplained))
    ]
    arrived = kept(finals, requests, keep_share=0)
    assert set(arrived) == {"missed", "who knows"}
    found = arrived["missed"]
    assert found["inferscope.slo.ttft"] == "good"
    assert found["inferscope.slo.chat-tbt"] == "bad"
    assert found["inferscope.slo.cause"] == "decode_interference"
    assert arrived["who knows"]["inferscope.slo.availability"] == "bad"
    assert "inferscope.slo.cause" not in arrived["who knows"]
