"""Explain what the prefix cache did for prompts, what misses cost, and what a larger cache gives.

Each prompt token belongs to one class, from `hit` to `new`; the classes sum to the prompts. GPU
time and time before the first token are divided among the classes. The curve shows the hit ratio
of the same requests with a KV cache of another size.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from typing import get_args

from inferscope.cli.folding import add_refit, add_source, fold_all
from inferscope.errors import NotFound
from inferscope.insight import CacheBy, CacheTally, cache_reports
from inferscope.text import cache_json, cache_lines

_WIDTH = 110
_PATIENCE_S = 300.0


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_source(parser)
    parser.add_argument(
        "--by",
        choices=get_args(CacheBy),
        default="cause",
        help="grouping of requests; cause shows the classes alone (default: %(default)s)",
    )
    add_refit(parser)
    how = parser.add_argument_group("output")
    how.add_argument("--json", action="store_true", help="print all groups as JSON")
    how.add_argument("--ascii", action="store_true", help="draw with plain characters")
    parser.epilog = """examples:
  inferscope cache                           the only running engine, up to now
  inferscope cache demo.isr --by tenant
  inferscope cache demo.isr --json | jq '.engines[].curve.points'
"""


def run(options: argparse.Namespace) -> int:
    """Print the use of the prefix cache."""
    tally = CacheTally()
    source = fold_all(options.source, tally, patience_s=_PATIENCE_S, refit=options.refit)
    reports = cache_reports(tally, source.collector)
    if not reports:
        raise NotFound(
            f"{source.title} holds no finished request with a record of the prefix cache. Record an"
            " engine that reports it, with INFERSCOPE_PREFIX_CACHE unset or tokens."
        )
    if options.json:
        sys.stdout.write(cache_json(reports, options.by))
        return 0
    width = shutil.get_terminal_size((_WIDTH, 40)).columns
    sys.stdout.write(cache_lines(reports, options.by, width=width, ascii=options.ascii))
    return 0
