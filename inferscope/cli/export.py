"""Turn a recording, a ring or a folder of rings into another format."""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path

from inferscope.collector.source import RecordingSource, RingSource, catch_up, open_source
from inferscope.errors import BadInput
from inferscope.exporting import Exporter, exporter_names, load_exporter
from inferscope.private import private_file

_SUFFIXES = {"jsonl": ".jsonl", "perfetto": ".json"}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "file", type=Path, metavar="FILE", help="a recording, a ring or a folder of rings"
    )
    parser.add_argument("--format", default="jsonl", help=f"one of: {', '.join(exporter_names())}")
    parser.add_argument(
        "-o", "--out", help="the file to write, - for stdout (default: beside FILE, by its name)"
    )
    parser.epilog = """examples:
  inferscope export demo.isr --format jsonl -o - | head
  inferscope export demo.isr --format perfetto      then open demo.json in ui.perfetto.dev
"""


def run(options: argparse.Namespace) -> int:
    """Export the file."""
    make = load_exporter(options.format)
    suffix = _SUFFIXES.get(options.format, f".{options.format}")
    target = Path(options.out) if options.out else options.file.with_suffix(suffix)
    is_stdout = options.out == "-"
    # The source is opened twice so that a bad one leaves no empty file behind.
    open_source(options.file).close()
    if not is_stdout and target.exists() and target.samefile(options.file):
        raise BadInput(f"{target} is what is to be exported. Choose another --out.")
    # Written beside and put in place when it is whole: a failed export replaces nothing. What is
    # there and no file (a pipe, a device) is written to as it is.
    has_place = is_stdout or (target.exists() and not target.is_file())
    written = target if has_place else target.with_name(target.name + ".partial")
    stdout = contextlib.nullcontext(sys.stdout.buffer)
    try:
        with stdout if is_stdout else private_file(written) as out:
            source = _export(options.file, make(out))
            out.flush()
        if not has_place:
            written.replace(target)
    finally:
        if not has_place:
            written.unlink(missing_ok=True)
    if isinstance(source, RecordingSource):
        for note in source.notes():
            sys.stderr.write(f"inferscope: {options.file}: {note}\n")
    if not is_stdout:
        sys.stderr.write(f"wrote {target}\n")
    return 0


def _export(file: Path, exporter: Exporter) -> RingSource | RecordingSource:
    """Fold a file into an exporter; of a living engine, what there is by now."""
    source = open_source(file, sinks=(exporter,))
    try:
        catch_up(source)
    finally:
        source.close()
    exporter.close(source.collector.devices(), source.collector.totals())
    return source
