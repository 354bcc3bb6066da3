"""Write Prometheus rules for a file of SLO objectives, and example Alertmanager routes.

Alerts fire on the burn rate of each error budget, on stalled engines, on missing data, on full KV
caches and on preemptions. Burn rates that page: 14.4 over 1h and 5m, or 6 over 6h and 30m. Burn
rates that open a ticket: 3 over 1d and 2h, or 1 over 3d and 6h. Use the file that `collect` uses.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from inferscope.cli.arg_types import above_zero, count
from inferscope.errors import BadInput
from inferscope.slo import (
    RuleOptions,
    burn_lines,
    read_objectives,
    routing,
    routing_text,
    rule_file,
    rules_object_text,
    rules_text,
)

RULES, ROUTING = "inferscope-rules.yaml", "alertmanager.yaml"
RULES_OBJECT = "inferscope-prometheusrule.yaml"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    defaults = RuleOptions()
    parser.add_argument(
        "file", type=Path, metavar="FILE", help="file of SLO objectives, the same as for collect"
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR",
        help=f"folder for {RULES} and {ROUTING} (default: print the rules)",
    )  # fmt: skip
    parser.add_argument(
        "--kubernetes", action="store_true",
        help=f"write a PrometheusRule for the Prometheus operator, {RULES_OBJECT}",
    )  # fmt: skip
    when = parser.add_argument_group("when alerts fire")
    when.add_argument(
        "--floor", type=count, default=defaults.floor, metavar="N",
        help="minimum bad requests in the long window of a rule (default: %(default)s)",
    )  # fmt: skip
    when.add_argument(
        "--page-rate", type=_rate, default=defaults.page_rate_s, metavar="PER_SECOND",
        help="minimum requests per second for a page; below, a ticket is opened; 0 always pages"
        " (default: %(default)s)",
    )  # fmt: skip
    when.add_argument(
        "--scrape", type=above_zero, default=defaults.scrape_s, metavar="SECONDS",
        help="Prometheus scrape interval; stalls page sooner if short (default: %(default)g)",
    )  # fmt: skip
    when.add_argument(
        "--scale", type=above_zero, default=defaults.scale, metavar="N",
        help="divisor of all windows, for fast alerts in tests (default: %(default)g)",
    )  # fmt: skip
    links = parser.add_argument_group("links in alerts")
    links.add_argument(
        "--runbooks", metavar="BASE",
        help=f"address that serves the folder {defaults.runbooks} (default: relative links, which"
        " do not work in a pager)",
    )  # fmt: skip
    links.add_argument("--dashboards", metavar="URL", help="address of Grafana (default: no link)")
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
    _warn_of_missing_links(options)
    if options.out is None:
        sys.stdout.write(rules)
        return 0
    _write(options.out / (RULES_OBJECT if options.kubernetes else RULES), rules)
    _write(options.out / ROUTING, routing_text(routing(options.scale)))
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return 0


def _warn_of_missing_links(options: argparse.Namespace) -> None:
    """Print a line that names the alerts' missing and unusable links."""
    dead = []
    if options.runbooks is None:
        dead.append(f"runbook_url is relative ({RuleOptions.runbooks}/…): give --runbooks BASE")
    if options.dashboards is None:
        dead.append("there is no dashboard_url: give --dashboards URL")
    if dead:
        sys.stderr.write(f"inferscope: links in alerts: {'; '.join(dead)}\n")


def _write(path: Path, text: str) -> None:
    """Write a file that Prometheus, which runs as another user, can read.

    Raises:
        BadInput: the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise BadInput(f"cannot write {path}: {error.strerror}. Choose another path.") from error
    sys.stderr.write(f"inferscope: wrote {path}\n")


def _rate(text: str) -> float:
    return 0.0 if text in ("0", "0.0") else above_zero(text)
