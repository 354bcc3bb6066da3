"""Objectives: what a file of them means, how a recording fares, and rules to alert by."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from inferscope.cli import slo_check, slo_rules


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    check = verbs.add_parser(
        "check",
        help="say what is promised; judge a recording by it",
        description=slo_check.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    slo_check.configure(check)
    check.set_defaults(act=slo_check.run)
    rules = verbs.add_parser(
        "rules",
        help="write Prometheus' rules and Alertmanager's routes",
        description=slo_rules.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    slo_rules.configure(rules)
    rules.set_defaults(act=slo_rules.run)
    parser.epilog = """examples:
  inferscope slo check slo.yaml
  inferscope slo check slo.yaml demo.isr    good, bad and why, of the requests in it
  inferscope slo rules slo.yaml --out /etc/prometheus/inferscope
"""


def run(options: argparse.Namespace) -> int:
    """Do what the verb says."""
    act: Callable[[argparse.Namespace], int] = options.act
    return act(options)
