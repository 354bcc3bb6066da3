"""Show a running engine live, opening with the history that its ring holds.

Without a target: the only engine alive; where there are several, a terminal asks which one, and
otherwise they are listed. A target is a pid (of the engine, of what started it or of what it
started), an engine's id, a model's name, the beginning of either, a recording (.isr), a ring
(.ring) or a folder of rings; rings of dead processes are read like recordings. A server's address
shows what its /metrics page says: totals, without a ledger.

--since and --at open the past: [ and ] step through it, End goes to the present. Times are
durations (-5m: five minutes before the end, or before now), the clock on the wall (14:02:07) or a
date (2026-01-31T14:02).
"""

from __future__ import annotations

import argparse
import sys

from inferscope.cli.counters import how_to_sample
from inferscope.cli.engine_list import ask_which, list_json
from inferscope.cli.moments import accept_minus, ago, into
from inferscope.cli.numbers import above_zero
from inferscope.cli.past import open_past
from inferscope.cli.targets import Choose, engine_of, is_remote, path_of, rings_of
from inferscope.cli.terminal import can_draw
from inferscope.collector.history import HistorySource
from inferscope.collector.snapshot import json_of
from inferscope.collector.source import RecordingSource, RingSource, catch_up, open_source
from inferscope.errors import NotFound
from inferscope.findings import RunSummarizer
from inferscope.ring.discovery import EngineRings
from inferscope.tui.judged_source import JudgedSource

Source = JudgedSource | HistorySource
_PATIENCE_S = 60.0


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    accept_minus(parser)
    parser.add_argument("target", nargs="?", help="pid, model, engine id, file, folder or URL")
    past = parser.add_argument_group("history")
    past.add_argument(
        "--since", type=ago, metavar="TIME", help="show only what reaches beyond it, and its past"
    )
    past.add_argument("--at", type=into, metavar="TIME", help="open on this moment, frozen")
    how = parser.add_argument_group("output")
    how.add_argument("--once", action="store_true", help="print one look as text and leave")
    how.add_argument("--json", action="store_true", help="with --once: print it as JSON")
    how.add_argument(
        "--window", type=above_zero, help="seconds (default: 60, or what --since asks for)"
    )
    how.add_argument("--ascii", action="store_true", help="draw with plain characters")
    parser.epilog = """examples:
  inferscope attach                      the only engine that runs here
  inferscope attach llama                the engine whose model's name begins so
  inferscope attach 41233 --once --json  one snapshot of a process, for a script
  inferscope attach --since -5m          the last five minutes, of a server that was killed too
  inferscope attach demo.isr --at 14:02  a recording, as the screen was then
  inferscope attach http://gpu7:8000     a server that is not observed, by its /metrics
"""


def run(options: argparse.Namespace) -> int:
    """Attach to the target."""
    if is_remote(options.target):
        from inferscope.cli.page import show_page

        return show_page(options)
    is_once = options.once or options.json or not can_draw()
    window_ns = None if options.window is None else round(options.window * 1e9)
    source: Source
    choose = _chooser(options)
    if options.since is not None or options.at is not None:
        source, window_ns = open_past(
            options.target, since=options.since, at=options.at, window_ns=window_ns, choose=choose
        )
    else:
        watch = RunSummarizer()
        source = JudgedSource(source_of(options.target, watch, choose), watch)
    window_ns = window_ns or 60_000_000_000
    try:
        if is_once:
            return _once(source, window_ns, options)
        from inferscope.tui.app import InferScopeApp

        past = source if isinstance(source, HistorySource) else None
        InferScopeApp(
            source,
            ascii=options.ascii,
            window_ns=window_ns,
            earlier=past.earlier if past else (),
            at_idx=past.at_idx if past else None,
        ).run()
    finally:
        source.close()
    return 0


def source_of(
    target: str | None, watch: RunSummarizer, choose: Choose | None = None
) -> RingSource | RecordingSource:
    """Open what the user named, and have a watch sum it up.

    Args:
        target: as on the command line.
        watch: is given what is final, for findings.
        choose: asks which of several engines is meant; without it they are an error.

    Raises:
        NotFound: nothing is there.
        UnreadableFile: it cannot be read.
    """
    path = path_of(target)
    if path is not None:
        return open_source(path, sinks=(watch,), listen=watch.listen)
    engine = engine_of(target, choose=choose)
    command = how_to_sample(engine)
    if command is not None:
        sys.stderr.write(f"nothing samples the GPU; this does: {command}\n")
    return RingSource(rings_of(engine), name=engine.engine_id, sinks=(watch,), listen=watch.listen)


def _chooser(options: argparse.Namespace) -> Choose | None:
    """Return what is done where several engines run; None lists them beside an error."""
    if options.json:
        return _list_as_json
    is_asking = not options.once and sys.stdin.isatty() and sys.stdout.isatty()
    return ask_which if is_asking and sys.stderr.isatty() else None


def _list_as_json(engines: list[EngineRings]) -> EngineRings:
    """Print the engines as JSON: a script that asked for one look has to name one of them."""
    sys.stdout.write(list_json(engines))
    raise NotFound(f"{len(engines)} engines are running. Name one by its model, id or pid.")


def _once(source: Source, window_ns: int, options: argparse.Namespace) -> int:
    """Catch up with what is there, and print it: the present, or the moment asked for."""
    if isinstance(source, HistorySource):
        at_idx = source.at_idx
        looked = source.snapshot(window_ns) if at_idx is None else source.earlier[at_idx]
    else:
        catch_up(source.source, patience_s=_PATIENCE_S)
        looked = source.snapshot(window_ns)
    if options.json:
        sys.stdout.write(json_of(looked))
        return 0
    from inferscope.tui.once import once_text

    sys.stdout.write(once_text(looked, ascii=options.ascii) + "\n")
    return 0
