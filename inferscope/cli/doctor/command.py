"""Check this machine's capabilities and how to enable missing ones."""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import shutil
import sys
import time
from collections.abc import Iterator

from inferscope import __version__
from inferscope.adapters.needs import engines_of
from inferscope.calibration import stored
from inferscope.cli.doctor.device import Check, DoctorDocument, devices, tracing
from inferscope.cli.doctor.pod import pod
from inferscope.cli.run.target import (
    DISTRIBUTION,
    Unobservable,
    find_name_conflict,
    find_target,
    resolve_name_conflict,
    shim_of,
)
from inferscope.clock_skew import SkewedClock
from inferscope.errors import BadInput, InferScopeError
from inferscope.json_document import json_line
from inferscope.records import SAMPLER_ROLE
from inferscope.ring import (
    closed_under,
    find_engines,
    find_rings,
    make_private,
    ring_directory,
    search_directories,
    why_closed,
)
from inferscope.sampler import has_nvidia

_EXTRAS = {
    "reader": ("numpy", "attach, record, replay, export"),
    "tui": ("textual", "the live screen"),
    "engine": ("torch", "the reference engine and the demo"),
    "load": ("aiohttp", "inferscope load"),
    "gpu": ("pynvml", "utilization, power, clocks and GPM of NVIDIA GPUs"),
    "prometheus": ("prometheus_client", "Prometheus metrics of collect"),
    "parquet": ("pyarrow", "Parquet files of collect and export"),
    "grpc": ("grpc", "request traces over gRPC, sent by collect"),
    "completion": ("shtab", "completion of commands and options in a shell"),
}
_MEGABYTE = 1 << 20


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--python",
        metavar="PROGRAM",
        help="Python interpreter or console script (such as vllm) of the environment to check for "
        "engines (default: this environment)",
    )


def run(options: argparse.Namespace) -> int:
    """Run all checks and print them."""
    checks = examine(options.python)
    if options.json:
        sys.stdout.write(json_line(DoctorDocument(checks=tuple(checks))))
        return 0
    for check in checks:
        mark = "ok" if check.is_fine else "--"
        sys.stdout.write(f"{mark}  {check.name:<14} {check.found}\n")
        if check.fix:
            lines = check.fix.replace("\n", f"\n{'':<21}")
            sys.stdout.write(f"    {'':<14} → {lines}\n")
    return 0


def examine(program: str | None = None) -> list[Check]:
    """Return all checks of this machine.

    Args:
        program: program of the environment to check for engines; None for this environment.

    Raises:
        BadInput: the program does not exist, or is not run by Python.
    """
    cores = len(os.sched_getaffinity(0))
    return [
        _installation(),
        Check("machine", True, f"{platform.system()} {platform.release()}, {cores} cores"),
        _rings(),
        *_searched(),
        *pod(os.environ, has_engine=any(map(_is_installed, ("vllm", "sglang")))),
        _running(),
        *_skewed(),
        _sampler(),
        *(_extra(name, module, use) for name, (module, use) in _EXTRAS.items()),
        *devices(stored(), num_threads=_threads()),
        *tracing(),
        *(_engines(sys.executable) if program is None else _other_environment(program)),
    ]


def _installation() -> Check:
    found = f"{__version__}, Python {platform.python_version()}"
    other = find_name_conflict(sys.executable, (), os.environ)
    if other is None:
        return Check("inferscope", True, found)
    found += f"; a package of another project with the same import name is installed: {other}"
    return Check("inferscope", False, found, resolve_name_conflict(sys.executable))


def _rings() -> Check:
    folder = ring_directory()
    try:
        line = make_private(folder)
        free_mb = shutil.disk_usage(folder).free // _MEGABYTE
    except (InferScopeError, OSError) as error:
        return Check("ring folder", False, str(error))
    found = f"{folder}, {free_mb} MB free"
    if free_mb < 256:
        return Check(
            "ring folder", False, found, "set INFERSCOPE_DIR to a folder with at least 256 MB free"
        )
    if line:
        found = f"{found}. {line}"
    return Check("ring folder", True, found)


