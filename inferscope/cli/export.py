"""Turn a recording, a ring or a folder of rings into another format."""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path

from inferscope.collector.source import RecordingSource, open_source
from inferscope.exporting import exporter_names, load_exporter, private_file

_SUFFIXES = {"jsonl": ".jsonl", "perfetto": ".json"}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("file", type=Path, help="a recording, a ring or a folder of rings")
    parser.add_argument("--format", default="jsonl", help=f"one of: {', '.join(exporter_names())}")
    parser.add_argument("-o", "--out", help="the file to write, - for stdout (default: by FILE)")
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
    stdout = contextlib.nullcontext(sys.stdout.buffer)
    with stdout if is_stdout else private_file(target) as out:
        exporter = make(out)
        source = open_source(options.file, sinks=(exporter,))
        try:
            while not source.has_ended:
                source.advance()
        finally:
            source.close()
        exporter.close(source.collector.devices(), source.collector.totals())
        out.flush()
    if isinstance(source, RecordingSource):
        for note in source.notes():
            sys.stderr.write(f"inferscope: {options.file}: {note}\n")
    if not is_stdout:
        sys.stderr.write(f"wrote {target}\n")
    return 0
