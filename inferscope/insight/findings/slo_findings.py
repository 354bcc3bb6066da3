"""Findings on objectives: which were missed, the burn rate, and the causes.

Verdicts are those of `inferscope collect --slo FILE`. The burn rate is over the whole run: bad
requests over the number allowed for as many.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from inferscope.attribution import Breach, LatencyLimit, breaches
from inferscope.fold import FinalRequest, FinalStep
from inferscope.insight.findings.finding import Finding, Number, ObjectiveMiss
from inferscope.insight.findings.run_summary import RunSummarizer
from inferscope.insight.findings.slow_steps import reason
from inferscope.records import cause_named
from inferscope.slo import (
    FAILURES,
    UNKNOWN,
    Judge,
    Objective,
    ObjectiveCount,
    ObjectiveCounter,
    Objectives,
    explained_metric,
    good_line,
    worst_causes,
)

_LARGE = "The requests are too large for the objective on this device: change either."
_ADVICE = {
    "prefill_own": _LARGE,
    "decode_own": _LARGE,
    "shed": "Load exceeds capacity: add replicas, or raise the engine's queue limit.",
}
"""Advice that differs under an objective, and for causes that are not ledger rows."""


class _Misses:
    """Statistics of an objective's finished bad requests."""

    def __init__(self) -> None:
        self.over_ns = 0
        self.num_sufficient: Counter[str] = Counter()
        """Requests that would have met the objective without this cause, by cause."""
        self.worst = ""
        self._worst_ns = -1

    def add(self, request: FinalRequest, over_ns: int, missed: Breach | None) -> None:
        """Add a bad request that exceeded its limit by `over_ns` over all its gaps."""
        self.over_ns += over_ns
        if over_ns > self._worst_ns:
            self._worst_ns, self.worst = over_ns, request.external_id or request.request_id
        for one in () if missed is None else missed.causes:
            self.num_sufficient[one.cause] += one.is_sufficient is True


class SloOutcome(msgspec.Struct, frozen=True):
    """Results of one engine's requests under the objectives of its model."""

    counts: tuple[ObjectiveCount, ...]
    missed: tuple[Finding, ...]
    """Findings on missed objectives, the fastest burn first."""
    judged: dict[str, bool] = {}
    """Whether an objective was missed, by metric; TPOT counts as TBT."""


