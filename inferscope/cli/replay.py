"""Show a recording at the pace at which it was made, or faster; it gives the same numbers."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from inferscope.collector.source import RecordingSource
from inferscope.errors import BadInput


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("file", type=Path, help="a recording (.isr)")
    parser.add_argument("--speed", type=float, default=1.0, help="(default: %(default)s)")
    parser.add_argument("--ascii", action="store_true", help="draw with plain characters")
    parser.add_argument("--check", action="store_true", help="only fold it; print the digest")
    parser.epilog = """examples:
  inferscope replay demo.isr --speed 4
  inferscope replay demo.isr --check
"""


def run(options: argparse.Namespace) -> int:
    """Replay the file."""
    if options.speed <= 0:
        raise BadInput(f"--speed is {options.speed}. Give a number above 0.")
    speed = None if options.check else options.speed
    source = RecordingSource(options.file, speed=speed)
    try:
        if options.check:
            source.advance()
            for note in source.notes():
                sys.stderr.write(f"inferscope: {options.file}: {note}\n")
            sys.stdout.write(f"{source.collector.digest()}\n")
            return 0
        from inferscope.tui.app import InferScopeApp

        InferScopeApp(source, ascii=options.ascii).run()
    finally:
        source.close()
    return 0
