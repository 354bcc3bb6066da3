"""Switch an engine's probe on or off without touching the engine: within a step or 100 ms."""

from __future__ import annotations

import argparse
import sys
import time

from inferscope.cli.targets import engine_of
from inferscope.errors import InferScopeError, NotFound
from inferscope.ring.control import SWITCHED_OFF, SWITCHED_ON, switch


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("target", nargs="?", help="pid or engine id (default: the only engine)")


def run(options: argparse.Namespace) -> int:
    """Set the control byte of every ring of the engine."""
    engine = engine_of(options.target)
    if not engine.is_alive(time.monotonic_ns()):
        raise NotFound(
            f"{engine.engine_id} has ended: there is no probe left to switch {options.command}."
        )
    to = SWITCHED_ON if options.command == "on" else SWITCHED_OFF
    try:
        for ring in engine.rings:
            switch(ring.path, to=to)
    except OSError as error:
        raise InferScopeError(
            f"cannot switch the probe by {error.filename}: {error.strerror}. "
            "Run as the user that runs the engine."
        ) from error
    sys.stderr.write(f"{engine.engine_id}: {options.command}\n")
    return 0
