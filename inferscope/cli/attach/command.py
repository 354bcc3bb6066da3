"""Show the live screen of a running engine, with the history that its rings still hold.

Without a target, the command attaches to the only running engine. If several run, a
terminal shows all of them, a line each; without one they are listed. If none runs, it offers the
metrics page of a server on this host's usual ports (8000, 8080, 30000). A target is one of:

  pid          of the engine, of a process that started it, or of one that it started
  name         an engine ID, a model name, or the beginning of either
  file         a recording (.isr), a ring (.ring) or a folder of rings, of exited processes too
  FILE.jsonl   forward-pass metrics of Dynamo or SGLang; also .jsonl.gz, ipc:// and tcp://
  URL          a server that is not observed: totals from its /metrics page, without a ledger

--since and --at open the history: [ and ] step through it, End returns to the present. A time is a
duration (-5m: five minutes before now, or before a file's end), a time of day (14:02:07) or a date
(2026-01-31T14:02).
"""

from __future__ import annotations

import argparse
import shutil
import sys

from inferscope.cli.arg_types import above_zero
from inferscope.cli.attach.history import open_history
from inferscope.cli.attach.unobserved import hint, offer, unobserved_servers
from inferscope.cli.counters import sampler_hint
from inferscope.cli.engine_list import ask_which, list_json
from inferscope.cli.forward_passes import is_passes
from inferscope.cli.screen import add_objectives, judged_source, levels_watch
from inferscope.cli.targets import (
    Choose,
    engine_of,
    is_remote,
    path_of,
    rings_of,
    rings_of_running,
    running_engines,
)
from inferscope.cli.terminal import can_draw
from inferscope.cli.time_args import accept_negative_times, at_time, since_time
from inferscope.errors import BadInput, NotFound
from inferscope.fold import FOR_SCREEN, Sink, json_of
from inferscope.insight import JudgedSource
from inferscope.readers import (
    HistorySource,
    Listener,
    RecordingSource,
    RingSource,
    catch_up,
    open_source,
)
from inferscope.ring import EngineRings

Source = JudgedSource | HistorySource
_PATIENCE_S = 60.0
_SCREENS = ("fleet", "overview", "requests", "timeline", "roofline", "SLO", "engine")
"""Names of the screens, by their keys."""
_WITH_STEPS = (3, 4)
_SIZE = (120, 40)
"""Columns and rows of a screen that is not printed on a terminal."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    accept_negative_times(parser)
    parser.add_argument(
        "target",
        nargs="?",
        help="pid, model name, engine ID, file, folder or URL (default: the only running engine)",
    )
    past = parser.add_argument_group("history")
    past.add_argument("--since", type=since_time, metavar="TIME", help="show history from TIME on")
    past.add_argument("--at", type=at_time, metavar="TIME", help="open frozen at TIME")
    how = parser.add_argument_group("output")
    how.add_argument("--once", action="store_true", help="print one snapshot as text and exit")
    how.add_argument("--json", action="store_true", help="print one snapshot as JSON and exit")
    how.add_argument(
        "--screen",
        type=_screen,
        metavar="N",
        help="screen to print or to open with: "
        + ", ".join(f"{number} {name}" for number, name in enumerate(_SCREENS))
        + " (default: 1; 0 for several engines on a terminal)",
    )
    how.add_argument(
        "--window",
        type=above_zero,
        metavar="SECONDS",
        help="length of the window of rates and latencies (default: 60, or the span of --since)",
    )
    add_objectives(how)
    how.add_argument("--ascii", action="store_true", help="draw with plain characters")
    parser.epilog = """examples:
  inferscope attach                      the only engine running on this host
  inferscope attach llama                the engine with a model name that begins with llama
  inferscope attach 41233 --once --json  one snapshot of a process, for a script
  inferscope attach run.isr --once --screen 3    its timeline as text
  inferscope attach --since -5m          the last five minutes, even if the server was killed
  inferscope attach demo.isr --at 14:02  a recording, opened at this time of day
  inferscope attach http://gpu7:8000     a server that is not observed, from its /metrics page
