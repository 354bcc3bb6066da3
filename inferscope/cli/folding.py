"""All that a recording or an engine's rings hold, folded for a command that only sums up."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from inferscope.cli.targets import engine_of, path_of, rings_of
from inferscope.collector.finals import Sink
from inferscope.collector.fold import Collector
from inferscope.collector.source import (
    Listener,
    RecordingSource,
    RingSource,
    catch_up,
    final_books,
    open_replay,
    open_source,
)
from inferscope.errors import BadInput
from inferscope.foreign import one_line


def fold_all(
    target: str | None,
    sink: Sink,
    *,
    patience_s: float,
    listen: Listener | None = None,
    watch: Callable[[Collector], None] | None = None,
    refit: bool = False,
) -> RingSource | RecordingSource:
    """Fold what is there by now; say on stderr what of a recording is damaged.

    Args:
        target: a recording, ring, folder, pid or id; None for the only engine running.
        sink: receives what is final.
        patience_s: for an engine that writes faster than it can be read.
        listen: called with every record, by its ring.
        watch: called with the fold, before its first record.
        refit: price all steps with the cost models of the whole recording.

    Returns:
        the source, closed: its title and its collector are there.

    Raises:
        NotFound: nothing is there.
        UnreadableFile: it cannot be read.
        BadInput: what runs cannot be priced again.
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


def add_refit(parser: argparse.ArgumentParser) -> None:
    """Add the option that prices a recording again."""
    parser.add_argument(
        "--refit",
        action="store_true",
        help="read the file twice, and price all steps with the cost models of its end",
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
