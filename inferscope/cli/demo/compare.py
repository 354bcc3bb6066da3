"""Comparison of two option sets under the same load: `demo --compare A B`.

    round 1: A, B    round 2: B, A    round 3: A, B    …

One process serves all runs, one after the other, each on a new engine. A round has one load for
both sides. The order alternates, so that a machine that becomes slower or faster at a constant rate
adds as much to A as to B.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path

from inferscope.cli.demo.engine import EngineFailed, Host, demo_command
from inferscope.cli.demo.link import PlannedRun, Rounds
from inferscope.cli.demo.options import option_set_engine
from inferscope.cli.stopping import stoppable
from inferscope.errors import BadInput
from inferscope.fold import FinalRequest, FinalStep
from inferscope.insight.compare import HEADLINE_LEVEL, compare, fewest_pairs
from inferscope.json_document import json_line
from inferscope.readers import RingSource, catch_up
from inferscope.ring import RecordingWriter, ring_directory
from inferscope.text import ComparisonDocument, comparison_page, verdict_sentence

DEFAULT_ROUNDS = 8
_POLL_S = 0.5
_PATIENCE_S = 300.0
_INTERRUPTED = 130
_WIDTH = 110


def check_comparison(options: argparse.Namespace) -> None:
    """Check the options of a comparison.

    Raises:
        BadInput: an option set or the number of rounds is impossible.
    """
    for text in options.compare:
        option_set_engine(text, options)
    fewest = fewest_pairs(HEADLINE_LEVEL)
    if options.rounds < fewest:
        raise BadInput(
            f"--rounds is {options.rounds}. Give at least {fewest}: with fewer pairs of runs, all "
            f"differences have the same sign by chance in more than {1 - HEADLINE_LEVEL:.0%} of "
            "comparisons."
        )


def run_comparison(options: argparse.Namespace) -> int:
    """Run all rounds, fold their records, and print the page or the document."""
    name = f"demo-{os.getpid()}"
    runs = _planned(options, name)
    settings = Rounds(
        model=options.model,
        duration_s=options.duration,
        load=options.load,
        rate_s=options.rate,
        runs=runs,
    )
    host = Host(demo_command(settings), name, stderr=None)
    try:
        if not _wait(host):
            return _INTERRUPTED
    finally:
        host.stop()
        # Rings of workers that were built to check the options.
        shutil.rmtree(ring_directory() / name, ignore_errors=True)
    ready = host.ready
    assert ready is not None
    assert ready.num_requests is not None
    sides = [
        fold_runs([run.engine_id for run in runs if run.engine_id.startswith(f"{name}-{side}")],
              options.out / f"compare-{side}.isr")
        for side in "ab"
    ]  # fmt: skip
    comparison = compare(*sides)
    a, b = (text.strip() or "the defaults" for text in options.compare)
    document = ComparisonDocument(
        a=a,
        b=b,
        model=options.model,
        seed=options.seed,
        num_requests=ready.num_requests,
        requests_s=ready.rate_s,
        num_rounds=options.rounds,
        comparison=comparison,
        verdict=verdict_sentence(comparison.headlines, a=a, b=b),
    )
    if options.json:
        sys.stdout.write(json_line(document))
        return 0
    width = shutil.get_terminal_size((_WIDTH, 40)).columns
    sys.stdout.write(comparison_page(document, width=width, ascii=options.ascii))
    files = [str(options.out / f"compare-{side}.isr") for side in "ab"]
    sys.stderr.write(f"demo: {' and '.join(files)} hold the runs; try: inferscope findings FILE\n")
    return 0


def _planned(options: argparse.Namespace, name: str) -> tuple[PlannedRun, ...]:
    """Return the runs in their order; the seed of the load is the round's."""
    sides = {
        side: (text, option_set_engine(text, options))
        for side, text in zip("ab", options.compare, strict=True)
    }
    return tuple(
        PlannedRun(
            engine_id=f"{name}-{side}{number + 1}",
            label=f"round {number + 1} of {options.rounds}, {side.upper()}: {sides[side][0]}",
            options=sides[side][1],
            seed=options.seed + number,
        )
        for number in range(options.rounds)
        for side in ("ab", "ba")[number % 2]
    )


def _wait(host: Host) -> bool:
    """Wait until all runs have ended and report each; return False if stopped.

    Raises:
        EngineFailed: the process crashed, or could not start or serve.
    """
    reported = ""
    with stoppable() as stop:
        while host.is_running:
            if stop.stop_requested:
                return False
            host.advance(_POLL_S)
            if host.stage != reported:
                reported = host.stage
                sys.stderr.write(f"demo: {host.stage}\n")
                sys.stderr.flush()
    host.advance()
    code = host.exit_code()
    if code:
        raise EngineFailed(f"the demo's engine exited under load with code {code}.", 1)
    return True


class _Requests:
    """Sink that keeps the final requests of each engine."""

    def __init__(self) -> None:
        self.by_engine: dict[str, list[FinalRequest]] = {}

    def on_step(self, step: FinalStep) -> None:
        """Ignore a step."""

    def on_request(self, request: FinalRequest) -> None:
        """Keep a request."""
        self.by_engine.setdefault(request.engine_id, []).append(request)


def fold_runs(engine_ids: list[str], recording: Path) -> list[list[FinalRequest]]:
    """Fold the rings of a side's runs and record them; return the requests of each run.

    The rings are removed: the recording has all their records.
    """
    folders = [ring_directory() / engine_id for engine_id in engine_ids]
    kept = _Requests()
    source = RingSource(
        lambda: (path for folder in folders for path in folder.glob("*.ring")),
        name=recording.stem,
        sinks=(kept,),
        recording=RecordingWriter(recording),
    )
    try:
        catch_up(source, patience_s=_PATIENCE_S)
    finally:
        source.close()
    source.collector.end()
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    return [kept.by_engine.get(engine_id, []) for engine_id in engine_ids]
