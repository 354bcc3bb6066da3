"""Explain a file of SLO objectives, evaluate a recording, and write Prometheus alert rules."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from inferscope.cli.slo import check as slo_check
from inferscope.cli.slo import rules as slo_rules


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    check = verbs.add_parser(
        "check",
        help="explain the objectives; evaluate a recording",
        description=slo_check.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    slo_check.configure(check)
    check.set_defaults(act=slo_check.run)
    rules = verbs.add_parser(
        "rules",
        help="write Prometheus rules and Alertmanager routes",
        description=slo_rules.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    slo_rules.configure(rules)
    rules.set_defaults(act=slo_rules.run)
    parser.epilog = """examples:
  inferscope slo check slo.yaml
  inferscope slo check slo.yaml demo.isr    good and bad requests, with causes
  inferscope slo rules slo.yaml --out /etc/prometheus/inferscope
"""


def run(options: argparse.Namespace) -> int:
    """Run the verb."""
    act: Callable[[argparse.Namespace], int] = options.act
    return act(options)
