"""Look at the kernels of a running engine for a few seconds: which, in which phase, for how long.

The observed process runs torch's own profiler meanwhile, which slows it down while it lasts, and
stands still for moments afterwards, while the trace is made: clients will notice. It is never on by
itself, one at a time, 30 s at most. The engine must have been started with the probe in it, on this
machine, by this user.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from inferscope.cli.numbers import above_zero
from inferscope.cli.targets import engine_of
from inferscope.collector.expansion import Expansion
from inferscope.errors import InferScopeError, NotFound
from inferscope.foreign import printable
from inferscope.json_document import json_line
from inferscope.private import open_own, private_file
from inferscope.records import EngineInfo, Record, StepSlices, UnknownRecord, decode
from inferscope.report.kernels import (
    KERNEL,
    KernelTime,
    ProfileDocument,
    kernel_times,
    slowdown,
    stall_ns,
    steps_of,
    with_steps,
)
from inferscope.ring.discovery import EngineRings, RingFile
from inferscope.ring.profile_request import (
    error_path,
    request_path,
    send_request,
    trace_path,
    withdraw,
)
from inferscope.ring.reader import Frame, RingReader

_PATIENCE_S = 120.0
"""For writing the trace, of which a busy engine makes a hundred megabytes."""
_LOOK_S = 0.1
_COMPUTING = ("worker", "core")
"""Roles of processes that run a model, the likelier first."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("target", nargs="?", help="pid or engine id (default: the only engine)")
    parser.add_argument(
        "--seconds", type=above_zero, default=3.0, help="to record, 30 at most (%(default)s)"
    )
    parser.add_argument("--top", type=int, default=8, help="rows per phase (%(default)s)")
    parser.add_argument(
        "--out", type=Path, default=Path("profile.json"),
        help="trace with our steps in it, for ui.perfetto.dev (%(default)s)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.epilog = """examples:
  inferscope profile                       the only engine here, for 3 s
  inferscope profile 41233 --seconds 10 --out slow.json
"""


def run(options: argparse.Namespace) -> int:
    """Ask, wait, print."""
    engine = engine_of(options.target)
    now_ns = time.monotonic_ns()
    ring = _computing(engine, now_ns)
    pid = ring.identity.pid
    if ring.owner != os.geteuid():
        raise InferScopeError(
            f"pid {pid} is of uid {ring.owner}. Run as the user that runs the engine."
        )
    try:
        request = send_request(ring.path, options.seconds)
    except OSError as error:
        raise InferScopeError(
            f"cannot ask pid {pid}: {error}. Run as the user that runs the engine."
        ) from error
    sys.stderr.write(f"profiling pid {pid} for {options.seconds:g} s: it is slower meanwhile\n")
    try:
        trace = _answer(ring, options.seconds)
    except BaseException:  # Ctrl-C too
        withdraw(ring.path, request)
        raise
    steps = steps_of(told_of(ring, engine, now_ns), trace)
    rows, cost, stopped_ns = (
        kernel_times(trace, steps),
        slowdown(trace, steps),
        stall_ns(trace, steps),
    )
    with private_file(options.out) as file:
        file.write(msgspec.json.encode(with_steps(trace, steps)))
    if options.json:
        document = ProfileDocument(
            pid=pid, trace=str(options.out), slowdown=cost, stall_ns=stopped_ns, rows=tuple(rows)
        )
        sys.stdout.write(json_line(document))
    else:
        sys.stdout.writelines(f"{line}\n" for line in _lines(rows, options.top))
        if cost is not None:
            sys.stdout.write(f"what it cost: steps took {cost:+.0%} while it ran\n")
        if stopped_ns is not None:
            stopped_ms = stopped_ns / 1e6
            sys.stdout.write(f"and the longest, while the trace was made, {stopped_ms:.0f} ms\n")
        sys.stdout.write(f"trace: {options.out} (open it in ui.perfetto.dev)\n")
    return 0


def _computing(engine: EngineRings, now_ns: int) -> RingFile:
    """Return the ring of the process that runs the model: of several, the first rank's."""
    alive = [ring for ring in engine.rings if ring.is_alive(now_ns)]
    for role in _COMPUTING:
        found = [ring for ring in alive if ring.identity.role == role]
        if found:
            return min(found, key=lambda ring: ring.identity.rank)
    raise NotFound(f"{engine.engine_id} has no process left that runs a model.")


def _answer(ring: RingFile, seconds: float) -> dict[str, Any]:
    """Wait for the trace, and take it.

    Raises:
        InferScopeError: there is none, with the reason.
    """
    until_s = time.monotonic() + seconds + _PATIENCE_S
    trace, failed = trace_path(ring.path), error_path(ring.path)
    while request_path(ring.path).exists():
        if time.monotonic() > until_s:
            raise InferScopeError(
                f"pid {ring.identity.pid} does not answer. Is it hung, or of an older version?"
            )
        time.sleep(_LOOK_S)
    try:
        if (said := _own_content(failed)) is not None:
            reason = printable(said.decode("utf-8", "replace"))
            raise InferScopeError(f"there is no profile: {reason}")
        content = _own_content(trace)
    except OSError as error:
        raise InferScopeError(f"cannot read the profile: {error}.") from error
    if content is None:
        raise InferScopeError(
            f"there is no profile: neither it nor the reason could be written to {trace.parent}. "
            "Is the disk full?"
        )
    trace.unlink()
    found: dict[str, Any] = msgspec.json.decode(content, type=dict[str, Any])
    return found


def _own_content(path: Path) -> bytes | None:
    """Return the content of a plain file of this user's; None if there is none.

    Raises:
        OSError: it cannot be read, is a link or a pipe, or another user's.
    """
    try:
        with os.fdopen(open_own(path, os.O_RDONLY), "rb") as file:
            return file.read()
    except FileNotFoundError:
        return None


def told_of(ring: RingFile, engine: EngineRings, now_ns: int) -> Iterator[Record]:
    """Yield what says which steps a process ran and what was in them.

    That is all of its own ring and, of the engine's others, the slices of the same replica: each
    replica counts its own steps, and each rank has spans of its own.

    Args:
        ring: of the process.
        engine: as it was found.
        now_ns: when that was: processes that were gone by then, and restarted, are left out.
    """
    own = list(_records(ring))
    yield from own
    for other in engine.rings:
        if other.path != ring.path and other.is_alive(now_ns):
            told = list(_records(other))
            if _replica(told) == _replica(own):
                yield from (record for record in told if isinstance(record, StepSlices))


def _replica(records: list[Record]) -> int:
    infos = (record for record in records if isinstance(record, EngineInfo))
    return next((info.ranks[2] for info in infos), 0)


def _records(ring: RingFile) -> Iterator[Record]:
    reader, expansion = RingReader(ring.path), Expansion()
    try:
        while frames := reader.read():
            for frame in frames:
                if isinstance(frame, Frame):
                    try:
                        record = decode(frame.code, frame.payload)
                    except UnknownRecord:
                        continue
                    yield from expansion.of(0, frame.sequence, record)
    finally:
        reader.close()


def _lines(rows: list[KernelTime], top: int) -> Iterator[str]:
    """Yield the longest of each phase: kernels where there are any, operations elsewhere."""
    kind = KERNEL if any(row.kind == KERNEL for row in rows) else "cpu_op"
    rows = [row for row in rows if row.kind == kind]
    for phase in dict.fromkeys(row.phase for row in rows):
        of_phase = [row for row in rows if row.phase == phase]
        whole_ns = sum(row.self_ns for row in of_phase) or 1
        yield f"{phase}: {whole_ns / 1e6:.1f} ms in {kind}s"
        for row in of_phase[:top]:
            share = row.self_ns / whole_ns
            took = f"{share:6.1%} {row.self_ns / 1e6:10.2f} ms {row.num_calls:>8} x"
            yield f"  {took}  {row.name[:80]}"