def _searched() -> Iterator[Check]:
    """Yield the number of engines in each folder that readers search."""
    now_ns, own = time.monotonic_ns(), ring_directory()
    for folder in search_directories():
        if folder != own and not folder.is_dir():
            yield Check("searched", True, f"{folder}: does not exist")
            continue
        engines = find_engines(folder)
        num_alive = sum(engine.is_alive(now_ns) for engine in engines)
        found = f"{folder}: engines: {num_alive} running, {len(engines) - num_alive} ended"
        if folder == own:
            found += "; probes started with this environment write to it"
        yield Check("searched", True, found)


def _running() -> Check:
    now_ns = time.monotonic_ns()
    engines = [engine for engine in find_engines() if engine.is_alive(now_ns)]
    closed = next((path for each in search_directories() for path in closed_under(each)), None)
    if closed is not None:
        return Check("engines", False, f"{len(engines)} observed now", why_closed(closed))
    if not engines:
        return Check("engines", True, "none observed here now", "start one: inferscope demo")
    pids = ", ".join(str(pid) for engine in engines for pid in engine.pids)
    return Check("engines", True, f"{len(engines)} observed now (pid {pids})")


def _skewed() -> Iterator[Check]:
    """Yield the observed processes with a monotonic clock that differs from this process's."""
    now_ns = time.monotonic_ns()
    for ring in find_rings():
        if ring.skew_ns and ring.is_alive(now_ns):
            me = ring.identity
            skewed = SkewedClock(me.engine_id, me.role, me.rank, me.pid, ring.skew_ns)
            yield Check("clock", True, skewed.in_words())


def _sampler() -> Check:
    """Return whether a sampler reads this host's counters; without a GPU none is needed."""
    now_ns = time.monotonic_ns()
    folders = [folder / SAMPLER_ROLE for folder in search_directories()]
    found = [ring for ring in find_rings(*folders) if ring.is_alive(now_ns)]
    if found:
        pids = ", ".join(str(ring.identity.pid) for ring in found)
        return Check("sampler", True, f"running (pid {pids}): readers get hardware counters")
    fix = "inferscope sampler, or --counters auto of run, serve and collect; to see what it reads: "
    return Check("sampler", not has_nvidia(), "not running", f"{fix}inferscope sampler --once")


def _extra(name: str, module: str, use: str) -> Check:
    if not _is_installed(module):
        fix = f'pip install "{DISTRIBUTION}[{name}]"'
        return Check(f"extra {name}", False, f"not installed: no {use}", fix)
    return Check(f"extra {name}", True, use)


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False


def _other_environment(program: str) -> Iterator[Check]:
    """Yield whether another environment has inferscope, and its engines."""
    target = find_target([program], os.environ)
    if target.interpreter is None:
        raise BadInput(
            f"{target.program} is not a Python program. Give the Python interpreter that runs it."
        )
    try:
        shim_of(target, os.environ)
    except Unobservable as reason:
        yield Check("its Python", False, f"{target.interpreter}: {reason.problem}", reason.fix)
    else:
        yield Check("its Python", True, f"{target.interpreter}: imports inferscope")
    checks = list(_engines(target.interpreter))
    yield from checks or [Check("its engines", False, "no supported engine is installed there")]


def _engines(python: str) -> Iterator[Check]:
    """Yield the engines of an environment, and a line for each feature that one lacks."""
    for found in engines_of(python):
        engine, version = found.engine, found.version or "version unknown"
        observe = f"{version}; observe it with: {engine.observe}"
        yield Check(engine.package, found.is_observed, observe)
        for lack in found.lacks:
            yield Check(engine.package, False, f"unsupported: {lack}")


def _threads() -> set[int]:
    """Return the numbers of CPU threads of engines here: one, and OMP_NUM_THREADS if it is set."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    return {1, int(given)} if given.isdecimal() and int(given) else {1}
