"""Divide the device's time among those who used it: by request, tenant, phase or model.

Every step's measured time is divided over the requests in it by a rule, and summed up. Beside it
stand what each would have taken alone, and what the steps would have saved without it. Rows,
padding, idle steps and what is of nobody sum to the measured time.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from typing import get_args

from inferscope.attribution.rules import RULES
from inferscope.cli.folding import add_refit, fold_all
from inferscope.cli.numbers import count
from inferscope.errors import NotFound
from inferscope.report.shares import By, SharesSink
from inferscope.report.shares_text import to_json, to_text

_WIDTH = 110
_MOST_ROWS = 40
_PATIENCE_S = 300.0


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "source",
        nargs="?",
        metavar="FILE|DIR|PID|ID",
        help="a recording, ring or folder, or an engine (default: the only one running)",
    )
    what = parser.add_argument_group("what to tell")
    what.add_argument(
        "--by", choices=get_args(By), default="request", help="(default: %(default)s)"
    )
    what.add_argument(
        "--rule",
        choices=RULES,
        default="fair",
        help="fair: what each adds to a step. phase: so that no phase pays more than alone. token:"
        " one price per token (default: %(default)s)",
    )
    add_refit(parser)
    how = parser.add_argument_group("output")
    how.add_argument(
        "--top",
        type=count,
        metavar="N",
        default=_MOST_ROWS,
        help="rows of text; the rest is summed in one (default: %(default)s)",
    )
    how.add_argument("--json", action="store_true", help="print all rows, in nanoseconds, as JSON")
    how.add_argument("--ascii", action="store_true", help="draw with plain characters")
    parser.epilog = """examples:
  inferscope shares demo.isr --by tenant          who pays for what
  inferscope shares demo.isr --by phase --rule phase
  inferscope shares RINGS --json | jq '.rows[] | [.name, .share_ns]'
"""


def run(options: argparse.Namespace) -> int:
    """Print the table."""
    tally = SharesSink(options.rule)
    source = fold_all(options.source, tally, patience_s=_PATIENCE_S, refit=options.refit)
    table = tally.table(options.by, source.collector)
    if not table.num_steps:
        raise NotFound(f"{source.title} holds no step that has ended: nothing to divide yet.")
    if options.json:
        sys.stdout.write(to_json(table))
        return 0
    width = shutil.get_terminal_size((_WIDTH, 40)).columns
    sys.stdout.write(to_text(table, most=options.top, width=width, ascii=options.ascii))
    return 0