"""


def run(options: argparse.Namespace) -> int:
    """Attach to the target."""
    if options.json and options.screen is not None:
        raise BadInput("--json prints the snapshot of all screens. Leave out --screen.")
    is_live = options.since is None and options.at is None
    servers = unobserved_servers() if options.target is None and is_live else []
    if servers and _is_asking(options):
        options.target = offer(servers)
    if is_passes(options.target):
        from inferscope.cli.attach.passes import show_passes

        return show_passes(options)
    if is_remote(options.target):
        from inferscope.cli.attach.page import show_page

        return show_page(options)
    is_once = options.once or options.json or not can_draw()
    is_fleet = False
    window_ns = None if options.window is None else round(options.window * 1e9)
    source: Source
    choose = _chooser(options)
    if options.since is not None or options.at is not None:
        source, window_ns = open_history(
            options.target,
            since=options.since,
            at=options.at,
            window_ns=window_ns,
            has_steps=not options.json,
            choose=choose,
        )
    else:
        levels = levels_watch(options)
        is_fleet = options.target is None and _is_fleet(options, is_once=is_once)
        try:
            source = judged_source(
                lambda sinks, listen: (
                    fleet_source(sinks, listen)
                    if is_fleet
                    else source_of(options.target, sinks, listen, choose)
                ),
                levels,
            )
        except NotFound as error:
            raise NotFound(f"{error}{hint(servers)}") from None
    window_ns = window_ns or 60_000_000_000
    try:
        if is_once:
            return _once(source, window_ns, options)
        from inferscope.tui import InferScopeApp

        past = source if isinstance(source, HistorySource) else None
        InferScopeApp(
            source,
            ascii=options.ascii,
            window_ns=window_ns,
            earlier=past.earlier if past else (),
            at_idx=past.at_idx if past else None,
            first_tab=str((0 if is_fleet else 1) if options.screen is None else options.screen),
        ).run()
    finally:
        source.close()
    return 0


def _screen(text: str) -> int:
    """Parse the number of a screen for argparse.

    Raises:
        argparse.ArgumentTypeError: there is no such screen.
    """
    if text not in map(str, range(len(_SCREENS))):
        known = ", ".join(f"{number} {name}" for number, name in enumerate(_SCREENS))
        raise argparse.ArgumentTypeError(f"{text!r} is not a screen. Give one of: {known}")
    return int(text)


def _is_fleet(options: argparse.Namespace, *, is_once: bool) -> bool:
    """Return whether all engines are shown where none is named."""
    num_running = len(running_engines())
    return num_running > 0 if options.screen == 0 else num_running > 1 and not is_once


def fleet_source(sinks: tuple[Sink, ...], listen: Listener) -> RingSource:
    """Open all engines that run on this host, or start later."""
    find = rings_of_running()
    return RingSource(find, name="this host", sinks=sinks, listen=listen, keep=FOR_SCREEN)


def source_of(
    target: str | None,
    sinks: tuple[Sink, ...],
    listen: Listener,
    choose: Choose | None = None,
) -> RingSource | RecordingSource:
    """Open the source that a target names.

    Args:
        target: target as given on the command line.
        sinks: receivers of the final records.
        listen: callback for every record.
        choose: function that picks one of several running engines; without it they are an error.

    Raises:
        NotFound: the target does not exist.
        UnreadableFile: the target's file cannot be read.
    """
    path = path_of(target)
    if path is not None:
        return open_source(path, sinks=sinks, listen=listen, keep=FOR_SCREEN)
    engine = engine_of(target, choose=choose)
    command = sampler_hint(engine)
    if command is not None:
        sys.stderr.write(f"no sampler reads this GPU's counters; start one with: {command}\n")
    return RingSource(
        rings_of(engine), name=engine.engine_id, sinks=sinks, listen=listen, keep=FOR_SCREEN
    )


def _chooser(options: argparse.Namespace) -> Choose | None:
    """Return the function that picks one of several engines; None lists them with an error."""
    if options.json:
        return _list_as_json
    return ask_which if _is_asking(options) else None


def _is_asking(options: argparse.Namespace) -> bool:
    """Return whether a question can be asked on the terminal and its answer drawn there."""
    is_asking = not (options.once or options.json) and sys.stdin.isatty()
    return is_asking and sys.stdout.isatty() and sys.stderr.isatty()


def _list_as_json(engines: list[EngineRings]) -> EngineRings:
    """Print the engines as JSON and raise: a script has to name one of them."""
    sys.stdout.write(list_json(engines))
    raise NotFound(f"{len(engines)} engines are running. Name one by its model, ID or pid.")


def _once(source: Source, window_ns: int, options: argparse.Namespace) -> int:
    """Read all existing records and print one snapshot: the newest, or the one at --at."""
    screen = 1 if options.screen is None else options.screen
    source.has_steps = screen in _WITH_STEPS
    if isinstance(source, HistorySource):
        at_idx = source.at_idx
        looked = source.snapshot(window_ns) if at_idx is None else source.earlier[at_idx]
    else:
        catch_up(source.source, patience_s=_PATIENCE_S)
        looked = source.snapshot(window_ns)
    if options.json:
        sys.stdout.write(json_of(looked))
        return 0
    from inferscope.text import once_text

    # The overview as text is as wide everywhere; the others are drawn for the terminal.
    width = 100 if screen == 1 else shutil.get_terminal_size(_SIZE).columns
    text = once_text(looked, screen=screen, width=max(width, 60), ascii=options.ascii)
    sys.stdout.write(text + "\n")
    return 0
