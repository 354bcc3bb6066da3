"""Prometheus rules of objectives: recording rules, and alerts on burn rates.

    raw counters ──► rate5m by engine ──► by model ──► numbers and shares over 5m … 3d ──► alerts

Windows beyond five minutes are sums over the recorded rates: Prometheus would reject a query over
three days of a fleet's raw counters. Alerts carry only the labels model, slo and severity: a label
that changes makes another alert, and a page whose cause changed would start anew. Changing values
are in annotations.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from inferscope.errors import BadInput
from inferscope.slo.objectives import Objectives
from inferscope.slo.rule_templates import FIVE_MINUTES_S, Annotations, TimeScale
from inferscope.slo.rules_burn import Burn, alerts, burns, recordings
from inferscope.slo.rules_health import health_groups

FAST_INTERVAL_S = 30.0
"""Seconds between evaluations; recorded rates are summed with it."""
SLOW_INTERVAL_S = 120.0
"""Evaluation interval in seconds of long windows; below five minutes, so graphs have no gaps."""
_FEWEST_SCRAPES = 4
"""Minimum scrapes in the shortest window: one may be missed, and a rate needs two."""


@dataclass(frozen=True)
class RuleOptions:
    """Options of the rules.

    Attributes:
        floor: minimum number of bad requests in the long window.
        page_rate_s: requests per second below which an alert is a ticket instead of a page.
        scrape_s: scrape interval.
        runbooks: URL of docs/runbooks, without a trailing slash.
        dashboards: Grafana's address; None for none.
        scale: divisor of all windows, for tests and demonstrations.
    """

    floor: int = 10
    page_rate_s: float = 0.2
    scrape_s: float = 15.0
    runbooks: str = "docs/runbooks"
    dashboards: str | None = None
    scale: float = 1.0


def rule_file(objectives: Objectives, options: RuleOptions) -> dict[str, Any]:
    """Return the content of a rule file.

    Raises:
        BadInput: an objective is so loose that an alert could never fire, or shorter than the
            shortest window; or the windows are too short for the scrape interval.
    """
    time = TimeScale(options.scale)
    shortest_s = FIVE_MINUTES_S / options.scale
    if shortest_s < _FEWEST_SCRAPES * options.scrape_s:
        raise BadInput(
            f"the shortest window is {shortest_s:g} s and the scrape interval "
            f"{options.scrape_s:g} s: {_FEWEST_SCRAPES} scrapes must fit. Scrape every "
            f"{shortest_s / _FEWEST_SCRAPES:g} s or more often, and give that as --scrape"
            + (", or a lower --scale." if options.scale > 1 else ".")
        )
    annotations = Annotations(
        runbooks=options.runbooks,
        dashboards=options.dashboards,
        time=time,
        scrape_s=options.scrape_s,
    )
    found = burns(objectives, floor=options.floor, page_rate_s=options.page_rate_s)
    fast = list(recordings(time, interval_s=FAST_INTERVAL_S, is_long=False))
    slow = list(recordings(time, interval_s=FAST_INTERVAL_S, is_long=True))
    for alert in alerts(found, annotations):
        (fast if alert["labels"]["severity"] == "page" else slow).append(alert)
    groups: list[dict[str, Any]] = [
        {"name": name, "interval": time.span(interval_s), "rules": rules}
        for name, interval_s, rules in (
            ("inferscope-budgets", FAST_INTERVAL_S, fast),
            ("inferscope-budgets-long", SLOW_INTERVAL_S, slow),
        )
    ]
    return {"groups": groups + health_groups(annotations, floor=options.floor)}


def check_rules(objectives: Objectives) -> None:
    """Reject objectives that have no valid rules.

    Raises:
        BadInput: an alert could never fire, or a window is shorter than the shortest rule's.
    """
    burns(objectives, floor=RuleOptions.floor, page_rate_s=RuleOptions.page_rate_s)


def burn_lines(objectives: Objectives, options: RuleOptions) -> Iterator[str]:
    """Return a line for each budget rule: when it fires.

    Raises:
        BadInput: as `rule_file`.
    """
    rows: list[tuple[str, ...]] = [
        ("objective", "alert", "burn", "over", "fires when", "at least", "all bad: after")
    ]
    found = burns(objectives, floor=options.floor, page_rate_s=options.page_rate_s)
    time = TimeScale(options.scale)
    rows += [_row(burn, time) for burn in found]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip()


def _row(burn: Burn, time: TimeScale) -> tuple[str, ...]:
    models = burn.objective.model or "all models"
    over = time.span(burn.long_s)
    if burn.short_s is not None:
        over += f" and {time.span(burn.short_s)}"
    else:
        over += ", few requests"
    least = f"{burn.floor} bad"
    if burn.least_rate_s:
        least += f", {burn.least_rate_s:g}/s"
    after_s = burn.bad_share * time.seconds(burn.long_s)
    after = f"{after_s:.0f} s" if after_s < 100 else f"{after_s / 60:.0f} min"
    if after_s >= 6000:
        after = f"{after_s / 3600:.1f} h"
    return (
        f"{burn.objective.name} ({models})",
        burn.severity,
        f"{burn.factor:g}x",
        over,
        f"{100 * burn.bad_share:.4g}% are bad",
        least,
        after,
    )
