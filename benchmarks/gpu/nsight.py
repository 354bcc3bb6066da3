"""Nsight Compute as a byte counter: its command line, its shutdown and its output table.

By default it empties the L2 cache before each kernel and locks the clocks, and then counts more
bytes than the kernels move in a step.
"""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from part import Unmet

METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum")
UNITS = {"byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9}
_HEAD = ("Metric Name", "Metric Unit", "Metric Value")
_KERNEL = ("Kernel Name", "Grid Size")
_LONGEST_NAME = 60
_PROFILED = b"==PROF== Profiling"
_COMMAND = (
    "--metrics", ",".join(METRICS), "--csv", "--print-units", "base", "--cache-control", "none",
    "--clock-control", "none", "--profile-from-start", "off",
)  # fmt: skip


class KernelBytes(NamedTuple):
    """Bytes that all launches of one kernel with one grid moved."""

    num: int
    read_bytes: float
    write_bytes: float


class Counted(NamedTuple):
    """What all kernels of a step moved."""

    num_kernels: int
    read_bytes: float
    write_bytes: float
    by_kernel: dict[str, KernelBytes]
    """Bytes by name and grid, by which products differ; most bytes first."""


def find_ncu(root: Path = Path("/")) -> str | None:
    """Return where Nsight Compute is: images have it beside CUDA, not always on PATH.

    Args:
        root: under which to look; of several beside CUDA the newest, then of those alone.
    """
    found = shutil.which("ncu")
    if found is not None:
        return found
    for pattern in ("usr/local/cuda*/bin/ncu", "opt/nvidia/nsight-compute/*/ncu"):
        beside = [path for path in root.glob(pattern) if os.access(path, os.X_OK)]
        if beside:
            return str(max(beside, key=lambda path: _version(path.relative_to(root))))
    return None


def _version(path: Path) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", str(path))]


def count_step(model: str, phase: str, *, limit_s: float) -> tuple[Counted, dict[str, Any]]:
    """Count one step of a phase in a process of its own; return that and what the model says.

    Raises:
        Unmet: Nsight Compute is not here, takes too long, or tells nothing.
    """
    ncu = find_ncu()
    if ncu is None:
        raise Unmet("ncu is not installed here, neither on PATH nor where CUDA puts it")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "modelled")
        program = str(Path(__file__).with_name("one_step.py"))
        command = [ncu, *_COMMAND, sys.executable, program, model, phase, str(out)]
        with session(command) as process:
            try:
                text, words = process.communicate(timeout=limit_s)
            except subprocess.TimeoutExpired as late:
                # Its table comes at the end: of what it had counted by now it tells only the names.
                num_kernels = (late.stdout or b"").count(_PROFILED)
                raise Unmet(
                    f"ncu took longer than {limit_s:.0f} s, it had reported {num_kernels} kernels"
                ) from None
        try:
            counted = read_csv(text)
            modelled = json.loads(out.read_text(encoding="utf-8"))
        except (ValueError, OSError) as error:
            output = " ".join((words + text).split())[-300:]
            raise Unmet(f"{error}; ncu ended with {process.returncode}: {output}") from None
    return counted, modelled


@contextmanager
def session(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    """Run a command in a session of its own, and kill the whole session at the end.

    Killed by itself, Nsight Compute would leave what it profiles, and hold the device's counters.
    """
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace",
        env={**os.environ, "LC_ALL": "C"}, start_new_session=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


def read_csv(text: str) -> Counted:
    """Add up the table that `ncu --csv` prints among other lines, in all and by kernel.

    Raises:
        ValueError: it has no table, a unit or number that is none, or metrics of not as many
            kernels each.
    """
    lines = text.splitlines()
    begin = next((at for at, line in enumerate(lines) if f'"{_HEAD[0]}"' in line), len(lines))
    rows = csv.reader(lines[begin:])
    head = next(rows, [])
    if not set(head) >= set(_HEAD):
        raise ValueError("there is no table")
    name_at, unit_at, value_at = (head.index(word) for word in _HEAD)
    kernel_at = [head.index(word) for word in _KERNEL if word in head]
    found: dict[str, list[float]] = {metric: [] for metric in METRICS}
    kernels: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        if len(row) == len(head) and row[name_at] in found:
            moved = _bytes(row[value_at], row[unit_at])
            found[row[name_at]].append(moved)
            kernel = " ".join(row[at][:_LONGEST_NAME] for at in kernel_at)
            of_it = kernels.setdefault(kernel, {metric: [] for metric in METRICS})
            of_it[row[name_at]].append(moved)
    numbers = {metric: len(values) for metric, values in found.items()}
    if len(set(numbers.values())) > 1 or not all(numbers.values()):
        raise ValueError(f"the table has not each metric of every kernel: {numbers}")
    read, write = (sum(found[metric]) for metric in METRICS)
    by_kernel = {
        kernel: KernelBytes(len(of_it[METRICS[0]]), *(sum(of_it[metric]) for metric in METRICS))
        for kernel, of_it in kernels.items()
    }
    most_first = sorted(by_kernel.items(), key=lambda item: -sum(item[1][1:]))
    return Counted(len(found[METRICS[0]]), read, write, dict(most_first))


def _bytes(value: str, unit: str) -> float:
    if unit not in UNITS:
        raise ValueError(f"unit {unit!r} is none of {', '.join(UNITS)}")
    return float(value.replace(",", "")) * UNITS[unit]
