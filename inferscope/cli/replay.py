"""Replay a recording, a ring or a folder of rings on the screen, in real time or faster.

A replay gives the same numbers as the live run.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from inferscope.cli.arg_types import above_zero
from inferscope.cli.folding import add_refit
from inferscope.cli.screen import add_objectives, judged_source, levels_watch
from inferscope.cli.terminal import can_draw
from inferscope.cost import CostBook
from inferscope.errors import BadInput
from inferscope.fold import FOR_SCREEN, Sink
from inferscope.foreign import one_line
from inferscope.insight import JudgedSource
from inferscope.readers import Listener, RecordingSource, final_books, open_replay


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("file", type=Path, help="recording (.isr), ring (.ring) or folder of rings")
    parser.add_argument(
        "--speed", type=above_zero, default=1.0, help="factor to real time (default: %(default)s)"
    )
    add_objectives(parser)
    parser.add_argument("--ascii", action="store_true", help="draw with plain characters")
    parser.add_argument(
        "--check", action="store_true", help="print the digest of the records and exit"
    )
    add_refit(parser)
    picture = parser.add_argument_group("image instead of a screen")
    picture.add_argument(
        "--screenshot", type=Path, metavar="FILE", help="write the screen as SVG and exit"
    )
    picture.add_argument(
        "--at",
        type=above_zero,
        metavar="S",
        help="time to show, in seconds after the start (default: the end)",
    )
    picture.add_argument(
        "--press", nargs="*", default=[], metavar="KEY", help="keys to press before (default: none)"
    )
    picture.add_argument(
        "--size", default="120x40", help="columns x rows of the screen (default: %(default)s)"
    )
    picture.add_argument(
        "--theme", choices=("dark", "light"), default="dark", help="colours (default: dark)"
    )
    parser.epilog = """examples:
  inferscope replay demo.isr --speed 4
  inferscope replay demo.isr --check
  inferscope replay demo.isr --at 15 --screenshot detail.svg --press down enter
"""


def run(options: argparse.Namespace) -> int:
    """Replay the file."""
    if options.check:
        return _check(options)
    if options.screenshot is not None:
        return _picture(options)
    if not can_draw():
        raise BadInput(
            "replay needs a terminal that can move its cursor. "
            "For text: inferscope attach FILE --once."
        )
    source = _source(options, speed=options.speed)
    try:
        from inferscope.tui import InferScopeApp

        InferScopeApp(source, ascii=options.ascii).run()
    finally:
        source.close()
    return 0


def _source(
    options: argparse.Namespace, *, speed: float | None = None, until_ns: int | None = None
) -> JudgedSource:
    """Open the file at a pace, or up to an offset."""
    levels, books = levels_watch(options), _books(options)

    def open_with(sinks: tuple[Sink, ...], listen: Listener) -> RecordingSource:
        return open_replay(
            options.file,
            speed=speed,
            until_ns=until_ns,
            sinks=sinks,
            listen=listen,
            books=books,
            keep=FOR_SCREEN,
        )

    return judged_source(open_with, levels)


def _books(options: argparse.Namespace) -> dict[str, CostBook] | None:
    return final_books(options.file) if options.refit else None


def _check(options: argparse.Namespace) -> int:
    file: Path = options.file
    source = open_replay(file, books=_books(options))
    try:
        source.advance()
    finally:
        source.close()
    for note in source.notes():
        sys.stderr.write(f"inferscope: {file}: {one_line(note)}\n")
    sys.stdout.write(f"{source.collector.digest()}\n")
    return 0


def _picture(options: argparse.Namespace) -> int:
    columns, _, rows = options.size.partition("x")
    if not (columns.isdigit() and rows.isdigit() and int(columns) and int(rows)):
        raise BadInput(f"--size is {options.size!r}. Give columns x rows, such as 80x24.")
    until_ns = None if options.at is None else round(options.at * 1e9)
    source = _source(options, until_ns=until_ns)
    from inferscope.tui import save_picture

    save_picture(
        source,
        options.screenshot,
        keys=options.press,
        columns=int(columns),
        rows=int(rows),
        theme=options.theme,
    )
    return 0
