"""Option `--counters`, and the sampler process that commands with the option start."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping

from inferscope.records import SAMPLER_ROLE
from inferscope.ring import EngineRings, find_rings, reading_from
from inferscope.sampler import AUTO, SOURCES, has_nvidia

OFF = "off"


def add_counters_option(group: argparse._ArgumentGroup | argparse.ArgumentParser) -> None:
    """Add the option to a command that can start a sampler."""
    group.add_argument(
        "--counters",
        type=parse_counters,
        metavar="LIST",
        help=f"hardware counters to sample: auto, off, or a list of {', '.join(SOURCES)} "
        "(default: auto with an NVIDIA driver, else off)",
    )


def parse_counters(text: str) -> tuple[str, ...]:
    """Parse the option's value: names of sources; `off` stands for none.

    Raises:
        argparse.ArgumentTypeError: a source does not exist.
    """
    return () if text == OFF else parse_sources(text)


def parse_sources(text: str) -> tuple[str, ...]:
    """Parse a list of sources; `auto` stands for the sources without measurable cost.

    Raises:
        argparse.ArgumentTypeError: a source does not exist.
    """
    found: list[str] = []
    for name in text.split(","):
        if name != "auto" and name not in SOURCES:
            raise argparse.ArgumentTypeError(
                f"unknown counter source {name!r}: give auto or a list of {', '.join(SOURCES)}"
            )
        found += AUTO if name == "auto" else [name]
    return tuple(dict.fromkeys(found))


def sampler_hint(engine: EngineRings) -> str | None:
    """Return the command that starts a sampler for an engine; None if one runs or has no source.

    Commands that only read start no sampler: it may need privileges and may load the device.
    """
    now_ns = time.monotonic_ns()
    if not has_nvidia() or not engine.is_alive(now_ns):
        return None
    folder = engine.rings[0].path.parent.parent
    folders = [each / SAMPLER_ROLE for each in {folder, *reading_from(folder)}]
    if any(ring.is_alive(now_ns) for ring in find_rings(*folders)):
        return None
    return f"inferscope sampler --for {engine.engine_id} --dir {folder}"


def default_sources(sources: tuple[str, ...] | None) -> tuple[str, ...]:
    """Return the given sources; for None, the free sources if there is an NVIDIA driver."""
    return (AUTO if has_nvidia() else ()) if sources is None else sources


def start_sampler(
    sources: tuple[str, ...] | None,
    options: Iterable[str] = (),
    environment: Mapping[str, str] | None = None,
) -> None:
    """Start a sampler that exits with this process, also after this process executes a command.

    The sampler is detached from this process: a command executed in its place does not expect a
    child process, and may count its children or wait for any of them.

    Args:
        sources: counter sources; None for the default.
        options: further options of the sampler's command line.
        environment: variables added to this process's environment.
    """
    sources = default_sources(sources)
    if not sources:
        return
    argv = [
        sys.executable, "-m", "inferscope", "sampler",
        "--counters", ",".join(sources), "--beside", str(os.getpid()), *options,
    ]  # fmt: skip
    go_between = os.fork()
    if go_between:
        os.waitpid(go_between, 0)
        return
    try:
        subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, **(environment or {})},
        )
    finally:
        os._exit(0)
