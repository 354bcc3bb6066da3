"""Say what this machine allows, and for each thing that is missing the exact way to get it."""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import shutil
import sys
import time
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

import msgspec

from inferscope import __version__
from inferscope.errors import InferScopeError
from inferscope.ring.discovery import find_engines, make_private, ring_directory

_EXTRAS = {
    "reader": ("numpy", "attach, record, replay, export"),
    "tui": ("textual", "the live screen"),
    "engine": ("torch", "the reference engine and the demo"),
    "prometheus": ("prometheus_client", "what collect serves"),
}
_ENGINES = ("vllm", "sglang", "transformers", "llama_cpp")
_MEGABYTE = 1 << 20


@dataclass(frozen=True)
class Finding:
    """One thing looked at; `fix` is what to do where it is not as it should be."""

    name: str
    is_fine: bool
    found: str
    fix: str = ""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Look around and print what was found."""
    findings = examine()
    if options.json:
        rows = [asdict(finding) for finding in findings]
        sys.stdout.write(msgspec.json.encode(rows).decode() + "\n")
        return 0
    for finding in findings:
        mark = "ok" if finding.is_fine else "--"
        sys.stdout.write(f"{mark}  {finding.name:<14} {finding.found}\n")
        if finding.fix:
            sys.stdout.write(f"    {'':<14} → {finding.fix}\n")
    return 0


def examine() -> list[Finding]:
    """Return what this machine allows."""
    cores = len(os.sched_getaffinity(0))
    return [
        Finding("inferscope", True, f"{__version__}, Python {platform.python_version()}"),
        Finding("machine", True, f"{platform.system()} {platform.release()}, {cores} cores"),
        _rings(),
        _running(),
        *(_extra(name, module, use) for name, (module, use) in _EXTRAS.items()),
        _gpu(),
        *_engines(),
    ]


def _rings() -> Finding:
    folder = ring_directory()
    try:
        make_private(folder)
        free_mb = shutil.disk_usage(folder).free // _MEGABYTE
    except (InferScopeError, OSError) as error:
        return Finding("ring folder", False, str(error))
    found = f"{folder}, {free_mb} MB free"
    if free_mb < 256:
        return Finding("ring folder", False, found, "set INFERSCOPE_DIR to a folder with more room")
    return Finding("ring folder", True, found)


def _running() -> Finding:
    now_ns = time.monotonic_ns()
    engines = [engine for engine in find_engines() if engine.is_alive(now_ns)]
    if not engines:
        return Finding("engines", True, "none observed here now", "start one: inferscope demo")
    pids = ", ".join(str(pid) for engine in engines for pid in engine.pids)
    return Finding("engines", True, f"{len(engines)} observed now (pid {pids})")


def _extra(name: str, module: str, use: str) -> Finding:
    if importlib.util.find_spec(module) is None:
        fix = f'pip install "inferscope[{name}]"'
        return Finding(f"extra {name}", False, f"not installed: no {use}", fix)
    return Finding(f"extra {name}", True, use)


def _gpu() -> Finding:
    if not Path("/proc/driver/nvidia/version").exists():
        found = "no NVIDIA driver: steps are timed by the host's clock, SM and HBM columns show -"
        return Finding("GPU", False, found)
    text = Path("/proc/driver/nvidia/version").read_text(encoding="ascii", errors="replace")
    found = f"{text.splitlines()[0].strip()}; its counters are not read yet: SM and HBM show -"
    return Finding("GPU", True, found)


def _engines() -> list[Finding]:
    found = []
    for name in _ENGINES:
        if importlib.util.find_spec(name) is not None:
            try:
                version = metadata.version(name.replace("_", "-"))
            except metadata.PackageNotFoundError:
                version = "version unknown"
            found.append(Finding(name, True, version))
    return found
