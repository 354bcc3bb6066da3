"""Findings on time without requested output: host gaps, cold starts, reasoning, drafts."""

from __future__ import annotations

from inferscope.insight.findings.finding import Counterfactual, Finding, Number
from inferscope.insight.findings.formatting import duration, percent, times
from inferscope.insight.findings.run_summary import RunSummary

_HOST_BOUND = 0.2
"""Minimum share of the time between tokens. An engine that schedules ahead stays below 5 %."""
_COLD = 0.02
"""Minimum share of all responses' time; a warm server has none."""
_COLD_TAIL = 1.5
_COLD_REQUESTS = 0.01
_REASONING = 0.5
"""Minimum share of output tokens."""
_COSTS_MORE = 1.05
"""Minimum ratio of a token's time with speculation to without; covers a model error of 5 %."""


def host_bound_decode(run: RunSummary) -> Finding | None:
    """Find whether the device waits for the host between decode steps."""
    requests = run.requests
    whole_ns, gap_ns = requests.after_ns.total(), requests.after_ns["cpu_gap"]
    num_tokens = requests.num_tokens_after
    if not num_tokens or not whole_ns or gap_ns < _HOST_BOUND * whole_ns:
        return None
    actual_ns, without_ns = whole_ns / num_tokens, (whole_ns - gap_ns) / num_tokens
    return Finding(
        id="host_bound_decode",
        title="Decoding is bound by the host, not by the device",
        lost_share=requests.share_of_life("cpu_gap"),
        causes=("cpu_gap",),
        sentences=(
            f"{percent(gap_ns / whole_ns)} of the time between tokens the device waits for the "
            f"scheduler and the host, {duration(gap_ns / num_tokens)} for each token.",
        ),
        evidence=(
            Number("cpu_gap_share_between_tokens", gap_ns / whole_ns, "measured"),
            Number("cpu_gap_per_token_ns", round(gap_ns / num_tokens), "measured"),
            Number("tpot_mean_ns", round(actual_ns), "measured"),
        ),
        advice=(
            "Overlap scheduling with execution, use CUDA graphs, give the engine's process its "
            "own core, and move tokenising and logging out of it. A faster device would not help."
        ),
        counterfactual=Counterfactual(
            f"Without the host's gaps, the mean TPOT would be {duration(without_ns)} instead of "
            f"{duration(actual_ns)}.",
            "tpot_mean",
            round(actual_ns),
            round(without_ns),
            "measured",
        ),
    )


def cold_starts(run: RunSummary) -> Finding | None:
    """Find whether requests wait for first uses of shapes, captures and compilation."""
    requests = run.requests
    lost = requests.share_of_life("cold_start")
    actual_ns, warm_ns = requests.ttft.quantile_ns(0.99), requests.ttft_warm.quantile_ns(0.99)
    if actual_ns is None or warm_ns is None:
        return None
    has_tail = (
        requests.num_cold >= _COLD_REQUESTS * requests.num and actual_ns >= _COLD_TAIL * warm_ns
    )
    if lost < _COLD and not has_tail:
        return None
    return Finding(
        id="cold_starts",
        title="Requests wait for cold starts",
        lost_share=lost,
        causes=("cold_start",),
        sentences=(
            f"{run.steps.num_cold} of {run.steps.num} steps were the first of their shape; what "
            f"they took beyond warm steps is {percent(lost)} of the time, and "
            f"{requests.num_cold} of {requests.num} requests waited for it before their first "
            "token.",
        ),
        evidence=(
            Number("cold_steps", run.steps.num_cold, "measured"),
            Number("cold_start_share", lost, "modelled"),
            Number("requests_with_cold_ttft", requests.num_cold, "measured"),
            Number("ttft_p99_ns", round(actual_ns), "measured"),
        ),
        advice=(
            "Warm the server up before it receives traffic: one request of each batch size and "
            "prompt length that occurs; capture graphs and compile at start."
        ),
        counterfactual=Counterfactual(
            f"On a warm server, TTFT p99 would be {duration(warm_ns)} instead of "
            f"{duration(actual_ns)}.",
            "ttft_p99",
            round(actual_ns),
            round(warm_ns),
        ),
    )


