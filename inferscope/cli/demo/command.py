"""Run a real engine under load on this machine and show where each request's time goes.

The built-in model serves short chats, long retrieval prompts and growing agent conversations. They
arrive at random, at a rate that adapts to the load of the machine. The demo downloads nothing and
needs no GPU. With --headless it runs without a terminal, writes demo.isr (for `inferscope replay`),
trace.json (for ui.perfetto.dev), demo.jsonl and client.jsonl, and prints a summary.

With --compare it serves the same load with two sets of engine options, several times in turn, and
prints both side by side, with the intervals of their differences and a verdict.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from inferscope.cli.arg_types import above_zero, count, option_set, utf8
from inferscope.cli.demo.compare import (
    DEFAULT_ROUNDS,
    check_comparison,
    run_comparison,
)
from inferscope.cli.demo.engine import DemoSource, EngineFailed, Host, demo_command
from inferscope.cli.demo.link import Ready, Settings
from inferscope.cli.demo.options import add_demo_engine, demo_engine
from inferscope.cli.screen import add_objectives, judged_source, levels_watch
from inferscope.cli.stopping import stoppable
from inferscope.cli.terminal import can_draw, own_command
from inferscope.errors import BadInput, InferScopeError
from inferscope.exporting import Listening, load_exporter
from inferscope.fold import FOR_SCREEN, json_of
from inferscope.insight import JudgedSource
from inferscope.insight.findings import RunSummarizer, findings
from inferscope.private import private_file
from inferscope.readers import RecordingSource, RingSource
from inferscope.records import Record
from inferscope.ring import RecordingWriter, make_private, ring_directory
from inferscope.text import findings_brief

DEFAULT_SECONDS = 20.0
_POLL_S = 0.05
_PROGRESS_S = 5.0
_INTERRUPTED = 130


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    load = parser.add_argument_group("load")
    load.add_argument(
        "--seed", type=int, default=0, help="random seed of the prompts (default: %(default)s)"
    )
    load.add_argument(
        "--load",
        type=above_zero,
        default=0.7,
        help="share of the engine's measured capacity, up to 2; below 1, the rate drops while"
        " requests queue (default: %(default)s)",
    )
    load.add_argument(
        "--rate", type=above_zero, help="requests per second (default: set by --load)"
    )
    load.add_argument(
        "--model",
        type=utf8,
        default="builtin",
        help="builtin, random:SHAPE or a checkpoint folder (default: %(default)s)",
    )
    add_demo_engine(parser.add_argument_group("engine"))
    compared = parser.add_argument_group("comparison")
    compared.add_argument(
        "--compare",
        nargs=2,
        type=option_set,
        metavar=("A", "B"),
        help="serve the same load with two sets of engine options, and compare latencies, goodput,"
        " phases and ledgers",
    )
    compared.add_argument(
        "--rounds",
        type=count,
        default=DEFAULT_ROUNDS,
        metavar="N",
        help="runs of each set, in the order A B, B A, … (default: %(default)s)",
    )
    how = parser.add_argument_group("output")
    how.add_argument(
        "--headless", action="store_true", help="write files and a summary, without a screen"
    )
    how.add_argument(
        "--duration",
        type=above_zero,
        metavar="SECONDS",
        help=f"length of the load (default: until quit; headless {DEFAULT_SECONDS:.0f}; each run of"
        " a comparison: 20 requests)",
    )
    how.add_argument(
        "--out", type=Path, default=Path(), help="folder for the files (default: the current one)"
    )
    how.add_argument("--json", action="store_true", help="print the summary as JSON")
    add_objectives(how)
    how.add_argument("--ascii", action="store_true", help="draw with plain characters")
    parser.epilog = """examples:
  inferscope demo
  inferscope demo --headless --duration 20 --seed 7 --out /tmp/run --json
  inferscope demo --compare "--no-prefix-cache" "--prefix-cache"
