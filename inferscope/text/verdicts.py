"""Objectives that a request met or missed, with the causes of each miss, in sentences."""

from __future__ import annotations

from inferscope.attribution import OWN_WORK, Breach, Metric
from inferscope.insight import Facts
from inferscope.records import cause_named
from inferscope.text.evidence import blamed
from inferscope.text.plots import duration

_NAMES: dict[Metric, str] = {
    "ttft": "TTFT",
    "tbt": "TBT",
    "tpot": "TPOT",
    "e2e": "E2E",
    "delivered": "delivery",
}
_MOST_COMPARED = 3
_SMALL = 0.05
"""Minimum difference to the peers that is reported, as a share of the excess."""


def verdicts(facts: Facts) -> tuple[str, ...]:
    """Return sentences on each objective: met or not, and the causes."""
    missed = {breach.metric: breach for breach in facts.breaches}
    sentences = []
    for objective in facts.objectives:
        breach = missed.get(objective.metric)
        if breach is not None:
            sentences.append(" ".join(_missed(breach, facts)))
        elif objective.metric in facts.met:
            sentences.append(f"It met {_limit(objective.metric, objective.limit_ns)}.")
        else:
            sentences.append(
                f"{_limit(objective.metric, objective.limit_ns)}: {_not_judged(facts)}"
            )
    return tuple(sentences)


def _not_judged(facts: Facts) -> str:
    if not facts.is_over:
        return "judged when it finishes."
    return "not judged: not available (too few tokens, sent in one piece, or not observed)."


def _limit(metric: Metric, limit_ns: int) -> str:
    return f"{_NAMES[metric]} {duration(limit_ns)}"


def _missed(breach: Breach, facts: Facts) -> list[str]:
    limit = _limit(breach.metric, breach.limit_ns)
    if breach.metric == "tbt":
        sentences = [
            f"It missed {limit}: its longest gap took {duration(breach.actual_ns)}, and its gaps "
            f"were {duration(breach.over_ns)} over in all."
        ]
    else:
        over = duration(breach.over_ns / breach.num_gaps)
        each = f" a token ({duration(breach.over_ns)} in all)" if breach.num_gaps > 1 else ""
        sentences = [f"It missed {limit} by {over}{each}."]
    sentences += _but_for(breach)
    sentences.append(_compared(breach))
    if breach.top is not None:
        meaning = cause_named(breach.top).label
        contributors = blamed(breach.top, facts)
        lies = f"; over the whole request, due to {contributors}" if contributors else ""
        sentences.append(f"Main cause: {breach.top} ({meaning}){lies}.")
    return [sentence for sentence in sentences if sentence]


def _but_for(breach: Breach) -> list[str]:
    took = {one.cause: one.ns for one in breach.causes}
    if breach.is_for_own_work:
        own_ns = sum(ns for cause, ns in took.items() if cause in OWN_WORK) / breach.num_gaps
        each = " a token" if breach.num_gaps > 1 else ""
        return [
            "It would have missed it without other requests too: its own work takes "
            f"{duration(own_ns)}{each}."
        ]
    if not breach.minimal_set:
        could = [one.cause for one in breach.causes if one.is_sufficient is not False]
        if not could:
            return []
        return [f"Only {_listed(could)} took long enough to be the cause alone."]
    amounts = [f"{cause} ({duration(took[cause])})" for cause in breach.minimal_set]
    return [f"Without {_listed(amounts)} it would have met the objective."]


def _compared(breach: Breach) -> str:
    if not breach.num_peers:
        return "Too few compliant requests of similar length to tell what was unusual."
    floor_ns = _SMALL * breach.over_ns
    longer = [
        f"{one.cause} +{duration(one.excess_ns)}"
        for one in breach.causes
        if one.excess_ns is not None and one.excess_ns > floor_ns
    ]
    against = f"Against the median of {breach.num_peers} compliant requests of similar length"
    return f"{against}: {', '.join(longer[:_MOST_COMPARED]) or 'no cause took longer'}."


def _listed(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
