"""Detect common performance problems in a run and suggest fixes.

Analyze a recording, ring, directory or engine (default: the only running engine). For a running
engine, the analysis covers the records that its rings hold. Each finding shows measured and
modelled figures, a first-order estimate of the run without the problem, and a fix to try. With
--slo it also lists the missed objectives and the main causes.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from functools import partial
from pathlib import Path

from inferscope.cli.folding import add_refit, add_source, fold_all
from inferscope.errors import NotFound
from inferscope.fold import Judging
from inferscope.insight.findings import RunSummarizer, SloFindings, findings
from inferscope.records import Record
from inferscope.slo import read_objectives
from inferscope.text import findings_json, findings_text

_WIDTH = 100
"""Maximum line width in columns: longer lines are hard to read."""
_PATIENCE_S = 600.0


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_source(parser)
    parser.add_argument(
        "--slo",
        type=Path,
        metavar="FILE",
        help="file of SLO objectives; adds the objectives that the run missed",
    )
    add_refit(parser)
    how = parser.add_argument_group("output")
    how.add_argument("--json", action="store_true", help="print the findings as JSON")
    how.add_argument("--ascii", action="store_true", help="write plain characters")
    parser.epilog = """examples:
  inferscope findings demo.isr
  inferscope findings                       the only running engine, up to now
  inferscope findings demo.isr --slo slo.yaml
  inferscope findings 41233 --json | jq '.engines[].findings[].id'
"""


def run(options: argparse.Namespace) -> int:
    """Analyze the run and print its findings."""
    watch, promised = RunSummarizer(), None
    fold = partial(fold_all, options.source, patience_s=_PATIENCE_S, refit=options.refit)
    if options.slo is None:
        source = fold(watch, listen=watch.on_record)
    else:
        promised = SloFindings(read_objectives(options.slo), watch)
        judging = Judging(promised.judge_of, promised)

        def listen(ring: int, record: Record) -> None:
            judging.on_record(ring, record)
            watch.on_record(ring, record)

        source = fold(judging, listen=listen, watch=judging.watch)
    found = findings(watch, promised)
    if not found:
        raise NotFound(
            f"{source.title} holds no records of an engine. Record while the engine serves."
        )
    if options.json:
        sys.stdout.write(findings_json(found))
        return 0
    width = min(_WIDTH, shutil.get_terminal_size((_WIDTH, 40)).columns)
    sys.stdout.write(findings_text(found, width=width, ascii=options.ascii))
    return 0
