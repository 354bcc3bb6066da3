"""Profile the kernels of a running engine by phase for a few seconds.

The engine's process runs the torch profiler for that time, at most 30 s. This slows the engine
down, and it stalls for a moment while the trace is written: clients will notice both. Profiling
only runs on request, one at a time. The engine must run on this machine, as this user and with the
probe loaded.
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

from inferscope.cli.arg_types import above_zero
from inferscope.cli.targets import engine_of
from inferscope.errors import InferScopeError, NotFound
from inferscope.foreign import printable
from inferscope.insight import (
    KERNEL,
    KernelTime,
    ProfileDocument,
    kernel_times,
    slowdown,
    stall_ns,
    steps_of,
    with_steps,
)
from inferscope.json_document import json_line
from inferscope.private import open_own, private_file
from inferscope.readers import Expansion
from inferscope.records import EngineInfo, Record, StepSlices, UnknownRecord, decode
from inferscope.ring import (
    EngineRings,
    Frame,
    RingFile,
    RingReader,
    error_path,
    request_path,
    send_request,
    trace_path,
    withdraw,
)

_PATIENCE_S = 120.0
"""Maximum time for the engine to write the trace, which can be a hundred megabytes."""
_POLL_S = 0.1
_COMPUTING = ("worker", "core")
"""Roles of processes that run a model, in the order of preference."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "target", nargs="?", help="pid or engine ID (default: the only running engine)"
    )
    parser.add_argument(
        "--seconds",
        type=above_zero,
        default=3.0,
        help="length of the profile in seconds, at most 30 (default: %(default)s)",
    )
    parser.add_argument(
        "--top", type=int, default=8, metavar="N", help="rows per phase (default: %(default)s)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("profile.json"), metavar="FILE",
        help="trace with the engine's steps, for ui.perfetto.dev (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.epilog = """examples:
  inferscope profile                       the only running engine, for 3 s
  inferscope profile 41233 --seconds 10 --out slow.json
"""


def run(options: argparse.Namespace) -> int:
    """Request a profile, wait for the trace and print the table."""
    engine = engine_of(options.target)
    now_ns = time.monotonic_ns()
    ring = _computing(engine, now_ns)
    pid = ring.identity.pid
    if ring.owner != os.geteuid():
        raise InferScopeError(
            f"pid {pid} belongs to uid {ring.owner}. Run as the user that runs the engine."
        )
    try:
        request = send_request(ring.path, options.seconds)
    except OSError as error:
        raise InferScopeError(
            f"cannot request a profile of pid {pid}: {error}. Run as the user that runs the engine."
        ) from error
    sys.stderr.write(f"profiling pid {pid} for {options.seconds:g} s, which slows it down\n")
    try:
        trace = _wait_for_trace(ring, options.seconds)
    except BaseException:  # Ctrl-C too
        withdraw(ring.path, request)
        raise
    steps = steps_of(step_records(ring, engine, now_ns), trace)
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
            sys.stdout.write(f"cost of profiling: step time {cost:+.0%} while it ran\n")
        if stopped_ns is not None:
            stopped_ms = stopped_ns / 1e6
            sys.stdout.write(f"longest step, while the trace was written: {stopped_ms:.0f} ms\n")
        sys.stdout.write(f"trace: {options.out} (open it in ui.perfetto.dev)\n")
    return 0


def _computing(engine: EngineRings, now_ns: int) -> RingFile:
    """Return the ring of the process that runs the model; of several, the one of lowest rank."""
    alive = [ring for ring in engine.rings if ring.is_alive(now_ns)]
    for role in _COMPUTING:
        found = [ring for ring in alive if ring.identity.role == role]
        if found:
            return min(found, key=lambda ring: ring.identity.rank)
    raise NotFound(f"{engine.engine_id} has no running process that runs a model.")


def _wait_for_trace(ring: RingFile, seconds: float) -> dict[str, Any]:
    """Wait for the trace, read it and delete its file.

    Raises:
        InferScopeError: the process wrote no trace; the error gives the reason.
    """
    until_s = time.monotonic() + seconds + _PATIENCE_S
    trace, failed = trace_path(ring.path), error_path(ring.path)
    while request_path(ring.path).exists():
        if time.monotonic() > until_s:
            raise InferScopeError(
                f"pid {ring.identity.pid} does not respond. Is it hung, or an older version?"
            )
        time.sleep(_POLL_S)
    try:
        if (written := _own_content(failed)) is not None:
            reason = printable(written.decode("utf-8", "replace"))
            raise InferScopeError(f"no profile was made: {reason}")
        content = _own_content(trace)
    except OSError as error:
        raise InferScopeError(f"cannot read the profile: {error}.") from error
    if content is None:
        raise InferScopeError(
            f"no profile was made, and the reason could not be written to {trace.parent}. "
            "Is the disk full?"
        )
    trace.unlink()
    found: dict[str, Any] = msgspec.json.decode(content, type=dict[str, Any])
    return found


def _own_content(path: Path) -> bytes | None:
    """Return the content of a regular file of this user; None if it does not exist.

    Raises:
        OSError: the file is unreadable, a link or a pipe, or belongs to another user.
    """
    try:
        with os.fdopen(open_own(path, os.O_RDONLY), "rb") as file:
            return file.read()
    except FileNotFoundError:
        return None


def step_records(ring: RingFile, engine: EngineRings, now_ns: int) -> Iterator[Record]:
    """Yield the records that describe a process's steps and the slices in them.

    These are all records of its own ring, and the slices of the engine's other rings of the same
    replica: each replica counts its own steps, and each rank has its own spans.

    Args:
        ring: ring of the process.
        engine: rings of its engine.
        now_ns: time at which they were found; processes that had exited by then are left out.
    """
    own = list(_records(ring))
    yield from own
    for other in engine.rings:
        if other.path != ring.path and other.is_alive(now_ns):
            records = list(_records(other))
            if _replica(records) == _replica(own):
                yield from (record for record in records if isinstance(record, StepSlices))


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
    """Yield the longest kernels of each phase, or the longest operations if there are none."""
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
