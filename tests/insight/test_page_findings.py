"""Findings of a page's totals: each rule claims only what the page proves, and lists the rest."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferscope.insight.findings import RULES, EngineFindings, Finding, findings
from inferscope.insight.findings.run_summary import RunSummarizer
from inferscope.insight.page import page_findings
from inferscope.metrics_page.reading import PageHistogram, PageTotals
from inferscope.text.findings import findings_text

BOUNDS_S = (0.001, 0.01, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 40.0, math.inf)


def histogram(observed_s: Sequence[float]) -> PageHistogram:
    counts = tuple(float(sum(each <= bound for each in observed_s)) for bound in BOUNDS_S)
    return PageHistogram(BOUNDS_S, counts, sum(observed_s))


def totals(
    *gauges: dict[str, float], counters: dict[str, float] | None = None, **observed_s: list[float]
) -> PageTotals:
    durations = {word: histogram(each) for word, each in observed_s.items()}
    finished = {"finished": float(len(observed_s["e2e"]))} if "e2e" in observed_s else {}
    return PageTotals(
        "http://gpu7:8000/metrics",
        "vLLM",
        ("llama",),
        None,
        gauges or ({"running": 1.0, "waiting": 0.0, "kv_share": 0.5},),
        {**finished, **(counters or {})},
        durations,
    )


def by_id(found: EngineFindings) -> dict[str, Finding]:
    return {finding.id: finding for finding in found.findings or ()}


HEALTHY = {"ttft": [0.05] * 40, "tbt": [0.02] * 400, "e2e": [1.0] * 40, "queue": [0.001] * 40}


def test_a_healthy_page_has_no_findings_and_lists_every_rule_that_it_cannot_decide() -> None:
    found = page_findings(totals(**HEALTHY, counters={"preemptions": 0.0}))
    assert found.findings == ()
    decided = {"late_first_tokens", "short_of_kv", "small_batch_with_queue"}
    listed = {rule.id for rule in found.not_judged}
    assert listed == {rule.__name__ for rule in RULES} - decided | {"bad_e2e"}
    text = findings_text((found,), width=100)
    assert "that its totals can show" in text
    assert all(name in text for name in listed)


def test_queue_time_that_dominates_is_late_first_tokens_without_the_queue_as_counterfactual() -> (
    None
):
    queued = {**HEALTHY, "ttft": [1.0] * 40, "e2e": [2.0] * 40, "queue": [0.8] * 40}
    finding = by_id(page_findings(totals(**queued)))["late_first_tokens"]
    assert finding.lost_share == pytest.approx(0.4)
    assert finding.severity == "high"
    assert finding.counterfactual is not None
    assert finding.counterfactual.actual_ns == 1_000_000_000
    assert finding.counterfactual.without_ns == pytest.approx(200_000_000)


@pytest.mark.parametrize(
    ("used", "waiting", "expected"),
    [
        ((0.99, 0.99), (4, 4), "short_of_kv"),
        ((0.5, 0.5), (4, 4), "small_batch_with_queue"),
        ((0.5, 0.5), (4, 0), None),
        ((0.93, 0.93), (4, 4), None),
        ((0.99, 0.5), (4, 4), None),
    ],
)
def test_waiting_requests_are_judged_by_kv_use_in_every_reading(
    used: tuple[float, float], waiting: tuple[float, float], expected: str | None
) -> None:
    gauges = [
        {"running": 8.0, "waiting": float(queue), "kv_share": kv}
        for kv, queue in zip(used, waiting, strict=True)
    ]
    found = by_id(page_findings(totals(*gauges, **HEALTHY)))
    assert set(found) == ({expected} if expected else set())


def test_preemptions_are_short_of_kv_from_one_in_fifty_requests_on() -> None:
    assert not by_id(page_findings(totals(**HEALTHY, counters={"preemptions": 0.0})))
    found = by_id(page_findings(totals(**HEALTHY, counters={"preemptions": 1.0})))
    assert set(found) == {"short_of_kv"}
    assert found["short_of_kv"].lost_share == 0, "a page does not state the time they took"


def test_what_the_page_lacks_is_a_reason_and_never_a_finding() -> None:
    found = page_findings(totals({"running": 1.0}, counters={"finished": 100.0}))
    assert found.findings == ()
    reasons = {rule.id: rule.reason for rule in found.not_judged}
    assert reasons["bad_ttft"] == "the page lacks a histogram of ttft with values"
    assert "KV use" in reasons["short_of_kv"]
    assert reasons["slow_rank"] == "a metrics page has no steps"


def test_a_page_of_few_requests_is_not_analyzed() -> None:
    few = {word: observed[:19] for word, observed in HEALTHY.items()}
    assert page_findings(totals(**few)).findings is None


def test_records_can_decide_all_rules() -> None:
    assert findings(RunSummarizer()) == ()
    assert EngineFindings("e", "", 0, 0, None, None).not_judged == ()


@given(st.lists(st.floats(0.0001, 60), min_size=20, max_size=200))
def test_a_bad_ttft_is_proved_by_the_buckets(observed_s: list[float]) -> None:
    of_all_s = sum(observed_s) * 1.5
    page = totals(ttft=observed_s, e2e=[each * 1.5 for each in observed_s])
    finding = by_id(page_findings(page)).get("bad_ttft")
    p95_s = sorted(observed_s)[math.ceil(0.95 * len(observed_s)) - 1]
    if finding is not None:
        assert p95_s > 2.0
        over_s = sum(max(0.0, each - 2.0) for each in observed_s)
        assert finding.lost_share <= over_s / of_all_s + 1e-9
    if p95_s > 2.5:  # the first bound beyond the limit
        assert finding is not None
