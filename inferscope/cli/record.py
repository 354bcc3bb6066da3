"""Record a running engine into a file, with the history that its rings still hold.

Recording stops on Ctrl-C, after --duration, or when the engine has ended. A replay of the file
gives the same numbers: its digest equals the one printed at the end.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from inferscope.cli.arg_types import above_zero
from inferscope.cli.stopping import stoppable
from inferscope.cli.targets import engine_of, rings_of
from inferscope.foreign import one_line
from inferscope.readers import RingSource
from inferscope.ring import RecordingWriter

_POLL_S = 0.05


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "target", nargs="?", help="pid or engine ID (default: the only running engine)"
    )
    parser.add_argument(
        "-o",
        "--out",
        type=Path,
        default=Path("run.isr"),
        metavar="FILE",
        help="recording to write (default: %(default)s)",
    )
    parser.add_argument(
        "--duration",
        type=above_zero,
        metavar="SECONDS",
        help="time to record (default: until Ctrl-C)",
    )
    parser.epilog = """examples:
  inferscope record -o load-test.isr
  inferscope record 41233 --duration 60 -o minute.isr
"""


def run(options: argparse.Namespace) -> int:
    """Record the target."""
    engine = engine_of(options.target)
    source = RingSource(
        rings_of(engine), name=engine.engine_id, recording=RecordingWriter(options.out)
    )
    sys.stderr.write(f"recording {one_line(engine.engine_id)} into {options.out}; Ctrl-C stops\n")
    end = None if options.duration is None else time.monotonic() + options.duration
    try:
        with stoppable() as stop:
            while not (stop.stop_requested or source.has_ended):
                if end is not None and time.monotonic() >= end:
                    break
                source.advance()
                time.sleep(_POLL_S)
    finally:
        source.close()
    source.collector.end()  # as a replay does at the end of the file
    totals = source.collector.totals()
    sys.stderr.write(
        f"{totals.num_records} records, {totals.num_lost} lost, digest {totals.digest}\n"
    )
    return 0
