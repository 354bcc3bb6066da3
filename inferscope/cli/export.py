"""Export a recording, a ring or a folder of rings in another format."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from inferscope.cli.folding import add_refit
from inferscope.cli.output_file import output_file
from inferscope.errors import BadInput
from inferscope.exporting import (
    Exporter,
    FolderExporter,
    Listening,
    exporter_names,
    load_exporter,
    load_folder_exporter,
)
from inferscope.fold import Sink, snapshot
from inferscope.foreign import one_line
from inferscope.readers import (
    Listener,
    RecordingSource,
    RingSource,
    catch_up,
    final_books,
    open_replay,
    open_source,
)
from inferscope.records import Record, Tick

_SUFFIXES = {"jsonl": ".jsonl", "perfetto": ".json"}
_SNAPSHOT_INTERVAL_NS = 1_000_000_000


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "file", type=Path, metavar="FILE", help="recording (.isr), ring (.ring) or folder of rings"
    )
    parser.add_argument("--format", help=f"one of: {', '.join(exporter_names())} (default: jsonl)")
    parser.add_argument(
        "-o",
        "--out",
        help="file or folder to write, - for stdout (default: stdout; on a terminal, FILE's name "
        "with the format's suffix in the current folder)",
    )
    parser.add_argument("--force", action="store_true", help="overwrite an existing file")
    add_refit(parser)
    parser.epilog = """examples:
  inferscope export demo.isr --format jsonl > demo.jsonl
  inferscope export demo.isr --format perfetto -o trace.json    then open it in ui.perfetto.dev
  inferscope export demo.isr --format parquet -o demo.parquet   then query it with DuckDB
"""


def run(options: argparse.Namespace) -> int:
    """Export the file in the chosen format."""
    form = _format_of(options)
    suffix = _suffix_of(form)
    # The user may redirect stdout to the default file, so a redirection writes only to stdout.
    is_stdout = options.out == "-" or (options.out is None and not sys.stdout.isatty())
    into_folder = load_folder_exporter(form)
    if into_folder is not None and is_stdout:
        raise BadInput(
            f"{form} writes a folder and cannot write to stdout. Name the folder with -o PATH."
        )
    # The source is opened twice so that a bad one leaves no empty file behind.
    open_source(options.file).close()
    named = options.file if options.file.name else options.file.resolve()
    target = Path(options.out or named.with_suffix(suffix).name)
    if into_folder is not None:
        source = _export_folder(options, into_folder, target)
        return _report(options, source, target)
    make = load_exporter(form)
    if not is_stdout and target.exists() and target.samefile(options.file):
        raise BadInput(f"--out {target} is the file to export. Choose another path.")
    with output_file(None if is_stdout else target, force=options.force) as out:
        source = _export(options, make(out))
    return _report(options, source, None if is_stdout else target)


def _format_of(options: argparse.Namespace) -> str:
    """Return the format to write.

    Raises:
        BadInput: no format is given, and the output has the suffix of a non-default format.
    """
    if options.format is not None:
        given: str = options.format
        return given
    suffix = Path(options.out).suffix if options.out else ""
    others = [name for name in exporter_names() if _suffix_of(name) == suffix != ".jsonl"]
    if others:
        raise BadInput(
            f"--out {options.out} does not have the suffix of jsonl, the default format. "
            f"Give --format {' or --format '.join((*others, 'jsonl'))}."
        )
    return "jsonl"


def _suffix_of(form: str) -> str:
    return _SUFFIXES.get(form, f".{form}")


def _report(
    options: argparse.Namespace, source: RingSource | RecordingSource, target: Path | None
) -> int:
    """Print the source's notes and the written path, with the format if none was given."""
    for note in source.notes():
        sys.stderr.write(f"inferscope: {options.file}: {one_line(note)}\n")
    if target is not None:
        others = ", ".join(name for name in exporter_names() if name != "jsonl")
        stated = "" if options.format else f" as jsonl (other formats: --format {others})"
        sys.stderr.write(f"wrote {target}{stated}\n")
    return 0


def _open(
    options: argparse.Namespace, sink: Sink, listen: Listener | None
) -> RingSource | RecordingSource:
    file: Path = options.file
    if options.refit:
        return open_replay(file, sinks=(sink,), listen=listen, books=final_books(file))
    return open_source(file, sinks=(sink,), listen=listen)


def _export(options: argparse.Namespace, exporter: Exporter) -> RingSource | RecordingSource:
    """Fold a file into an exporter; for a running engine, up to the newest record."""
    listen = exporter.on_record if isinstance(exporter, Listening) else None
    source = _open(options, exporter, listen)
    try:
        catch_up(source)
    finally:
        source.close()
    exporter.close(source.collector.devices(), source.collector.totals())
    return source


def _export_folder(
    options: argparse.Namespace, make: Callable[[Path], FolderExporter], target: Path
) -> RingSource | RecordingSource:
    """Fold a file into an exporter of a folder, which is renamed to `target` when complete."""
    open_source(options.file).close()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise BadInput(f"--out {target} exists and is not an empty folder. Choose another path.")
    try:
        written = Path(
            tempfile.mkdtemp(prefix=f"{target.name}.", suffix=".partial", dir=target.parent)
        )
    except OSError as error:
        raise BadInput(f"cannot write {target}: {error.strerror}. Choose another path.") from error
    try:
        exporter = make(written)
        source = _feed(options, exporter)
        exporter.close()
        written.replace(target)
    finally:
        shutil.rmtree(written, ignore_errors=True)
    return source


def _feed(options: argparse.Namespace, exporter: FolderExporter) -> RingSource | RecordingSource:
    """Fold a file into an exporter, with a snapshot for each second of the recording."""
    last_ns: int | None = None

    def pass_snapshot(mode: str) -> None:
        view = snapshot(
            source.collector, window_ns=_SNAPSHOT_INTERVAL_NS, mode=mode, max_requests=0
        )
        exporter.on_snapshot(view)

    def listen(ring: int, record: Record) -> None:
        nonlocal last_ns
        if not isinstance(record, Tick):
            return
        if last_ns is None or record.t_ns - last_ns >= _SNAPSHOT_INTERVAL_NS:
            last_ns = record.t_ns
            pass_snapshot("replay")

    source = _open(options, exporter, listen)
    try:
        catch_up(source)
        pass_snapshot("ended")
    finally:
        source.close()
    return source
