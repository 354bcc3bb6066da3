"""Alerts on the health of engines and on the coverage of our observation.

The rules are in health_rules.yaml, whose head lists the placeholders.
"""

from __future__ import annotations

import re
from importlib.resources import files
from typing import Any

import yaml

from inferscope.slo.rule_templates import FIVE_MINUTES_S, Annotations, TimeScale

BLIND = "InferScopeBlind"
_STALL_S, _FIRST_STEP_S = 50.0, FIVE_MINUTES_S
"""Seconds without a step that are a stall.

The first holds for an engine with steps in the last hour, the second for one without: it may be
compiling its first.
"""
_SCRAPES = 4
"""Scrapes in a stall's window: one may be missed."""
_PLACEHOLDER = re.compile(r"<(\w+)>")


def health_groups(annotations: Annotations, *, floor: int) -> list[dict[str, Any]]:
    """Return the groups of the rules on engines and on our observation of them.

    Args:
        annotations: links, time scale and scrape interval.
        floor: minimum number of ended requests for a share of their time.
    """
    unscaled, least_s = TimeScale(1), _SCRAPES * annotations.scrape_s
    values = {
        "stall": unscaled.span(max(_STALL_S, least_s)),
        "first_step": unscaled.span(max(_FIRST_STEP_S, least_s)),
        "floor": str(floor),
        "runbooks": annotations.runbooks,
        "dashboards": annotations.dashboards or "",
    }

    def value(match: re.Match[str]) -> str:
        name = match[1]
        return values[name] if name in values else annotations.time.rescaled(name)

    def filled(node: Any) -> Any:
        if isinstance(node, dict):
            return {
                key: filled(part)
                for key, part in node.items()
                if annotations.dashboards is not None or key != "dashboard_url"
            }
        if isinstance(node, list):
            return list(map(filled, node))
        return _PLACEHOLDER.sub(value, node)

    text = files("inferscope.slo").joinpath("health_rules.yaml").read_text(encoding="utf-8")
    groups: list[dict[str, Any]] = filled(yaml.safe_load(text))
    return groups
