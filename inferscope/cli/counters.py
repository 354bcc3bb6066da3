"""The option `--counters`, and starting a sampler beside a command that has it."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping

from inferscope.counters.source import AUTO, SOURCES, has_nvidia
from inferscope.records import SAMPLER_ROLE
from inferscope.ring.discovery import EngineRings, find_rings, reading_from

OFF = "off"


def add_counters_option(group: argparse._ArgumentGroup | argparse.ArgumentParser) -> None:
    """Add the option to a command that can start a sampler."""
    group.add_argument(
        "--counters",
        type=counted,
        metavar="LIST",
        help=f"hardware counters: auto, off, or some of {', '.join(SOURCES)} "
        "(default: auto where there is an NVIDIA driver, else off)",
    )


def counted(text: str) -> tuple[str, ...]:
    """Read the option: sources by name, none for off.

    Raises:
        argparse.ArgumentTypeError: there is no such source.
    """
    return () if text == OFF else sampled_sources(text)


def sampled_sources(text: str) -> tuple[str, ...]:
    """Read a list of sources; `auto` stands for those that cost nobody anything.

    Raises:
        argparse.ArgumentTypeError: there is no such source.
    """
    found: list[str] = []
    for word in text.split(","):
        if word != "auto" and word not in SOURCES:
            raise argparse.ArgumentTypeError(
                f"{word!r} is no source of counters: give auto or some of {', '.join(SOURCES)}"
            )
        found += AUTO if word == "auto" else [word]
    return tuple(dict.fromkeys(found))


def how_to_sample(engine: EngineRings) -> str | None:
    """Return what starts a sampler for an engine; None where one runs or could tell nothing.

    Whoever only looks on starts nothing that may need rights, or that the device would feel.
    """
    now_ns = time.monotonic_ns()
    if not has_nvidia() or not engine.is_alive(now_ns):
        return None
    folder = engine.rings[0].path.parent.parent
    folders = [each / SAMPLER_ROLE for each in {folder, *reading_from(folder)}]
    if any(ring.is_alive(now_ns) for ring in find_rings(*folders)):
        return None
    return f"inferscope sampler --for {engine.engine_id} --dir {folder}"


def usual(sources: tuple[str, ...] | None) -> tuple[str, ...]:
    """Return what is sampled; of nothing said, what costs nobody anything where there is a GPU."""
    return (AUTO if has_nvidia() else ()) if sources is None else sources


def sample_beside(
    sources: tuple[str, ...] | None,
    options: Iterable[str] = (),
    environment: Mapping[str, str] | None = None,
) -> None:
    """Start a sampler that ends with this process, whatever that becomes; None: as usual here.

    It is nobody's child: a command that this process becomes does not expect one, and some count
    theirs, or wait for any of them.

    Args:
        sources: to sample.
        options: of its command line.
        environment: what its environment has beside this process's own.
    """
    sources = usual(sources)
    if not sources:
        return
    words = [
        sys.executable, "-m", "inferscope", "sampler",
        "--counters", ",".join(sources), "--beside", str(os.getpid()), *options,
    ]  # fmt: skip
    go_between = os.fork()
    if go_between:
        os.waitpid(go_between, 0)
        return
    try:
        subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, **(environment or {})},
        )
    finally:
        os._exit(0)
