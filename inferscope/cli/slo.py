"""Objectives: say what a file of them means, and how a recording fares under it."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from inferscope.cli import slo_check


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
    parser.epilog = """examples:
  inferscope slo check slo.yaml
  inferscope slo check slo.yaml demo.isr    good, bad and why, of the requests in it
"""


def run(options: argparse.Namespace) -> int:
    """Do what the verb says."""
    act: Callable[[argparse.Namespace], int] = options.act
    return act(options)
