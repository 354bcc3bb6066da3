"""Compare two recordings: what changed, by how much, and which causes moved.

A and B are recordings of two versions, options, engines or days. Each measure has both values and
the interval of its difference at the same workload: the same requests if both recordings have them
by name, else the same prompt and answer lengths. "No difference shown" means that the interval
includes zero. A value of --fail-on is a limit, such as 'tbt_p99>+5%' or 'queue>+20ms'; it fails if
the change is beyond it and its interval excludes zero.

Exit status: 0, or 1 if a limit failed, or 2 if the recordings cannot be compared.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from inferscope.cli.arg_types import level
from inferscope.cli.folding import fold_all
from inferscope.cli.output_file import output_file
from inferscope.cli.targets import path_of
from inferscope.errors import BadInput, NotFound
from inferscope.fold import Collector, FinalRequest, FinalStep, model_of
from inferscope.insight.compare import (
    Columns,
    ColumnsBuilder,
    check_enough,
    compare_recordings,
    finding_changes,
    parse_limit,
)
from inferscope.insight.findings import EngineFindings, RunSummarizer, findings
from inferscope.json_document import json_line
from inferscope.readers import open_source
from inferscope.text import DiffDocument, DiffEngine, DiffSide, diff_document, diff_page

_WIDTH = 110
_PATIENCE_S = 600.0
_FAILED, _NOT_COMPARED = 1, 2


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    source = "recording, ring or folder, or an engine's pid or ID"
    parser.add_argument("a", metavar="A", help=f"{source}: the baseline")
    parser.add_argument("b", metavar="B", help=f"{source}: what is compared with it")
    how = parser.add_argument_group("comparison")
    how.add_argument(
        "--fail-on",
        action="append",
        default=[],
        metavar="LIMIT",
        help="largest change that passes, such as 'tbt_p99>+5%%', 'queue>+20ms' or"
        " 'goodput<-10%%'; may be given several times",
    )
    how.add_argument(
        "--level",
        type=level,
        default=0.95,
        help="share of comparisons of equal sides that show no difference (default: %(default)s)",
    )
    how.add_argument(
        "--seed", type=int, default=0, help="random seed of the resamples (default: %(default)s)"
    )
    output = parser.add_argument_group("output")
    output.add_argument(
        "-o", "--out", type=Path, metavar="FILE", help="HTML file to write as well (default: none)"
    )
    output.add_argument("--force", action="store_true", help="overwrite an existing file")
    output.add_argument("--json", action="store_true", help="print the comparison as JSON")
    output.add_argument("--ascii", action="store_true", help="write plain characters")
    parser.epilog = """examples:
  inferscope diff before.isr after.isr
  inferscope diff baseline.isr new.isr --fail-on 'ttft_mean>+10%' --fail-on 'failed>+1%'
  inferscope diff before.isr after.isr -o diff.html
  inferscope diff a.isr b.isr --json | jq '.comparison.rows[] | select(.verdict == "higher").name'
"""


def run(options: argparse.Namespace) -> int:
    """Compare the recordings."""
    if options.out is not None and options.out.is_file() and not options.force:
        raise BadInput(
            f"--out {options.out} exists. Overwrite it with --force, or choose another path."
        )
    limits = [parse_limit(text) for text in options.fail_on]
    for target in (options.a, options.b):  # before the first, which may take minutes, is read
        if (path := path_of(target)) is not None:
            open_source(path).close()
    (a, columns_a, findings_a), (b, columns_b, findings_b) = map(_side, (options.a, options.b))
    comparison = compare_recordings(
        columns_a, columns_b, level=options.level, seed=options.seed, change_limits=limits
    )
    changes = finding_changes(findings_a, findings_b, comparison.rows)
    document = diff_document(a, b, comparison, changes)
    if options.out is not None:
        _write_page(options.out, document, force=options.force)
    if options.json:
        sys.stdout.write(json_line(document))
    else:
        width = shutil.get_terminal_size((_WIDTH, 40)).columns
        sys.stdout.write(diff_page(document, width=width, ascii=options.ascii))
    if limits and not comparison.is_comparable:
        sys.stderr.write("inferscope: the workloads differ too much; no limit was checked.\n")
        return _NOT_COMPARED
    return _FAILED if any(each.outcome == "failed" for each in comparison.outcomes) else 0


def _write_page(path: Path, document: DiffDocument, *, force: bool) -> None:
    from inferscope.report import diff_report, render  # needs the extra `report`

    with output_file(path, force=force) as out:
        out.write(render(diff_report(document)).encode())
    sys.stderr.write(f"wrote {path}\n")


class _Sink:
    """Sink that keeps requests as columns and summarizes the run for the findings."""

    def __init__(self) -> None:
        self.columns = ColumnsBuilder()
        self.summarizer = RunSummarizer()

    def on_step(self, step: FinalStep) -> None:
        """Keep and summarize a step."""
        self.columns.on_step(step)
        self.summarizer.on_step(step)

    def on_request(self, request: FinalRequest) -> None:
        """Keep and summarize a request."""
        self.columns.add(request)
        self.summarizer.on_request(request)


def _side(target: str) -> tuple[DiffSide, Columns, tuple[EngineFindings, ...]]:
    """Fold one side.

    Raises:
        NotFound: the target does not exist, or holds no engine.
        UnreadableFile: the target's file cannot be read.
        BadInput: it has too few requests, or is too short.
    """
    sink = _Sink()
    source = fold_all(target, sink, patience_s=_PATIENCE_S, listen=sink.summarizer.on_record)
    found = findings(sink.summarizer)
    if not found:
        raise NotFound(
            f"{source.title} holds no records of an engine. Record while the engine serves."
        )
    columns = sink.columns.columns()
    check_enough(columns, target)
    arrived_ns = columns.facts["arrived_ns"]
    side = DiffSide(
        name=target,
        engines=_engines(source.collector),
        num_requests=int(columns.is_complete.sum()),
        num_failed=int(columns.is_failed.sum()),
        num_left_out=sink.columns.num_left_out,
        span_ns=int(arrived_ns[-1] - arrived_ns[0]),
    )
    return side, columns, found


def _engines(collector: Collector) -> tuple[DiffEngine, ...]:
    return tuple(
        DiffEngine(
            name,
            "" if engine.info is None else engine.info.engine,
            "" if engine.info is None else engine.info.version,
            model_of(engine),
            engine.is_synthetic,
        )
        for name, engine in collector.engines.items()
    )
