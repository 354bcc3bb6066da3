"""Say which of the classic mistakes a run shows, with its numbers and what to try.

Judged is a recording, a ring, a folder of rings, or an engine by pid or id; without one, the only
engine that runs here. Of a living engine, what its rings hold is judged. Each finding says what was
measured and what is modelled, what would have been without it, to first order, and what to try.
"""

from __future__ import annotations

import argparse
import shutil
import sys

from inferscope.cli.folding import fold_all
from inferscope.errors import NotFound
from inferscope.findings import Watch, findings
from inferscope.report.findings import findings_json, findings_text

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
    how = parser.add_argument_group("output")
    how.add_argument("--json", action="store_true", help="print the findings as JSON")
    how.add_argument("--ascii", action="store_true", help="write plain characters")
    parser.epilog = """examples:
  inferscope findings demo.isr
  inferscope findings                       of the only engine running, up to now
  inferscope findings 41233 --json | jq '.[].findings[].id'
"""


def run(options: argparse.Namespace) -> int:
    """Judge the run."""
    watch = Watch()
    source = fold_all(options.source, watch, patience_s=_PATIENCE_S, listen=watch.listen)
    found = findings(watch)
    if not found:
        raise NotFound(f"{source.title} holds no engine's records. Record while it serves.")
    if options.json:
        sys.stdout.write(findings_json(found).decode() + "\n")
        return 0
    width = min(_WIDTH, shutil.get_terminal_size((_WIDTH, 40)).columns)
    sys.stdout.write(findings_text(found, width=width, ascii=options.ascii))
    return 0
