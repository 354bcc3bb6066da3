"""Example Alertmanager configuration: routes, receivers and inhibitions."""

from __future__ import annotations

from typing import Any

from inferscope.slo.rule_templates import DAY_S, FIVE_MINUTES_S, HOUR_S, TimeScale
from inferscope.slo.rules_burn import FAST
from inferscope.slo.rules_health import BLIND

PAGE_URL, TICKET_URL = "http://127.0.0.1:9095/page", "http://127.0.0.1:9095/ticket"
"""Placeholder addresses of the paging service and the ticket system."""


def routing(scale: float = 1.0) -> dict[str, Any]:
    """Return an Alertmanager configuration.

    Args:
        scale: divisor of its times, as for the rules.
    """
    time = TimeScale(scale)
    return {
        "route": {
            "receiver": "tickets",
            "group_by": ["alertname", "model", "slo"],
            "group_wait": time.span(FIVE_MINUTES_S),
            "group_interval": time.span(FIVE_MINUTES_S),
            "repeat_interval": time.span(3 * DAY_S),
            "routes": [
                {
                    "receiver": "pages",
                    "matchers": ['severity="page"'],
                    # By model: its objectives mostly break together, which is one page.
                    "group_by": ["model"],
                    "group_wait": time.span(30.0),
                    "group_interval": time.span(FIVE_MINUTES_S),
                    "repeat_interval": time.span(4 * HOUR_S),
                }
            ],
        },
        "inhibit_rules": [
            {
                # Unobserved requests do not count against a budget.
                "source_matchers": [f'alertname="{BLIND}"'],
                "target_matchers": ['slo!=""'],
                "equal": ["model"],
            },
            {
                "source_matchers": [f'alertname="{FAST}"'],
                "target_matchers": ['severity="ticket"', 'slo!=""'],
                "equal": ["model", "slo"],
            },
        ],
        "receivers": [
            {"name": "pages", "webhook_configs": [{"url": PAGE_URL, "send_resolved": True}]},
            {"name": "tickets", "webhook_configs": [{"url": TICKET_URL, "send_resolved": True}]},
        ],
    }