"""


def run(options: argparse.Namespace) -> int:
    """Run the demo."""
    is_headless = options.headless or options.json or not can_draw()
    _check(options)
    make_private(ring_directory())  # raises here what would leave the engine unobserved
    if options.compare:
        return run_comparison(options)
    engine_id = f"demo-{os.getpid()}"
    duration_s = options.duration
    if duration_s is None and is_headless:
        duration_s = DEFAULT_SECONDS
    settings = Settings(
        model=options.model,
        seed=options.seed,
        duration_s=duration_s,
        load=options.load,
        rate_s=options.rate,
        options=demo_engine(options),
        client_times=str(options.out / "client.jsonl") if is_headless else None,
        reports_stages=True,
    )
    if is_headless:
        return _run_headless(settings, engine_id, options)
    return _run_screen(settings, engine_id, options)


def _run_headless(settings: Settings, engine_id: str, options: argparse.Namespace) -> int:
    host = Host(demo_command(settings), engine_id, stderr=None)
    try:
        ready = wait_until_ready(host)
        source = RingSource(
            _rings_of(engine_id),
            name=_title(ready),
            recording=RecordingWriter(options.out / "demo.isr"),
        )
        try:
            if not _watch(source, host):
                return _INTERRUPTED
            return _write_outputs(source, options)
        finally:
            source.close()
    finally:
        host.stop()


def wait_until_ready(host: Host, *, interval_s: float = _PROGRESS_S) -> Ready:
    """Wait for the load to begin; report each stage of the start, and the time every `interval_s`.

    Raises:
        EngineFailed: the engine did not start.
    """
    while host.ready is None:
        _report_progress(host.status)
        host.advance(interval_s)
    return host.ready


def _run_screen(settings: Settings, engine_id: str, options: argparse.Namespace) -> int:
    """Show the screen at once, and the engine's data as soon as it has started.

    Raises:
        EngineFailed: the engine did not start.
    """
    from inferscope.tui import InferScopeApp

    levels = levels_watch(options)

    def judged(ready: Ready) -> JudgedSource:
        rings = _rings_of(engine_id)
        return judged_source(
            lambda sinks, listen: RingSource(
                rings, name=_title(ready), sinks=sinks, listen=listen, keep=FOR_SCREEN
            ),
            levels,
        )

    # The engine's standard error would corrupt the screen: it is kept here until the screen closes.
    with tempfile.TemporaryFile() as stderr:
        source = DemoSource(lambda: Host(demo_command(settings), engine_id, stderr=stderr), judged)
        source.levels = levels
        app = InferScopeApp(source, ascii=options.ascii)
        source.when_failed = app.leave
        try:
            app.run()
        finally:
            source.stop()
            stderr.seek(0)
            sys.stderr.write(stderr.read().decode("utf-8", "replace"))
    if source.failure is not None:
        raise source.failure
    folder = ring_directory() / engine_id
    if folder.is_dir():  # otherwise the engine had not started
        sys.stdout.write(_next_steps_text(folder))
    return 0


def _next_steps_text(folder: Path) -> str:
    """Return the text that names a demo's rings and the commands that read them."""
    name, command = folder.name, own_command()
    num_bytes = sum(path.stat().st_size for path in folder.glob("*.ring"))
    return (
        f"The demo has ended. Its records stay in {folder} ({num_bytes / 1e6:.0f} MB) "
        "for a day. Next:\n"
        f"  {command} findings {name}    performance problems and fixes\n"
        f"  {command} shares {name}      device time by request\n"
        f"  {command} why rag- {name} --pick 1    where one request's time went\n"
        f"  {command} attach {name} --since -1m    the screen, over the last minute\n"
    )


def _rings_of(engine_id: str) -> Callable[[], Iterable[Path]]:
    folder = ring_directory() / engine_id
    return lambda: folder.glob("*.ring")


def _title(ready: Ready) -> str:
    return f"demo, about {ready.rate_s:.1f} requests/s"


def _check(options: argparse.Namespace) -> None:
    if options.load > 2:
        raise BadInput(f"--load is {options.load}. Give a share of the capacity, up to 2.")
    demo_engine(options)
    if options.compare:
        check_comparison(options)
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(
            f"cannot make the folder {options.out}: {error.strerror}. Choose another --out."
        ) from error


def _watch(source: RingSource, host: Host) -> bool:
    """Fold until the engine has exited and all its records are folded; return False if stopped.

    Raises:
        EngineFailed: the engine's process crashed, or served no request.
    """
    began_s = reported_s = time.monotonic()
    with stoppable() as stop:
        while not source.has_ended:
            if stop.stop_requested:
                return False
            now_s = time.monotonic()
            if now_s - reported_s >= _PROGRESS_S:
                reported_s = now_s
                _report_progress(_progress(source, now_s - began_s))
            if not source.advance() and not host.is_running and not source.collector.engines:
                break
            time.sleep(_POLL_S)
    code = host.exit_code()
    if code:
        raise EngineFailed(f"the demo's engine exited under load with code {code}.", 1)
    return True


def _report_progress(line: str) -> None:
    """Write a line of progress to standard error; standard output is for the result."""
    sys.stderr.write(f"demo: {line}\n")
    sys.stderr.flush()


def _progress(source: RingSource, elapsed_s: float) -> str:
    """Return a line on the run's progress."""
    lifecycles = [engine.lives for engine in source.collector.engines.values()]
    num_finished = sum(each.num_finished for each in lifecycles)
    num_alive = sum(len(each.table.alive()) for each in lifecycles)
    return f"{elapsed_s:.0f} s: {num_finished} requests finished, {num_alive} running"


def _write_outputs(source: RingSource, options: argparse.Namespace) -> int:
    """Export the recording and print the summary."""
    _report_progress("writing the files")
    source.close()
    source.collector.end()  # as a replay does at the end of the file
    recording = options.out / "demo.isr"
    with (
        private_file(options.out / "trace.json") as trace,
        private_file(options.out / "demo.jsonl") as lines,
    ):
        exporters = (load_exporter("perfetto")(trace), load_exporter("jsonl")(lines))
        watch = RunSummarizer()
        listeners = [watch, *(each for each in exporters if isinstance(each, Listening))]

        def listen(ring: int, record: Record) -> None:
            for each in listeners:
                each.on_record(ring, record)

        replayed = RecordingSource(recording, sinks=(*exporters, watch), listen=listen)
        replayed.advance()
        for exporter in exporters:
            exporter.close(replayed.collector.devices(), replayed.collector.totals())
        replayed.close()
    if replayed.collector.digest() != source.collector.digest():
        raise InferScopeError(f"{recording} replays to a digest other than the live one")
    snapshot = replayed.snapshot(300_000_000_000)
    if options.json:
        sys.stdout.write(json_of(snapshot))
        return 0
    from inferscope.text import once_text

    sys.stdout.write(once_text(snapshot, ascii=options.ascii) + "\n")
    brief = findings_brief(findings(watch))
    if brief:
        sys.stdout.write(
            f"\n{brief}{own_command()} findings {recording}  explains them and suggests fixes\n"
        )
    sys.stdout.write(
        f"\n{recording}  {own_command()} replay\n"
        f"{options.out / 'trace.json'}  open in ui.perfetto.dev\n"
        f"{options.out / 'demo.jsonl'}  every step and request\n"
    )
    return 0
