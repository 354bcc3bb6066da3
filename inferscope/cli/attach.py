"""Show a running engine live, opening with the history that its ring holds.

Without a target: the only engine alive. A target is a pid, an engine's id, a recording (.isr), a
ring (.ring) or a folder of rings; rings of dead processes are read like recordings.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from inferscope.cli.numbers import above_zero
from inferscope.cli.targets import engine_of, rings_of
from inferscope.collector.snapshot import to_json
from inferscope.collector.source import RecordingSource, RingSource, catch_up, open_source

_PATIENCE_S = 60.0


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("target", nargs="?", help="pid, engine id, file or folder")
    how = parser.add_argument_group("output")
    how.add_argument("--once", action="store_true", help="print one look as text and leave")
    how.add_argument("--json", action="store_true", help="with --once: print it as JSON")
    how.add_argument(
        "--window", type=above_zero, default=60.0, help="seconds (default: %(default)s)"
    )
    how.add_argument("--ascii", action="store_true", help="draw with plain characters")
    parser.epilog = """examples:
  inferscope attach                      the only engine that runs here
  inferscope attach 41233 --once --json  one snapshot of a process, for a script
"""


def run(options: argparse.Namespace) -> int:
    """Attach to the target."""
    source = source_of(options.target)
    try:
        if options.once or options.json or not sys.stdout.isatty():
            return _once(source, options)
        from inferscope.tui.app import InferScopeApp

        InferScopeApp(source, ascii=options.ascii).run()
    finally:
        source.close()
    return 0


def source_of(target: str | None) -> RingSource | RecordingSource:
    """Open what the user named.

    Raises:
        NotFound: nothing is there.
        UnreadableFile: it cannot be read.
    """
    if target is not None and not target.isdigit():
        path = Path(target)
        if path.exists() or path.suffix or "/" in target:
            return open_source(path)
    engine = engine_of(target)
    return RingSource(rings_of(engine), name=engine.engine_id)


def _once(source: RingSource | RecordingSource, options: argparse.Namespace) -> int:
    """Catch up with what is there, and print it."""
    catch_up(source, patience_s=_PATIENCE_S)
    snapshot = source.snapshot(round(options.window * 1e9))
    if options.json:
        sys.stdout.write(to_json(snapshot).decode() + "\n")
        return 0
    from inferscope.tui.once import once_text

    sys.stdout.write(once_text(snapshot, ascii=options.ascii) + "\n")
    return 0
