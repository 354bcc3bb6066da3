"""Switch a running engine's probe on or off; takes effect within one step or 100 ms."""

from __future__ import annotations

import argparse
import sys
import time

from inferscope.cli.targets import engine_of
from inferscope.errors import InferScopeError, NotFound
from inferscope.foreign import one_line
from inferscope.ring import SWITCHED_OFF, SWITCHED_ON, RingFile, control_path, switch


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "target", nargs="?", help="pid or engine ID (default: the only running engine)"
    )


def run(options: argparse.Namespace) -> int:
    """Set the control byte of every ring of the engine."""
    engine, now_ns = engine_of(options.target), time.monotonic_ns()
    if not engine.is_alive(now_ns):
        raise NotFound(
            f"{engine.engine_id} has ended: its probe cannot be switched {options.command}."
        )
    to = SWITCHED_ON if options.command == "on" else SWITCHED_OFF
    failures = []
    for ring in engine.rings:
        failed = _switch(ring, to)
        if failed is not None and ring.is_alive(now_ns):
            failures.append(f"{control_path(ring.path)}: {failed.strerror}")
    if failures:
        raise InferScopeError(
            f"cannot switch the probe: {', '.join(failures)}. Run as the user that runs the engine."
        )
    sys.stderr.write(f"{one_line(engine.engine_id)}: {options.command}\n")
    return 0


def _switch(ring: RingFile, to: int) -> OSError | None:
    try:
        switch(ring.path, to=to, owner=ring.owner)
    except OSError as error:
        return error
    return None
