"""Explain a file of SLO objectives, and evaluate a recording under them.

Requests count as good or bad by the same rules as in `inferscope collect --slo FILE`: one by one,
on the clock of the records. Without a source, a file that `inferscope slo rules` rejects is an
error; with a source, it causes a warning and the recording is evaluated.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import msgspec

from inferscope.cli.folding import fold_all
from inferscope.errors import BadInput, NotFound
from inferscope.fold import Judging, model_of
from inferscope.foreign import one_line
from inferscope.json_document import Document, json_line
from inferscope.slo import (
    Judge,
    Objective,
    ObjectiveCount,
    ObjectiveCounter,
    Objectives,
    check_rules,
    objective_lines,
    outcome_line,
    read_objectives,
)

_PATIENCE_S = 300.0


class CheckedEngine(msgspec.Struct, frozen=True):
    """Requests of one engine, counted under the objectives of its model."""

    engine_id: str
    """Name of the engine."""
    model: str
    """Served name of its model."""
    counts: tuple[ObjectiveCount, ...]
    """Counts by objective, in the order of the file."""
    is_synthetic: bool
    """Whether the records are marked as synthetic."""


class CheckDocument(Document, frozen=True, kw_only=True):
    """Meaning of a file of objectives (`inferscope slo check FILE [SOURCE] --json`)."""

    slos: tuple[Objective, ...]
    """Objectives, in the order of the file."""
    engines: tuple[CheckedEngine, ...]
    """Engines of the source; empty without one."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument("file", type=Path, metavar="FILE", help="file of SLO objectives (YAML)")
    parser.add_argument(
        "source",
        nargs="?",
        metavar="FILE|DIR|PID|ID",
        help="recording, ring, folder or engine to evaluate (default: none)",
    )
    parser.add_argument("--json", action="store_true", help="print objectives and counts as JSON")


def run(options: argparse.Namespace) -> int:
    """Print the objectives, and the counts of good and bad requests."""
    objectives = read_objectives(options.file)
    try:
        check_rules(objectives)
    except BadInput as error:
        if options.source is None:
            raise BadInput(f"{options.file}: {error}") from None
        sys.stderr.write(f"inferscope: slo rules rejects {options.file}: {error}\n")
    rows = [] if options.source is None else _judged(options.source, objectives)
    if options.json:
        sys.stdout.write(json_line(CheckDocument(slos=objectives.all, engines=tuple(rows))))
        return 0
    sys.stdout.write("".join(f"{line}\n" for line in objective_lines(objectives)))
    for row in rows:
        made_up = "  synthetic" if row.is_synthetic else ""
        sys.stdout.write(f"\n{one_line(row.engine_id)}  {one_line(row.model)}{made_up}\n")
        sys.stdout.write("".join(f"  {line}\n" for line in map(outcome_line, row.counts)))
    return 0


def _judged(target: str, objectives: Objectives) -> list[CheckedEngine]:
    """Return the counts of good and bad requests in a recording or in rings, by engine.

    Raises:
        NotFound: the source holds no engine.
    """
    counting: dict[str, ObjectiveCounter] = {}

    def judge_of(engine_id: str) -> Judge:
        counting[engine_id] = ObjectiveCounter(_spend_nothing)
        return Judge(objectives, counting[engine_id])

    judging = Judging(judge_of)
    source = fold_all(
        target, judging, patience_s=_PATIENCE_S, listen=judging.on_record, watch=judging.watch
    )
    if not counting:
        raise NotFound(
            f"{source.title} holds no records of an engine. Record while the engine serves."
        )
    rows = []
    for name, counts in counting.items():
        engine = source.collector.engines[name]
        model = model_of(engine)
        by_objective = counts.of(objectives.of_model(model))
        rows.append(CheckedEngine(name, model, by_objective, engine.is_synthetic))
    return rows


def _spend_nothing(objective: Objective, is_good: bool) -> None:
    """Ignore an outcome: a recording does not consume an error budget."""
