"""Objectives: verdicts per request, breaches with their causes, and the remaining error budget.

Names are imported on first use: a fold needs verdicts, and no writer of rules.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from inferscope.lazy import lazy_names

if TYPE_CHECKING:
    from inferscope.slo.budget import Budget
    from inferscope.slo.judge import ENGINE_LOST, InFlight, Judge, PendingVerdict, explained_metric
    from inferscope.slo.objective_line import file_of, line_of, objectives_of_line
    from inferscope.slo.objective_text import (
        good_line,
        objective_lines,
        objectives_summary,
        outcome_line,
        worst_causes,
    )
    from inferscope.slo.objectives import Metric, Objective, Objectives, read_objectives
    from inferscope.slo.rules import RuleOptions, burn_lines, check_rules, rule_file
    from inferscope.slo.rules_notes import routing_text, rules_object_text, rules_text
    from inferscope.slo.rules_routing import routing
    from inferscope.slo.tally import UNKNOWN, ObjectiveCount, ObjectiveCounter
    from inferscope.slo.verdicts import FAILURES, Judged, latency_limits

__all__ = [
    "ENGINE_LOST",
    "FAILURES",
    "UNKNOWN",
    "Budget",
    "InFlight",
    "Judge",
    "Judged",
    "Metric",
    "Objective",
    "ObjectiveCount",
    "ObjectiveCounter",
    "Objectives",
    "PendingVerdict",
    "RuleOptions",
    "burn_lines",
    "check_rules",
    "explained_metric",
    "file_of",
    "good_line",
    "latency_limits",
    "line_of",
    "objective_lines",
    "objectives_of_line",
    "objectives_summary",
    "outcome_line",
    "read_objectives",
    "routing",
    "routing_text",
    "rule_file",
    "rules_object_text",
    "rules_text",
    "worst_causes",
]

__getattr__ = lazy_names(
    __name__,
    {
        "budget": ["Budget"],
        "judge": ["ENGINE_LOST", "InFlight", "Judge", "PendingVerdict", "explained_metric"],
        "objective_line": ["file_of", "line_of", "objectives_of_line"],
        "objective_text": [
            "good_line",
            "objective_lines",
            "objectives_summary",
            "outcome_line",
            "worst_causes",
        ],
        "objectives": ["Metric", "Objective", "Objectives", "read_objectives"],
        "rules": ["RuleOptions", "burn_lines", "check_rules", "rule_file"],
        "rules_notes": ["routing_text", "rules_object_text", "rules_text"],
        "rules_routing": ["routing"],
        "tally": ["ObjectiveCount", "ObjectiveCounter", "UNKNOWN"],
        "verdicts": ["FAILURES", "Judged", "latency_limits"],
    },
)
