"""Fold of a whole recording or of an engine's rings, for commands that print a summary."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from inferscope.cli.targets import engine_of, path_of, rings_of
from inferscope.errors import BadInput
from inferscope.fold import Collector, Sink
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


def fold_all(
    target: str | None,
    sink: Sink,
    *,
    patience_s: float,
    listen: Listener | None = None,
    watch: Callable[[Collector], None] | None = None,
    refit: bool = False,
) -> RingSource | RecordingSource:
    """Fold all existing records; report damage of a recording on standard error.

    Args:
        target: recording, ring, folder, pid or ID; None for the only running engine.
        sink: receiver of the final records.
        patience_s: maximum time to catch up with a running engine, in seconds.
        listen: callback for every record, with the index of its ring.
        watch: callback for the fold, called before its first record.
        refit: whether the whole recording's cost models price all steps.

    Returns:
        The source, closed; its title and its collector stay usable.

    Raises:
        NotFound: the target does not exist.
        UnreadableFile: the target's file cannot be read.
        BadInput: `refit` is set for a running engine.
    """
    source = _refit(target, sink, listen) if refit else _open(target, sink, listen)
    if watch is not None:
        watch(source.collector)
    try:
        catch_up(source, patience_s=patience_s)
    finally:
        source.close()
    for note in source.notes():
        sys.stderr.write(f"inferscope: {target}: {one_line(note)}\n")
    return source


def add_source(parser: argparse.ArgumentParser, *, url: str = "") -> None:
    """Add the source, without which the only running engine is folded.

    Args:
        parser: parser of the command.
        url: what a server's address gives; empty for a command that takes none.
    """
    parser.add_argument(
        "source",
        nargs="?",
        metavar="FILE|DIR|PID|ID|URL" if url else "FILE|DIR|PID|ID",
        help="recording, ring or folder, or an engine's pid or ID (default: the only running one)"
        + (f"; {url}" if url else ""),
    )


def add_refit(parser: argparse.ArgumentParser) -> None:
    """Add the option that prices all steps with the final cost models."""
    parser.add_argument(
        "--refit",
        action="store_true",
        help="read the file twice and price all steps with the cost models fitted by its end",
    )


def _refit(target: str | None, sink: Sink, listen: Listener | None) -> RecordingSource:
    path = path_of(target)
    if path is None:
        raise BadInput("--refit reads a file twice. Name a recording, a ring or a folder of rings.")
    return open_replay(path, sinks=(sink,), listen=listen, books=final_books(path))


def _open(target: str | None, sink: Sink, listen: Listener | None) -> RingSource | RecordingSource:
    path = path_of(target)
    if path is not None:
        return open_source(path, sinks=(sink,), listen=listen)
    engine = engine_of(target)
    return RingSource(rings_of(engine), name=engine.engine_id, sinks=(sink,), listen=listen)
