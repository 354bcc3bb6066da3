"""Text of objectives: good requests, target share, and the allowed number of bad ones."""

from __future__ import annotations

from inferscope.slo.objectives import Metric, Objective, Objectives
from inferscope.slo.tally import ObjectiveCount

_GOOD: dict[Metric, str] = {
    "ttft": "first token within {limit}",
    "tbt": "no gap between tokens above {limit}",
    "tpot": "mean time per token after the first within {limit}",
    "e2e": "last token within {limit}",
    "availability": "not failed or shed by the server",
    "goodput": "not failed or shed by the server, and every threshold met",
}

_MOST_NAMED = 6


def objective_lines(objectives: Objectives) -> list[str]:
    """Return a line for each objective."""
    return [_line(one, objectives) for one in objectives.all]


def objectives_summary(objectives: Objectives) -> str:
    """Return all objectives in a line, the first few by name: `ttft 99% within 500 ms`."""
    parts = []
    for one in objectives.all[:_MOST_NAMED]:
        limit = "" if one.threshold_ns is None else f" within {_span(one.threshold_ns)}"
        model = "" if one.model is None else f" for {one.model}"
        parts.append(f"{one.name} {one.objective * 100:g}%{limit}{model}")
    more = len(objectives.all) - len(parts)
    return ", ".join(parts) + (f", and {more} more" if more else "")


def outcome_line(count: ObjectiveCount) -> str:
    """Return the result of an objective with the causes of its bad requests."""
    num = count.num_good + count.num_bad
    line = f"{count.objective.name}: "
    line += f"{count.num_good / num:.2%} of {num} good" if num else "no requests to judge"
    if count.num_bad:
        line += f", {count.num_bad} bad ("
        line += ", ".join(f"{cause} {times}" for cause, times in worst_causes(count)) + ")"
    return line + (
        f", {count.num_warm_up} warm-up requests not counted" if count.num_warm_up else ""
    )


def good_line(one: Objective) -> str:
    """Return what an objective counts as good."""
    limit = "" if one.threshold_ns is None else _span(one.threshold_ns)
    return _GOOD[one.metric].format(limit=limit)


def worst_causes(count: ObjectiveCount) -> list[tuple[str, int]]:
    """Return the causes of bad requests with their numbers, the most frequent first."""
    there = [(cause, num) for cause, num in count.causes.items() if num]
    return sorted(there, key=lambda item: (-item[1], item[0]))


def _line(one: Objective, objectives: Objectives) -> str:
    models = "all models" if one.model is None else one.model
    excepted = objectives.excepted(one)
    if excepted:
        models += f" but {', '.join(excepted)}"
    return (
        f"{one.name}, {models}: {good_line(one)}, "
        f"{one.objective * 100:g} % of requests over {_span(one.window_ns)}; "
        f"1 of {1 / one.budget:.4g} may be bad"
    )


def _span(span_ns: int) -> str:
    seconds = span_ns / 1e9
    for unit, size_s in (("d", 86400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0)):
        if seconds >= size_s and (seconds / size_s).is_integer():
            return f"{seconds / size_s:g} {unit}"
    return f"{seconds:g} s" if seconds >= 1 else f"{seconds * 1e3:g} ms"
