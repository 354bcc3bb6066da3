"""A run whose latency is bad names its largest ledger row; one whose latency is good names none."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferscope.fold.final_records import FinalRequest
from inferscope.insight.findings import Finding
from inferscope.insight.findings.bad_latency import bad_latency
from inferscope.insight.findings.rules import findings_of
from inferscope.insight.findings.run_summary import RunSummary
from inferscope.insight.findings.tail import Tail
from inferscope.records import CAUSE_BY_NAME, CAUSES

MS, SECOND = 1_000_000, 1_000_000_000


def answer(
    before_ms: dict[str, int], gaps_ms: list[int], *, after: str = "decode_own", whole: bool = False
) -> FinalRequest:
    """Return an answer whose gaps between tokens are all of one cause."""
    before = {cause: ms * MS for cause, ms in before_ms.items()}
    times = [sum(before.values())]
    for gap_ms in gaps_ms:
        times.append(times[-1] + gap_ms * MS)
    ledger = dict(before)
    if gaps_ms:
        ledger[after] = ledger.get(after, 0) + sum(gaps_ms) * MS
    return FinalRequest(
        "e", "r", None, "", {"stream": "false"} if whole else {}, 10, 0, len(times), 0, None, None,
        times[0], times[-1], times[-1], "http", "http", "stop", False, 0, ledger, before,
        array("q", times), (1,) * len(times), 0, 0, None, None, False, "", "host",
    )  # fmt: skip


def run_of(*requests: FinalRequest) -> RunSummary:
    run = RunSummary("e")
    for request in requests:
        run.requests.add(request, np.zeros(request.num_gaps, dtype=np.int64))
    return run


def bad(run: RunSummary, judged: dict[str, bool] | None = None) -> dict[str, Finding]:
    return {finding.id: finding for finding in bad_latency(run, (), judged or {})}


SLOW = answer(
    {"prefill_own": 1_000, "slowdown": 4_000, "queue": 3_000}, [900, 1_500], after="slowdown"
)
FINE = answer({"prefill_own": 100, "queue": 20}, [20, 25])


def test_a_run_with_late_tokens_and_no_other_finding_names_its_largest_row() -> None:
    """The case that was silent: TTFT 8 s at p95, TBT 1.5 s at p99, much of it slower steps."""
    found = {finding.id: finding for finding in findings_of(run_of(*[SLOW] * 20))}
    assert found.keys() == {"bad_ttft", "bad_tbt"}
    first = found["bad_ttft"]
    assert first.causes == ("slowdown",)
    numbers = {number.name: number.value for number in first.evidence}
    assert numbers["largest_row_share"] == 0.5
    assert numbers["largest_row_in_tail_ns"] == 4 * SECOND
    assert first.counterfactual is not None
    assert first.counterfactual.without_ns == 4 * SECOND
    assert "TTFT is 8 s at p95" in first.sentences[0]


def test_a_run_with_good_latency_is_quiet() -> None:
    assert bad(run_of(*[FINE] * 20)) == {}
    assert findings_of(run_of(*[FINE] * 20)) == ()


@pytest.mark.parametrize("cause", CAUSES)
def test_each_row_can_be_the_largest_and_states_what_to_do(cause: str) -> None:
    found = bad(run_of(*[answer({"output": 10, cause: 3_000}, [10])] * 20))
    (only,) = found.values()
    assert only.causes == (cause,)
    assert CAUSE_BY_NAME[cause].advice in only.advice
    assert CAUSE_BY_NAME[cause].meaning in only.sentences[0]


def test_what_another_finding_names_is_not_named_twice() -> None:
    run = run_of(*[answer({"queue": 5_000, "prefill_own": 100}, [10])] * 20)
    assert bad(run).keys() == {"bad_ttft"}
    ids = [finding.id for finding in findings_of(run)]
    assert ids == ["late_first_tokens"]


@pytest.mark.parametrize(
    ("before", "gaps", "expected"),
    [
        ({"prefill_own": 1_900}, [10], set()),
        ({"prefill_own": 2_100}, [10], {"bad_ttft"}),
        ({"queue": 900, "prefill_own": 100}, [10], {"bad_ttft"}),
        ({"queue": 300, "prefill_own": 10}, [10], set()),
        ({"queue": 500, "prefill_own": 400}, [10], set()),
        ({"prefill_own": 10}, [190, 190, 190], set()),
        ({"prefill_own": 10}, [210, 210, 210], {"bad_tbt"}),
        ({"prefill_own": 10}, [10, 10, 120], {"bad_tbt"}),
        ({"prefill_own": 10}, [10, 10, 90], set()),
    ],
)
def test_latency_is_bad_beyond_fixed_limits_or_far_beyond_own_work(
    before: dict[str, int], gaps: list[int], expected: set[str]
) -> None:
    assert bad(run_of(*[answer(before, gaps)] * 20)).keys() == expected


def test_an_objective_takes_the_place_of_the_limits() -> None:
    run = run_of(*[SLOW] * 20)
    assert bad(run, {"ttft": False, "tbt": False}) == {}
    assert bad(run_of(*[FINE] * 20), {"ttft": True, "tbt": True, "e2e": True}).keys() == {
        "bad_ttft",
        "bad_tbt",
        "bad_e2e",
    }


def test_answers_in_one_piece_are_judged_by_what_first_and_later_tokens_may_take() -> None:
    late = answer({"queue": 4_000}, [10] * 4, whole=True)
    prompt = answer({"prefill_own": 1_000}, [150] * 4, whole=True)
    assert bad(run_of(*[prompt] * 20)) == {}
    assert bad(run_of(*[prompt] * 19, late)) == {}
    found = bad(run_of(*[prompt] * 10, *[late] * 10))
    assert found.keys() == {"bad_e2e"}
    assert found["bad_e2e"].causes == ("queue",)


def test_a_tail_of_another_cause_is_named_beside_the_largest_row() -> None:
    usual = answer({"prefill_own": 1_900}, [10])
    rare = answer({"preempted": 9_000, "prefill_own": 100}, [10])
    found = bad(run_of(*[usual] * 90, *[rare] * 10))["bad_ttft"]
    assert found.causes == ("prefill_own",)
    assert "`preempted`" in found.sentences[1]


@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=50), st.floats(0.01, 1))
def test_the_slowest_are_at_least_the_share_that_is_asked_for(
    took_ns: list[int], share: float
) -> None:
    tail = Tail()
    for each in took_ns:
        tail.add(each, {"queue": each})
    num, rows = tail.slowest(share)
    assert share * len(took_ns) <= num <= len(took_ns)
    assert rows["queue"] == sum(sorted(took_ns, reverse=True)[:num])
    assert tail.whole_ns["queue"] == sum(took_ns)
