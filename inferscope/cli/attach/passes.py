"""Command `attach FILE.jsonl` or `attach ipc://…`: one view of forward-pass metrics."""

from __future__ import annotations

import argparse
import sys

from inferscope.cli.forward_passes import passes_of
from inferscope.errors import BadInput
from inferscope.insight.passes import passes_findings, passes_view
from inferscope.json_document import json_line
from inferscope.text import findings_text, passes_text


def show_passes(options: argparse.Namespace) -> int:
    """Print a view of the passes and what they show; an address is received for the window.

    Raises:
        BadInput: the target cannot be read, or an option needs history.
        NotFound: nothing was published.
    """
    if options.since is not None or options.at is not None:
        raise BadInput("forward-pass metrics have no history. Leave out --since and --at.")
    if options.screen not in (None, 1):
        raise BadInput("forward-pass metrics have one view. Leave out --screen.")
    window = {} if options.window is None else {"seconds": options.window}
    passes = passes_of(options.target, **window)
    view = passes_view(passes, options.target)
    if options.json:
        sys.stdout.write(json_line(view))
        return 0
    sys.stdout.write(passes_text(view, ascii=options.ascii) + "\n")
    sys.stdout.write(findings_text(passes_findings(passes), width=100, ascii=options.ascii))
    return 0
