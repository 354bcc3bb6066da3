"""Detect common performance problems in a run and suggest fixes.

Analyze a recording, ring, directory or engine (default: the only running engine). For a running
engine, the analysis covers the records that its rings hold. Each finding shows measured and
modelled figures, a first-order estimate of the run without the problem, and a fix to try. With
--slo it also lists the missed objectives and the main causes.

Of a server that is not observed, the totals of its /metrics page since its start are analyzed, and
the rules that totals cannot decide are listed.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from functools import partial
from pathlib import Path

from inferscope.cli.folding import add_refit, add_source, fold_all
from inferscope.cli.forward_passes import is_passes, passes_of
from inferscope.cli.targets import is_remote
from inferscope.errors import BadInput, NotFound
from inferscope.fold import Judging
from inferscope.insight.findings import EngineFindings, RunSummarizer, SloFindings, findings
from inferscope.records import Record
from inferscope.slo import read_objectives
from inferscope.text import findings_json, findings_text

_WIDTH = 100
"""Maximum line width in columns: longer lines are hard to read."""
_PATIENCE_S = 600.0
_APART_S = 1.0
"""Time between the two readings of a page, which a queue has to outlast."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_source(parser, url="a server's address for its /metrics")
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
  inferscope findings http://gpu7:8000      a server that is not observed, from its /metrics
  inferscope findings dynamo-fpm.4192.000000.jsonl.gz   forward-pass metrics of Dynamo or SGLang
"""


def run(options: argparse.Namespace) -> int:
    """Analyze the run and print its findings."""
    if is_passes(options.source):
        found = _of_passes(options)
    else:
        found = _of_page(options) if is_remote(options.source) else _of_records(options)
    if options.json:
        sys.stdout.write(findings_json(found))
        return 0
    width = min(_WIDTH, shutil.get_terminal_size((_WIDTH, 40)).columns)
    sys.stdout.write(findings_text(found, width=width, ascii=options.ascii))
    return 0


def _of_records(options: argparse.Namespace) -> tuple[EngineFindings, ...]:
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
    return found


def _of_passes(options: argparse.Namespace) -> tuple[EngineFindings, ...]:
    """Return the findings of forward-pass metrics.

    Raises:
        BadInput: the target cannot be read, or an option needs single requests.
        NotFound: nothing was published.
    """
    from inferscope.insight.passes import passes_findings

    if options.slo is not None or options.refit:
        option = "--refit" if options.slo is None else "--slo"
        raise BadInput(f"forward passes have no single requests. Leave out {option}.")
    return passes_findings(passes_of(options.source))


def _of_page(options: argparse.Namespace) -> tuple[EngineFindings, ...]:
    """Return the findings of a server's page since its start.

    Raises:
        BadInput: the target is not a server's address, or an option needs single requests.
        NotFound: the address has no page of a known server.
    """
    if options.slo is not None or options.refit:
        option = "--refit" if options.slo is None else "--slo"
        raise BadInput(f"a metrics page has no single requests. Leave out {option}.")
    return (findings_of_page(options.source),)


def findings_of_page(target: str) -> EngineFindings:
    """Return the findings of a server's /metrics, from two readings.

    Raises:
        BadInput: the target is not a server's address.
        NotFound: the address has no page of a known server.
    """
    from inferscope.insight.page import page_findings
    from inferscope.metrics_page import PageSource, page_url

    source = PageSource(page_url(target))
    source.poll()
    time.sleep(_APART_S)
    source.poll()
    return page_findings(source.totals(None))
