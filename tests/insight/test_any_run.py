"""Whatever a run looks like, it is judged: no rule fails, and no number is out of range."""

from __future__ import annotations

import math
from array import array

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from inferscope.fold.final_records import FinalRequest
from inferscope.insight.findings import EngineFindings, RunSummarizer, findings
from inferscope.insight.findings.rules import FEWEST_REQUESTS
from inferscope.records import CAUSES, FINISHES, RingOpened, StepPlan
from inferscope.text.findings import findings_json, findings_text

amounts = st.dictionaries(st.sampled_from(CAUSES), st.integers(1, 10**10), max_size=6)


@st.composite
def finals(draw: st.DrawFn) -> FinalRequest:
    before, after = draw(amounts), draw(amounts)
    tail_ns, num_tokens = draw(st.integers(0, 10**9)), draw(st.integers(0, 6))
    if not num_tokens:
        after = {}
    first_ns = sum(before.values())
    last_ns = first_ns + sum(after.values())
    between = sorted(draw(st.lists(st.integers(first_ns, last_ns), max_size=4)))
    times = [first_ns, *between, last_ns][:num_tokens] if num_tokens > 1 else [first_ns]
    whole = {cause: before.get(cause, 0) + after.get(cause, 0) for cause in {*before, *after}}
    whole["delivery"] = whole.get("delivery", 0) + tail_ns
    return FinalRequest(
        engine_id="e",
        request_id=str(draw(st.integers(0, 99))),
        external_id=None,
        trace="",
        attributes=draw(st.sampled_from([{}, {"stream": "false"}])),
        prompt_tokens=draw(st.none() | st.integers(0, 9_999)),
        cached_tokens=draw(st.integers(0, 99)),
        output_tokens=num_tokens,
        arrived_ns=0,
        queued_ns=None,
        admitted_ns=None,
        first_token_ns=first_ns if num_tokens else None,
        last_token_ns=last_ns if num_tokens else None,
        delivered_ns=last_ns + tail_ns,
        arrived_at="http",
        delivered_at="http",
        finish=draw(st.sampled_from(FINISHES)),
        joined_late=draw(st.booleans()),
        num_preemptions=draw(st.integers(0, 2)),
        ledger_ns={cause: ns for cause, ns in whole.items() if ns},
        ttft_ledger_ns=before if num_tokens else {},
        token_times_ns=array("q", times if num_tokens else []),
        tokens_per_event=(1,) * (len(times) if num_tokens else 0),
        prefill_ns=0,
        decode_ns=0,
        prefill_flops=None,
        decode_flops=None,
        is_alone=False,
        fit_id="",
        clock="host",
        reasoning_tokens=draw(st.none() | st.integers(0, num_tokens)),
    )


plans = st.builds(
    StepPlan,
    st.just(0), st.just(0), st.just(0), st.just(0), st.integers(0, 3), st.integers(0, 9),
    st.integers(0, 9), st.integers(0, 9), st.sampled_from([0, 9]),
    binding=st.sampled_from(["none", "slots", "blocks", "budget", "moon"]),
)  # fmt: skip


def judged(
    requests: list[FinalRequest], given_plans: list[StepPlan], copies: int
) -> EngineFindings:
    watch = RunSummarizer()
    watch.on_record(0, RingOpened(0, 1, "e", "core", 0, 1, "host", "boot", 0, 0))
    for plan in given_plans:
        watch.on_record(1, plan)
    for _ in range(copies):
        for request in requests:
            watch.on_request(request)
    (found,) = findings(watch)
    return found


@given(st.lists(finals(), min_size=1, max_size=4), st.lists(plans, max_size=4))
def test_any_run_is_judged(requests: list[FinalRequest], given_plans: list[StepPlan]) -> None:
    found = judged(requests, given_plans, FEWEST_REQUESTS)
    num = sum(not request.joined_late for request in requests)
    assert found.num_requests == FEWEST_REQUESTS * num
    assert (found.findings is None) == (num == 0)
    shares = [finding.lost_share for finding in found.findings or ()]
    assert shares == sorted(shares, reverse=True)
    assert all(0 <= share <= 1 for share in shares)
    for finding in found.findings or ():
        values = [number.value for number in finding.evidence]
        assert all(isinstance(value, str) or math.isfinite(value) for value in values)
        if finding.counterfactual is not None:
            without_ns, actual_ns = (
                finding.counterfactual.without_ns,
                finding.counterfactual.actual_ns,
            )
            assert 0 <= without_ns <= actual_ns * 1.011
    assert max(map(len, findings_text((found,), width=80).splitlines())) <= 80
    assert msgspec.json.decode(findings_json((found,)))