class SloFindings:
    """Sink that judges a run by objectives and passes it on to a summarizer.

    judging = Judging(promised.judge_of, promised)   a sink of the fold that also takes records
    """

    def __init__(self, objectives: Objectives, summarizer: RunSummarizer) -> None:
        """Keep the objectives of all models and the summarizer."""
        self._objectives = objectives
        self._summarizer = summarizer
        self._judges: dict[str, tuple[Judge, ObjectiveCounter]] = {}
        self._misses: dict[tuple[str, str], _Misses] = {}
        self._lives_ns: Counter[str] = Counter()

    def judge_of(self, engine_id: str) -> Judge:
        """Return the judge of an engine that was first observed."""
        counting = ObjectiveCounter(_spend_nothing)
        judge = Judge(self._objectives, counting)
        self._judges[engine_id] = judge, counting
        return judge

    def on_step(self, step: FinalStep) -> None:
        """Add a step."""
        self._summarizer.on_step(step)

    def on_request(self, request: FinalRequest) -> None:
        """Add a request with its results."""
        self._summarizer.on_request(request)
        self._lives_ns[request.engine_id] += request.delivered_ns - request.arrived_ns
        results = {} if request.judged is None else request.judged.results
        if all(results.values()):
            return
        bad = [one for one in self._in_force(request.engine_id) if not results.get(one.name, True)]
        beyond = {one.name: _beyond(one, request) for one in bad}
        longest_ns = max((each.over_ns for each in beyond.values() if each is not None), default=0)
        if request.finish in FAILURES:
            longest_ns = request.delivered_ns - request.arrived_ns
        for one in bad:
            misses = self._misses.setdefault((request.engine_id, one.name), _Misses())
            why = beyond[one.name]
            misses.add(request, longest_ns if why is None else why.over_ns, why)

    def outcome(self, engine_id: str) -> SloOutcome:
        """Return the results of an engine's requests; empty without a judge."""
        if engine_id not in self._judges:
            return SloOutcome((), ())
        counts = self._judges[engine_id][1].of(self._in_force(engine_id))
        missed: list[Finding] = []
        judged: dict[str, bool] = {}
        for count in counts:
            is_missed = count.num_bad > count.objective.budget * (count.num_good + count.num_bad)
            metric = "tbt" if count.objective.metric == "tpot" else count.objective.metric
            judged[metric] = judged.get(metric, False) or is_missed
            if is_missed:
                missed.append(self._finding(engine_id, count))
        return SloOutcome(counts, tuple(sorted(missed, key=_burn, reverse=True)), judged)

    def _finding(self, engine_id: str, count: ObjectiveCount) -> Finding:
        one, num = count.objective, count.num_good + count.num_bad
        misses = self._misses.get((engine_id, one.name), _Misses())
        allowed = one.budget * num
        burn = count.num_bad / allowed
        sentences = [
            f"{good_line(one).capitalize()}: {count.num_good / num:.2%} of {num} requests were "
            f"good, the target is {one.objective * 100:g}%. {count.num_bad} were bad where "
            f"{allowed:.3g} are allowed."
        ]
        evidence = [
            Number("good_requests", count.num_good, "measured"),
            Number("bad_requests", count.num_bad, "measured"),
            Number("bad_requests_allowed", allowed, "measured"),
        ]
        causes = worst_causes(count)
        top = next((cause for cause, _ in causes if cause != UNKNOWN), None)
        if causes:
            of_each = ", ".join(f"`{cause}` {num_bad}" for cause, num_bad in causes)
            sentences.append(f"Main causes, by number of bad requests: {of_each}.")
        if top is not None:
            evidence.append(Number("top_cause", top, "modelled"))
            evidence.append(Number("top_cause_requests", count.causes[top], "modelled"))
            spared = misses.num_sufficient[top]
            if spared:
                sentences.append(f"Without `{top}`, {spared} would have met the objective.")
                evidence.append(Number("would_have_passed_without_top_cause", spared, "modelled"))
        advice = "" if top is None else _ADVICE.get(top, cause_named(top).advice)
        run = self._summarizer.runs.get(engine_id)
        why = reason(run.slowness) if top == "slowdown" and run is not None else None
        if why is not None:
            sentences += why.sentences
            evidence += why.evidence
            advice = why.advice
        if misses.worst:
            evidence.append(Number("worst_request", misses.worst, "measured"))
            advice += f" `inferscope why {misses.worst} --slo FILE` explains the worst of them."
        lives_ns = self._lives_ns[engine_id]
        return Finding(
            id="objective_missed",
            title=f"The objective {one.name} is missed",
            lost_share=min(1.0, misses.over_ns / lives_ns) if lives_ns else 0.0,
            sentences=tuple(sentences),
            evidence=tuple(evidence),
            advice=advice.strip() or "Check the requests in flight: `inferscope attach`.",
            objective=ObjectiveMiss(one.name, one.objective, count.num_good, count.num_bad, burn),
            causes=() if top is None else (top,),
        )

    def _in_force(self, engine_id: str) -> tuple[Objective, ...]:
        return self._objectives.of_model(self._judges[engine_id][0].model)


def _beyond(one: Objective, request: FinalRequest) -> Breach | None:
    """Return the miss of a threshold by a request; None without one."""
    if one.threshold_ns is None:
        return None
    limit = LatencyLimit(explained_metric(one, request), one.threshold_ns)
    return next(iter(breaches(request, (limit,))), None)


def _burn(finding: Finding) -> float:
    return 0.0 if finding.objective is None else finding.objective.burn


def _spend_nothing(objective: Objective, is_good: bool) -> None:
    """Do nothing: a run does not belong to a budget's window."""
