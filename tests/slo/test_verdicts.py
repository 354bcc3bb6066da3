"""Good, bad and not counted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from inferscope.fold.final_records import FinalRequest
from inferscope.records import FINISHES
from inferscope.slo import Metric, Objective
from inferscope.slo.verdicts import FAILURES, judged, latency_limits, verdict
from tests.slo.requests import FINE, IN_ONE_PIECE, MS, NO_TOKEN, ONE_TOKEN

LEFT = replace(FINE, finish="client_cancel")
LOST = replace(FINE, finish="engine_lost")
LEFT_WITHOUT = replace(NO_TOKEN, finish="client_cancel")
LATE = replace(FINE, joined_late=True)


@pytest.mark.parametrize(
    ("request_", "metric", "limit_ms", "is_good"),
    [
        (FINE, "ttft", 100, True),
        (FINE, "ttft", 99, False),
        (LEFT, "ttft", 99, False),
        (LEFT, "ttft", 100, True),
        (IN_ONE_PIECE, "ttft", 99, None),
        (LEFT_WITHOUT, "ttft", 309, False),
        (LEFT_WITHOUT, "ttft", 310, None),
        (replace(NO_TOKEN, finish="rejected"), "ttft", 310, None),
        (replace(NO_TOKEN, finish="engine_lost"), "ttft", 309, False),
        (replace(NO_TOKEN, finish="error"), "ttft", 310, None),
        (NO_TOKEN, "ttft", 1, None),
        (replace(LATE, first_token_ns=None), "ttft", 1, None),
        (replace(LEFT_WITHOUT, joined_late=True), "ttft", 1, None),
        (FINE, "tbt", 120, True),
        (FINE, "tbt", 119, False),
        (LEFT, "tbt", 119, False),
        (LEFT, "tbt", 120, None),
        (replace(LOST, delivered_ns=430 * MS), "tbt", 120, False),
        (ONE_TOKEN, "tbt", 1, None),
        (IN_ONE_PIECE, "tbt", 1, None),
        (LATE, "tbt", 1, None),
        (FINE, "tpot", 100, True),
        (FINE, "tpot", 99, False),
        (ONE_TOKEN, "tpot", 1, None),
        (LEFT, "tpot", 99, None),
        (LOST, "tpot", 99, None),
        (FINE, "e2e", 300, True),
        (FINE, "e2e", 299, False),
        (IN_ONE_PIECE, "e2e", 299, False),
        (LEFT, "e2e", 309, False),
        (LEFT, "e2e", 310, None),
        (NO_TOKEN, "e2e", 310, True),
        (LATE, "e2e", 1, None),
    ],
)
def test_a_latency_is_judged_by_its_deadline(
    request_: FinalRequest, metric: Metric, limit_ms: int, is_good: bool | None
) -> None:
    assert verdict(request_, metric, limit_ms * MS) is is_good


@pytest.mark.parametrize("finish", FINISHES)
def test_a_failure_is_the_servers_and_a_leaving_is_nobodys(finish: str) -> None:
    assert "shed" in FAILURES
    expected = {"stop": True, "length": True, "client_cancel": None, "rejected": None}
    assert {*expected, *FAILURES} == set(FINISHES)
    request = replace(FINE, finish=finish)
    is_good = expected.get(finish, False)
    assert verdict(request, "availability", None) is is_good
    assert verdict(replace(request, joined_late=True), "availability", None) is is_good
    assert verdict(request, "goodput", None) is is_good
    assert verdict(request, "goodput", None, has_missed=True) is False
    joined_late = verdict(replace(request, joined_late=True), "goodput", None)
    assert joined_late is (False if finish in FAILURES else None)


def objective(metric: Metric, limit_ms: int | None = None, name: str = "") -> Objective:
    limit_ns = None if limit_ms is None else limit_ms * MS
    return Objective(name or metric, metric, limit_ns, 0.99, 86400 * 10**9)


@given(
    st.sampled_from(FINISHES),
    st.sampled_from([FINE, ONE_TOKEN, NO_TOKEN, IN_ONE_PIECE, LATE]),
    st.lists(st.integers(1, 400), min_size=4, max_size=4),
)
def test_goodput_is_all_of_the_others(
    finish: str, request: FinalRequest, limits_ms: list[int]
) -> None:
    metrics: tuple[Metric, ...] = ("ttft", "tbt", "tpot", "e2e")
    latencies = [objective(*each) for each in zip(metrics, limits_ms, strict=True)]
    whole = (objective("goodput"), objective("availability"), *latencies)
    results = judged(replace(request, finish=finish), whole)
    others = [is_good for name, is_good in results.items() if name != "goodput"]
    if "goodput" in results:
        assert results["goodput"] is all(others)
    else:
        assert all(others)
        assert finish in ("client_cancel", "rejected") or request.joined_late


def test_of_several_thresholds_the_strictest_is_explained() -> None:
    several = [objective("tbt", 200, "a"), objective("tbt", 100, "b"), objective("availability")]
    (limit,) = latency_limits(several)
    assert (limit.metric, limit.limit_ns) == ("tbt", 100 * MS)
