"""Write a report on a run as one HTML file to hand around.

The report covers a recording, a ring, a folder of rings or an engine (default: the only running
engine; then the records that its rings hold). It states the verdict, objectives, findings,
latencies and their causes, the slowest requests, device time and the method of every number. The
file loads nothing from a network and runs no script; it reads on paper and in a dark scheme too.
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

from inferscope.cli.folding import add_refit, add_source, fold_all
from inferscope.cli.output_file import output_file
from inferscope.cli.targets import path_of
from inferscope.cli.why import request_source_of
from inferscope.errors import BadInput, NotFound
from inferscope.insight.run import RunSink, with_details
from inferscope.readers import RingSource
from inferscope.slo import read_objectives

_OUT = "report.html"
_PATIENCE_S = 600.0


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_source(parser)
    parser.add_argument(
        "-o", "--out", default=_OUT, metavar="FILE",
        help="file to write, - for stdout (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--force", action="store_true", help="overwrite an existing file")
    parser.add_argument(
        "--slo",
        type=Path,
        metavar="FILE",
        help="file of SLO objectives; adds how the run met them",
    )
    add_refit(parser)
    parser.epilog = """examples:
  inferscope report demo.isr                         writes report.html
  inferscope report demo.isr --slo slo.yaml -o incident.html
  inferscope report                                  the only running engine, up to now
"""


def run(options: argparse.Namespace) -> int:
    """Write the report."""
    # matplotlib takes a second to import, which `help` and `completion` need not wait for. What it
    # logs concerns caches of its own.
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    from inferscope.report import render
    from inferscope.report.run import Source, run_page

    objectives = None if options.slo is None else read_objectives(options.slo)
    path = path_of(options.source)
    target = None if options.out == "-" else Path(options.out)
    if path is not None and target is not None and target.exists() and target.samefile(path):
        raise BadInput(f"--out {target} is the file to report on. Choose another path.")
    with output_file(target, force=options.force) as out:
        sink = RunSink(objectives)
        source = fold_all(
            options.source,
            sink,
            patience_s=_PATIENCE_S,
            listen=sink.on_record,
            watch=sink.watch,
            refit=options.refit,
        )
        facts = sink.facts(source.collector)
        if not facts.engines:
            raise NotFound(
                f"{source.title} holds no records of an engine. Record while the engine serves."
            )
        is_live = isinstance(source, RingSource) and any(
            engine.view.is_alive for engine in facts.engines
        )
        again = request_source_of(options.source or facts.engines[0].engine_id, refit=options.refit)
        facts = with_details(facts, again, objectives)
        origin = Source(source.title, is_live, source.notes(), is_refit=options.refit)
        page = run_page(facts, origin)
        out.write(render(page).encode())
    if target is not None:
        sys.stderr.write(f"wrote {target}\n")
    return 0
