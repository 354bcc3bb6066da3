"""Explain where one request's time went, and which requests it waited for.

REQUEST is the engine's ID of the request, the client's (X-Request-Id), or the beginning of either.
Without a source the command searches all rings on this host, including those of engines that were
killed. With objectives it also explains why one was missed, what would have met it, and how the
request compares with requests that met it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from pathlib import Path

from inferscope.attribution import LatencyLimit, Metric
from inferscope.cli.arg_types import latency_ns
from inferscope.cli.targets import engine_of, path_of, refuse_if_closed
from inferscope.cli.terminal import can_draw
from inferscope.errors import BadInput, NotFound
from inferscope.foreign import one_line
from inferscope.insight import RequestSource
from inferscope.probe import digits
from inferscope.readers import RequestRef, matching, open_source
from inferscope.ring import EngineRings, find_engines, names_of, search_directories
from inferscope.slo import read_objectives
from inferscope.text import report_json, report_lines, why
from inferscope.text.plots import plain

_WIDTH = 100
_MAX_LISTED = 20


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("request", metavar="REQUEST", help="request ID, or the beginning of one")
    parser.add_argument(
        "source",
        nargs="?",
        metavar="FILE|DIR|PID|ID",
        help="recording, ring or folder, or an engine's pid or ID (default: all rings here)",
    )
    parser.add_argument(
        "--pick", type=int, metavar="N", help="select the Nth of several matching requests"
    )
    slo = parser.add_argument_group("objectives: explain a missed one; TIME is such as 500ms or 2s")
    slo.add_argument(
        "--ttft",
        type=latency_ns,
        metavar="TIME",
        help="maximum time to first token (default: none)",
    )
    slo.add_argument(
        "--tbt", type=latency_ns, metavar="TIME", help="maximum time between tokens (default: none)"
    )
    slo.add_argument(
        "--tpot",
        type=latency_ns,
        metavar="TIME",
        help="maximum mean time per token after the first",
    )
    slo.add_argument(
        "--e2e", type=latency_ns, metavar="TIME", help="maximum time to last token (default: none)"
    )
    slo.add_argument(
        "--slo", type=Path, metavar="FILE", help="file of SLO objectives; uses those of the model"
    )
    how = parser.add_argument_group("output")
    how.add_argument("--json", action="store_true", help="print the report and its facts as JSON")
    how.add_argument("--ascii", action="store_true", help="draw with plain characters")
    parser.epilog = """examples:
  inferscope why chat-0017                  a client's request ID
  inferscope why chatcmpl-4f demo.isr       the beginning of an ID, in a recording
  inferscope why chat-0017 --ttft 500ms     and why its first token was late
"""


def run(options: argparse.Namespace) -> int:
    """Explain the request."""
    if not options.request:
        raise BadInput("REQUEST is empty. Give a request ID, or the beginning of one.")
    promised = None if options.slo is None else read_objectives(options.slo)
    source = request_source_of(options.source)
    refs = source.refs(options.request)
    found = matching(refs, options.request)
    if not found:  # the records may hold its ID as a digest only
        hidden = digits(options.request)
        refs = source.refs(hidden)
        found = matching(refs, hidden)
    ref = _chosen(found, options, source.name)
    facts = source.facts(ref, refs, objectives=_objectives(options), promised=promised)
    for note in source.notes:
        sys.stderr.write(f"inferscope: {options.source}: {one_line(note)}\n")
    report = why(facts)
    if options.json:
        sys.stdout.write(report_json(report, facts))
        return 0
    width = shutil.get_terminal_size((_WIDTH, 40)).columns
    colour = can_draw() and not os.environ.get("NO_COLOR")
    sys.stdout.write(report_lines(report, width=width, colour=colour, ascii=options.ascii))
    return 0


def _objectives(options: argparse.Namespace) -> tuple[LatencyLimit, ...]:
    asked: list[tuple[Metric, int | None]] = [
        ("ttft", options.ttft),
        ("tbt", options.tbt),
        ("tpot", options.tpot),
        ("e2e", options.e2e),
    ]
    return tuple(
        LatencyLimit(metric, limit_ns) for metric, limit_ns in asked if limit_ns is not None
    )


def request_source_of(target: str | None, *, refit: bool = False) -> RequestSource:
    """Return the source of requests that a target names.

    Args:
        target: target as given on the command line.
        refit: whether the final cost models of a file or folder price all its steps.

    Raises:
        NotFound: the target does not exist.
        UnreadableFile: the target's file cannot be read.
    """
    if target is None:
        engines = find_engines()
        if not engines:
            refuse_if_closed(None)
        return RequestSource(f"the rings under {names_of(search_directories())}", engines=engines)
    path = path_of(target)
    if path is None:
        engine = engine_of(target)
        return RequestSource(f"the rings of {engine.engine_id}", engines=[engine])
    open_source(path).close()  # raises for an unreadable file
    again = path if refit else None
    if path.is_dir():
        return RequestSource(f"the rings under {path}", engines=find_engines(path), refit=again)
    if path.suffix != ".ring":
        return RequestSource(str(path), recording=path, refit=again)
    one = [
        EngineRings(engine.engine_id, tuple(ring for ring in engine.rings if ring.path == path))
        for engine in find_engines(path.parent)
    ]
    return RequestSource(str(path), engines=one, refit=again)


def _chosen(refs: list[RequestRef], options: argparse.Namespace, where: str) -> RequestRef:
    """Return the request that the options select.

    Raises:
        NotFound: no request matches.
        BadInput: several match and --pick is missing, or --pick is out of range.
    """
    name: str = options.request
    pick: int | None = options.pick
    if not refs:
        what_to_do = (
            "`inferscope attach` shows the IDs; give a recording or a folder of rings after the ID"
            " to search it."
            if options.source is None
            else f"`inferscope shares {plain(options.source)}` lists the IDs."
        )
        raise NotFound(f"no request ID begins with {plain(name)} in {where}. {what_to_do}")
    if pick is not None:
        if not 1 <= pick <= len(refs):
            matches = "1 request matches" if len(refs) == 1 else f"{len(refs)} requests match"
            raise BadInput(f"--pick is {pick}, but {matches} {plain(name)}.")
        return refs[pick - 1]
    if len(refs) == 1:
        return refs[0]
    for number, ref in enumerate(refs[:_MAX_LISTED], 1):
        sys.stderr.write(f"  {number:>3}  {_line(ref)}\n")
    if len(refs) > _MAX_LISTED:
        sys.stderr.write(f"       … and {len(refs) - _MAX_LISTED} older ones\n")
    raise BadInput(f"{len(refs)} requests match {plain(name)}. Give more of the ID, or --pick N.")


def _line(ref: RequestRef) -> str:
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(ref.first_real_ns // 1_000_000_000))
    names = plain(ref.request_id if ref.external_id is None else ref.external_id)
    if ref.external_id is not None:
        names += f" ({plain(ref.request_id)})"
    return f"{at}  {names}  {ref.finish or 'not finished'}  {plain(ref.engine_id)}"
