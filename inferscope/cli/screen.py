"""Source of the screen with findings and objectives, for the commands that open it."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from inferscope.fold import Sink
from inferscope.insight import JudgedSource, LevelsWatch
from inferscope.insight.findings import RunSummarizer
from inferscope.readers import Listener, RecordingSource, RingSource
from inferscope.records import Record
from inferscope.slo import read_objectives

Open = Callable[[tuple[Sink, ...], Listener], RingSource | RecordingSource]


def add_objectives(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Add the option for a file of objectives."""
    parser.add_argument(
        "--slo",
        type=Path,
        metavar="FILE",
        help="file of SLO objectives of screen 5 (default: 2 s to the first token, 200 ms between "
        "tokens; the key o changes them)",
    )


def levels_watch(options: argparse.Namespace) -> LevelsWatch:
    """Return the judge of the requests, by the file that was given or by the defaults.

    Raises:
        BadInput: the file cannot be read or is invalid.
    """
    if options.slo is None:
        return LevelsWatch()
    return LevelsWatch(read_objectives(options.slo), origin=options.slo.name)


def judged_source(open_with: Open, levels: LevelsWatch) -> JudgedSource:
    """Return a source of snapshots with the findings and the objectives of its run.

    Args:
        open_with: function that opens the source with given sinks and listener.
        levels: judge of the requests.
    """
    summarizer = RunSummarizer()

    def listen(ring: int, record: Record) -> None:
        summarizer.on_record(ring, record)
        levels.on_record(ring, record)

    return JudgedSource(open_with((summarizer, levels), listen), summarizer, levels)
