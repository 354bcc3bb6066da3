"""Fallback finding: latency is bad, and no other finding names the largest ledger row.

Without objectives, latency is bad beyond the limits of MLPerf Inference's server scenario for Llama
2 70B (first token within 2 s, 200 ms a token), or far beyond the requests' own work. With
objectives, a metric with an objective is bad if that is missed.

https://github.com/mlcommons/inference_policies/blob/master/inference_rules.adoc
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from inferscope.attribution import OWN_WORK
from inferscope.insight.findings.finding import Counterfactual, Finding, Number
from inferscope.insight.findings.formatting import duration, percent
from inferscope.insight.findings.requests import E2E_TAIL, TPOT_LIMIT_NS, TTFT_LIMIT_NS
from inferscope.insight.findings.run_summary import RunSummary
from inferscope.insight.findings.slow_steps import reason
from inferscope.insight.findings.tail import Tail
from inferscope.records import cause_named

_MIN_TTFT_NS, _MIN_TBT_NS = 500_000_000, 100_000_000
"""Latencies in ns below which waiting does not count as bad, whatever its share."""
_MOSTLY_WAITING = 0.8
_TIMES_USUAL = 5.0
"""Minimum ratio of TBT p99 to p50."""
_TTFT_TAIL, _TBT_TAIL = 0.05, 0.01


class _MissedMetric(NamedTuple):
    """A metric that is bad, with the ledgers that explain it."""

    metric: str
    name: str
    quantile: str
    took_ns: float
    limit: str
    tail_share: float
    tail: Tail
    mean: str
    num_gaps: int


def bad_latency(
    run: RunSummary, found: Collection[Finding], judged: Mapping[str, bool]
) -> Iterator[Finding]:
    """Yield a finding for each bad metric whose largest ledger row no other finding names.

    Args:
        run: summary of one engine's run.
        found: the other findings.
        judged: by metric (ttft, tbt, e2e): whether an objective on it was missed.
    """
    named = {cause for finding in found for cause in finding.causes}
    for bad in (_ttft(run, judged), _tbt(run, judged), _e2e(run, judged)):
        if bad is None or not bad.tail.whole_ns:
            continue
        (cause, _), *_ = bad.tail.whole_ns.most_common(1)
        if cause not in named:
            yield _finding(run, bad, cause)


def _ttft(run: RunSummary, judged: Mapping[str, bool]) -> _MissedMetric | None:
    requests = run.requests
    p95_ns = requests.ttft.quantile_ns(0.95)
    if p95_ns is None:
        return None
    missed = judged.get("ttft")
    if missed is None:
        limit = f"bad from {duration(TTFT_LIMIT_NS)} on"
        missed = p95_ns >= TTFT_LIMIT_NS
        if not missed and p95_ns >= _MIN_TTFT_NS:
            num, rows = requests.slow_first.slowest(_TTFT_TAIL)
            own = sum(rows[cause] for cause in OWN_WORK)
            missed = bool(num) and own <= (1 - _MOSTLY_WAITING) * rows.total()
            limit = "of which at most a fifth is its own work"
    else:
        limit = "its objective is missed"
    tail = requests.slow_first
    return (
        _MissedMetric("ttft", "TTFT", "p95", p95_ns, limit, _TTFT_TAIL, tail, "TTFT", 0)
        if missed
        else None
    )


def _tbt(run: RunSummary, judged: Mapping[str, bool]) -> _MissedMetric | None:
    requests = run.requests
    p99_ns, p50_ns = requests.tbt.quantile_ns(0.99), requests.tbt.quantile_ns(0.50)
    if p99_ns is None or p50_ns is None:
        return None
    missed = judged.get("tbt")
    if missed is None:
        limit = f"bad from {duration(TPOT_LIMIT_NS)} on"
        missed = p99_ns >= TPOT_LIMIT_NS
        if not missed and p99_ns >= max(_MIN_TBT_NS, _TIMES_USUAL * p50_ns):
            missed, limit = True, f"with {duration(p50_ns)} at p50"
    else:
        limit = "its objective is missed"
    tail, num = requests.slow_later, requests.num_tokens_after
    return (
        _MissedMetric("tbt", "TBT", "p99", p99_ns, limit, _TBT_TAIL, tail, "TPOT", num)
        if missed
        else None
    )


def _e2e(run: RunSummary, judged: Mapping[str, bool]) -> _MissedMetric | None:
    """Return E2E if bad: of non-streamed responses, or of any with an objective on it."""
    requests = run.requests
    missed = judged.get("e2e")
    tail = requests.slow_whole
    if missed:
        p95_ns = requests.e2e.quantile_ns(0.95) or 0.0
        limit = "its objective is missed"
        return _MissedMetric(
            "e2e", "E2E", "p95", p95_ns, limit, E2E_TAIL, requests.slow_life, "E2E", 0
        )
    if missed is not None or not tail.num or requests.num_slow_whole <= E2E_TAIL * tail.num:
        return None
    p95_ns = requests.whole.quantile_ns(0.95) or 0.0
    limit = f"bad beyond {duration(TTFT_LIMIT_NS)} and {duration(TPOT_LIMIT_NS)} for each token"
    return _MissedMetric("e2e", "E2E", "p95", p95_ns, limit, E2E_TAIL, tail, "E2E", 0)


def _finding(run: RunSummary, bad: _MissedMetric, cause: str) -> Finding:
    tail, row = bad.tail, cause_named(cause)
    whole_ns, row_ns = tail.whole_ns.total(), tail.whole_ns[cause]
    num, rows = tail.slowest(bad.tail_share)
    slow_ns = rows[cause] / num
    share, of_slow = row_ns / whole_ns, rows[cause] / rows.total() if rows else 0.0
    sentences = [
        f"{bad.name} is {duration(bad.took_ns)} at {bad.quantile}, {bad.limit}. The largest row of "
        f"its ledger is `{cause}` ({row.meaning}): {percent(share)} of all of it, and of the "
        f"slowest {num} of {tail.num} requests {duration(slow_ns)} each ({percent(of_slow)}).",
    ]
    evidence = [
        Number(f"{bad.metric}_{bad.quantile}_ns", round(bad.took_ns), "measured"),
        Number("largest_row", cause, "modelled"),
        Number("largest_row_share", share, "modelled"),
        Number("largest_row_in_tail_ns", round(slow_ns), "modelled"),
        Number("largest_row_share_of_tail", of_slow, "modelled"),
    ]
    (worst, worst_ns), *_ = rows.most_common(1) or [(cause, 0)]
    if worst != cause:
        sentences.append(
            f"In the slowest requests `{worst}` ({cause_named(worst).meaning}) is larger: "
            f"{percent(worst_ns / rows.total())}."
        )
        evidence.append(Number("largest_row_of_tail", worst, "modelled"))
    advice = row.advice
    why = reason(run.slowness) if cause == "slowdown" else None
    if why is not None:
        sentences += why.sentences
        evidence += why.evidence
        advice = why.advice
    num_parts = bad.num_gaps or tail.num
    actual_ns, without_ns = whole_ns / num_parts, (whole_ns - row_ns) / num_parts
    life_ns = max(1, run.requests.life_ns.total(), whole_ns)
    return Finding(
        id=f"bad_{bad.metric}",
        title=f"{bad.name} is bad, and most of it is `{cause}`"
        if share >= 0.5
        else f"{bad.name} is bad, and `{cause}` is the largest part of it",
        lost_share=row_ns / life_ns,
        sentences=tuple(sentences),
        evidence=tuple(evidence),
        advice=f"{advice} `inferscope why REQUEST` divides the time of a single request.",
        counterfactual=Counterfactual(
            f"Without `{cause}`, the mean {bad.mean} would be {duration(without_ns)} instead of "
            f"{duration(actual_ns)}.",
            f"{bad.mean.lower()}_mean",
            round(actual_ns),
            round(without_ns),
        ),
        causes=(cause,),
    )
