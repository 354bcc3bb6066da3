"""Say which of the classic mistakes a run shows, with its numbers and what to try.

Judged is a recording, a ring, a folder of rings, or an engine by pid or id; without one, the only
engine that runs here. Of a living engine, what its rings hold is judged. Each finding says what was
measured and what is modelled, what would have been without it, to first order, and what to try.
With objectives it also says which of them the run missed, and for what.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from inferscope.cli.folding import add_refit, fold_all
from inferscope.collector.judging import Judging
from inferscope.errors import NotFound
from inferscope.findings import RunSummarizer, SloFindings, findings
from inferscope.records import Record
from inferscope.report.findings import findings_json, findings_text
from inferscope.slo.objectives import read_objectives

_WIDTH = 100
"""At most: sentences in longer lines are hard to read."""
_PATIENCE_S = 600.0


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "source",
        nargs="?",
        metavar="FILE|DIR|PID|ID",
        help="a recording, ring or folder, or an engine (default: the only one running)",
    )
    parser.add_argument(
        "--slo", type=Path, metavar="FILE", help="objectives to count good and bad requests by"
    )
    add_refit(parser)
    how = parser.add_argument_group("output")
    how.add_argument("--json", action="store_true", help="print the findings as JSON")
    how.add_argument("--ascii", action="store_true", help="write plain characters")
    parser.epilog = """examples:
  inferscope findings demo.isr
  inferscope findings                       of the only engine running, up to now
  inferscope findings demo.isr --slo slo.yaml
  inferscope findings 41233 --json | jq '.engines[].findings[].id'
"""


def run(options: argparse.Namespace) -> int:
    """Judge the run."""
    watch, promised = RunSummarizer(), None
    if options.slo is None:
        source = fold_all(
            options.source,
            watch,
            patience_s=_PATIENCE_S,
            listen=watch.listen,
            refit=options.refit,
        )
    else:
        promised = SloFindings(read_objectives(options.slo), watch)
        judging = Judging(promised.judge_of, promised)

        def listen(ring: int, record: Record) -> None:
            judging.listen(ring, record)
            watch.listen(ring, record)

        source = fold_all(
            options.source,
            judging,
            patience_s=_PATIENCE_S,
            listen=listen,
            watch=judging.watch,
            refit=options.refit,
        )
    found = findings(watch, promised)
    if not found:
        raise NotFound(f"{source.title} holds no engine's records. Record while it serves.")
    if options.json:
        sys.stdout.write(findings_json(found))
        return 0
    width = min(_WIDTH, shutil.get_terminal_size((_WIDTH, 40)).columns)
    sys.stdout.write(findings_text(found, width=width, ascii=options.ascii))
    return 0
