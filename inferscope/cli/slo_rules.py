"""Write Prometheus' rules for a file of objectives, and an example of Alertmanager's routes.

Pages and tickets by the burn of each budget (14.4 times over 1h and 5m or 6 times over 6h and 30m:
page; 3 times over 1d and 2h or 1 time over 3d and 6h: ticket), for engines that stall, for what we
do not see, for full KV caches and preemptions. The objectives are what `collect` counts by.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from inferscope.cli.numbers import above_zero, count
from inferscope.errors import BadInput
from inferscope.slo.objectives import read_objectives
from inferscope.slo.rules import RuleOptions, burn_lines, rule_file
from inferscope.slo.rules_routing import routing
from inferscope.slo.rules_text import routing_text, rules_object_text, rules_text

RULES, ROUTING = "inferscope-rules.yaml", "alertmanager.yaml"
RULES_OBJECT = "inferscope-prometheusrule.yaml"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    usual = RuleOptions()
    parser.add_argument("file", type=Path, metavar="FILE", help="objectives, as collect has them")
    parser.add_argument(
        "--out", type=Path, metavar="DIR",
        help=f"write {RULES} and {ROUTING} there (default: print the rules)",
    )  # fmt: skip
    parser.add_argument(
        "--kubernetes", action="store_true",
        help=f"the rules as a PrometheusRule of the Prometheus operator, {RULES_OBJECT}",
    )  # fmt: skip
    when = parser.add_argument_group("when alerts fire")
    when.add_argument(
        "--floor", type=count, default=usual.floor, metavar="N",
        help="bad requests in its long window that a rule needs (default: %(default)s)",
    )  # fmt: skip
    when.add_argument(
        "--page-rate", type=_rate, default=usual.page_rate_s, metavar="PER_SECOND",
        help="requests per second below which nobody is paged, but a ticket is written; 0 pages"
        " always (default: %(default)s)",
    )  # fmt: skip
    when.add_argument(
        "--scrape", type=above_zero, default=usual.scrape_s, metavar="SECONDS",
        help="between Prometheus' scrapes; more often shows a stall sooner (default: %(default)g)",
    )  # fmt: skip
    when.add_argument(
        "--scale", type=above_zero, default=usual.scale, metavar="N",
        help="divide windows by this, for alerts within seconds in a test (default: %(default)g)",
    )  # fmt: skip
    links = parser.add_argument_group("links in alerts")
    links.add_argument(
        "--runbooks", metavar="BASE",
        help=f"address at which the folder {usual.runbooks} is served (default: links are relative,"
        " which no pager follows)",
    )  # fmt: skip
    links.add_argument("--dashboards", metavar="URL", help="Grafana's address (default: no link)")
    parser.epilog = """examples:
  inferscope slo rules slo.yaml --out /etc/prometheus/inferscope
  inferscope slo rules slo.yaml --floor 30 --dashboards https://grafana.example.org
  inferscope slo rules slo.yaml --kubernetes | kubectl -n monitoring apply -f -
"""


def run(options: argparse.Namespace) -> int:
    """Write the rules."""
    objectives = read_objectives(options.file)
    chosen = RuleOptions(
        floor=options.floor,
        page_rate_s=options.page_rate,
        scrape_s=options.scrape,
        runbooks=RuleOptions.runbooks if options.runbooks is None else options.runbooks,
        dashboards=options.dashboards,
        scale=options.scale,
    )
    try:
        text = rules_object_text if options.kubernetes else rules_text
        rules = text(rule_file(objectives, chosen))
        lines = list(burn_lines(objectives, chosen))
    except BadInput as error:
        raise BadInput(f"{options.file}: {error}") from None
    _say_what_leads_nowhere(options)
    if options.out is None:
        sys.stdout.write(rules)
        return 0
    _write(options.out / (RULES_OBJECT if options.kubernetes else RULES), rules)
    _write(options.out / ROUTING, routing_text(routing(options.scale)))
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return 0


def _say_what_leads_nowhere(options: argparse.Namespace) -> None:
    """Say in a line which links of the alerts are of no use to who is woken by them."""
    dead = []
    if options.runbooks is None:
        dead.append(f"runbook_url is relative ({RuleOptions.runbooks}/…): give --runbooks BASE")
    if options.dashboards is None:
        dead.append("there is no dashboard_url: give --dashboards URL")
    if dead:
        sys.stderr.write(f"inferscope: links in alerts: {'; '.join(dead)}\n")


def _write(path: Path, text: str) -> None:
    """Write a file that Prometheus, another user, can read.

    Raises:
        BadInput: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise BadInput(f"cannot write {path}: {error.strerror}. Choose another place.") from error
    sys.stderr.write(f"inferscope: wrote {path}\n")


def _rate(text: str) -> float:
    return 0.0 if text in ("0", "0.0") else above_zero(text)