def mostly_reasoning(run: RunSummary) -> Finding | None:
    """Find whether most output tokens are reasoning; None if the engine does not report them."""
    requests = run.requests
    reasoned, whole = requests.reasoning_tokens, requests.output_tokens_of_reasoners
    if not whole or reasoned < _REASONING * whole or not requests.num_tokens_after:
        return None
    share = reasoned / whole
    tpot_ns = requests.after_ns.total() / requests.num_tokens_after
    per_request = reasoned / requests.num_reasoners
    actual_ns = requests.e2e.mean_ns or 0.0
    without_ns = max(0.0, actual_ns - per_request * tpot_ns)
    ttfot_ns = requests.ttfot.mean_ns
    return Finding(
        id="mostly_reasoning",
        title="Most output tokens are reasoning",
        lost_share=min(1.0, (actual_ns - without_ns) / actual_ns) if actual_ns else 0.0,
        sentences=(
            f"{percent(share)} of the output tokens are reasoning, {per_request:.0f} for each of "
            f"{requests.num_reasoners} requests; a client waits {duration(per_request * tpot_ns)} "
            "for them after the first token before the answer begins.",
        ),
        evidence=(
            Number("reasoning_tokens", reasoned, "measured"),
            Number("output_tokens", whole, "measured"),
            Number("tpot_mean_ns", round(tpot_ns), "measured"),
            *([] if ttfot_ns is None else [Number("ttfot_mean_ns", round(ttfot_ns), "measured")]),
        ),
        advice=(
            "Lower the reasoning effort or cap its tokens where answers do not need it. TTFT is "
            "not meaningful here: watch the time to the first token of the answer (TTFOT)."
        ),
        counterfactual=Counterfactual(
            f"Without reasoning, the mean E2E would be {duration(without_ns)} instead of "
            f"{duration(actual_ns)}.",
            "e2e_mean",
            round(actual_ns),
            round(without_ns),
            "measured",
        ),
    )


def costly_speculation(run: RunSummary) -> Finding | None:
    """Find whether verifying drafts takes longer than decoding the accepted tokens."""
    requests, drafts = run.requests, run.steps.speculation
    ratio = drafts.cost_ratio
    if ratio is None or ratio < _COSTS_MORE or not requests.num_tokens_after:
        return None
    lost = 1 - 1 / ratio
    decoding = ("decode_own", "decode_co_batched", "draft")
    decoding_ns = sum(requests.after_ns[cause] for cause in decoding)
    actual_ns = requests.after_ns.total() / requests.num_tokens_after
    without_ns = actual_ns - lost * decoding_ns / requests.num_tokens_after
    accepted = drafts.accepted / drafts.num_slices
    return Finding(
        id="costly_speculation",
        title="Speculation costs more than it saves",
        lost_share=lost * requests.share_of_life(*decoding),
        sentences=(
            f"{drafts.accepted:,} of {drafts.proposed:,} draft tokens were accepted, "
            f"{accepted:.2f} for each request and step; steps that verify them take "
            f"{times(drafts.spent_ns / drafts.plain_ns)} as long as plain ones, so a token takes "
            f"{times(ratio)} as long as without.",
        ),
        evidence=(
            Number("proposed_tokens", drafts.proposed, "measured"),
            Number("accepted_tokens", drafts.accepted, "measured"),
            Number("steps_that_speculate", drafts.num_steps, "measured"),
            Number("speculating_over_plain_step", drafts.spent_ns / drafts.plain_ns, "modelled"),
            Number("token_time_with_over_without", ratio, "modelled"),
        ),
        advice=(
            "Propose fewer tokens, use a draft model that is closer to this one, or switch "
            "speculation off at large batches, where verifying is no longer free."
        ),
        counterfactual=Counterfactual(
            f"Without speculation, the mean TPOT would be {duration(without_ns)} instead of "
            f"{duration(actual_ns)}.",
            "tpot_mean",
            round(actual_ns),
            round(without_ns),
        ),
    )
