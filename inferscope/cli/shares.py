"""Divide the device's time by request, tenant, phase or model.

A rule divides every step's measured time among the requests in it. Each row also shows the time
that its requests would have taken alone, and the time that the steps would have saved without
them. Rows, padding, idle steps and unattributed time sum to the measured time.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from typing import get_args

from inferscope.attribution import RULES
from inferscope.cli.arg_types import count
from inferscope.cli.folding import add_refit, add_source, fold_all
from inferscope.errors import NotFound
from inferscope.insight import By, SharesSink
from inferscope.text import shares_json, shares_lines

_WIDTH = 110
_MAX_ROWS = 40
_PATIENCE_S = 300.0


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_source(parser)
    what = parser.add_argument_group("division")
    what.add_argument(
        "--by",
        choices=get_args(By),
        default="request",
        help="grouping of rows (default: %(default)s)",
    )
    what.add_argument(
        "--rule",
        choices=RULES,
        default="fair",
        help="fair: by what each request adds to a step; phase: no phase is charged more than it"
        " takes alone; token: the same price per token (default: %(default)s)",
    )
    add_refit(parser)
    how = parser.add_argument_group("output")
    how.add_argument(
        "--top",
        type=count,
        metavar="N",
        default=_MAX_ROWS,
        help="rows of text; one more row sums up the rest (default: %(default)s)",
    )
    how.add_argument("--json", action="store_true", help="print all rows, in nanoseconds, as JSON")
    how.add_argument("--ascii", action="store_true", help="draw with plain characters")
    parser.epilog = """examples:
  inferscope shares demo.isr --by tenant          device time by tenant
  inferscope shares demo.isr --by phase --rule phase
  inferscope shares RINGS --json | jq '.rows[] | [.name, .share_ns]'
"""


def run(options: argparse.Namespace) -> int:
    """Print the table."""
    tally = SharesSink(options.rule)
    source = fold_all(options.source, tally, patience_s=_PATIENCE_S, refit=options.refit)
    table = tally.table(options.by, source.collector)
    if not table.num_steps:
        raise NotFound(f"{source.title} holds no finished step. Record while the engine serves.")
    if options.json:
        sys.stdout.write(shares_json(table))
        return 0
    width = shutil.get_terminal_size((_WIDTH, 40)).columns
    sys.stdout.write(shares_lines(table, most=options.top, width=width, ascii=options.ascii))
    return 0
