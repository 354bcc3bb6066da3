"""A part of the kit: a program that measures one thing and leaves JSON, whatever happens.

What it finds is on disk row by row. A row that breaks is marked and the next one runs; a part that
is ended before its time leaves the rows that it had.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import platform
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from inferscope.sampler.cupti.library import PROFILERS

TINY = "random:hidden=128,layers=2,heads=4,kv_heads=2,ffn=256,vocab=512"
"""Stand-in of a dry run: its numbers mean nothing, but the same lines run."""
UNFINISHED = "unfinished"
_WHOLE = ""
"""The row that is the part itself."""
_LONGEST_REASON = 400
_KERNEL = Path("/proc/version")
_GVISOR = "#1 SMP Sun Jan 10 15:06:54 PST 2016"
"""Build string of gVisor's kernel, whatever its release."""


class Unmet(Exception):
    """What a part, or a row of it, needs is not here."""


class Bank:
    """What a part has found so far, on disk after every row.

    Attributes:
        rows: what was found, by name.
    """

    def __init__(self, path: Path | None = None) -> None:
        """Begin with nothing.

        Args:
            path: where to write; None keeps it in memory.
        """
        self.rows: dict[str, Any] = {}
        self._lines: dict[str, list[str]] = {}
        self._unmet: dict[str, str] = {}
        self._broken: dict[str, dict[str, str]] = {}
        self._path = path
        self._began_s = time.monotonic()

    def keep(self, name: str, row: Any, *lines: str) -> None:
        """Keep a row and its lines of the table; one of the same name is replaced."""
        self.rows[name] = row
        self._print(name, *lines)

    @contextmanager
    def row(self, name: str) -> Iterator[None]:
        """Measure a row of its own; a failure is recorded, and the next row runs."""
        try:
            yield
            return
        except Unmet as reason:
            self._unmet[name] = str(reason)
            if name:
                self._print(f"{name} unmet", f"{name}: {reason}")
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"[:_LONGEST_REASON]
            self._broken[name] = {"reason": reason, "trace": traceback.format_exc()}
            if name:
                self._print(f"{name} failed", f"{name}: FAILED, {reason}")
        release()  # what a broken row held would be missing in the next one

    def finish(self, done: str) -> dict[str, Any]:
        """Write what there is as the part's result, and return it.

        Args:
            done: the status of a part of which nothing broke.
        """
        status, reason = done, self._unmet.get(_WHOLE, "")
        if self._broken:
            status = "failed"
            reason = "; ".join(_named(name, row["reason"]) for name, row in self._broken.items())
        elif not self.rows:
            status = "unmet"
            reason = "; ".join(_named(name, why) for name, why in self._unmet.items())
        return self._write(status, reason)

    def _print(self, name: str, *lines: str) -> None:
        self._lines[name] = list(lines)
        for line in lines:
            print(line, flush=True)
        self._write(UNFINISHED, "")

    def _write(self, status: str, reason: str) -> dict[str, Any]:
        result = {
            "status": status,
            "reason": reason,
            "took_s": round(time.monotonic() - self._began_s, 1),
            "rows": self.rows,
            "unmet": self._unmet,
            "broken": self._broken,
            "lines": [line for lines in self._lines.values() for line in lines],
        }
        written: dict[str, Any] = known(result)
        if self._path is not None:
            # In one go: a part may be killed at any time, and half a file would lose all of it.
            beside = self._path.with_suffix(".new")
            beside.write_text(json.dumps(written, indent=1, default=float) + "\n", encoding="utf-8")
            os.replace(beside, self._path)
        return written


@dataclass(frozen=True)
class Setting:
    """What a part was asked for.

    Attributes:
        device: cuda:0, or cpu in a dry run.
        model: whose steps are measured.
        seconds: to take, about.
        is_dry: to try the lines, not the device.
        pm_despite: programs that could hold the device's counters and, as the user says, do not.
    """

    device: str
    model: str
    seconds: float
    is_dry: bool
    pm_despite: tuple[str, ...] = ()

    @property
    def is_cuda(self) -> bool:
        """Return whether there is a GPU to measure."""
        return self.device.startswith("cuda")

    def need_gpu(self) -> None:
        """Skip a part whose results mean nothing without a GPU.

        Raises:
            Unmet: there is none.
        """
        if not (self.is_cuda and torch.cuda.is_available()):
            raise Unmet("needs an NVIDIA GPU")


def is_gvisor(version: Path = _KERNEL) -> bool:
    """Return whether the kernel is gVisor's: its build string is always the same."""
    try:
        return _GVISOR in version.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False


def need_counters() -> None:
    """Leave a row that needs the device's performance counters where the kernel hides them.

    Raises:
        Unmet: this is gVisor.
    """
    if is_gvisor():
        raise Unmet(f"gVisor (uname -r {platform.release()}) hides the device's counters")


Measure = Callable[[Setting, Bank], None]


def main(measure: Measure, about: str) -> int:
    """Run a part as a program; 1 if it or a row of it failed."""
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--model", default="random:llama-8b")
    parser.add_argument("--seconds", type=float, default=60.0, help="to take, about")
    parser.add_argument("--dry-run", action="store_true", help="a tiny model, for two seconds")
    parser.add_argument("--out", type=Path, help="write the numbers here as JSON")
    parser.add_argument(
        "--pm-despite", action="append", choices=PROFILERS, default=[], metavar="NAME",
        help="a program that could hold the device's counters and does not; once per program",
    )  # fmt: skip
    options = parser.parse_args()
    despite = tuple(options.pm_despite)
    setting = Setting(options.device, options.model, options.seconds, False, despite)
    if options.dry_run:
        setting = Setting(options.device, TINY, min(options.seconds, 2.0), True, despite)
    signal.signal(signal.SIGTERM, _leave)
    result = run(measure, setting, Bank(options.out))
    if result["reason"]:
        print(f"{result['status']}: {result['reason']}", flush=True)
    return int(result["status"] == "failed")


def run(measure: Measure, setting: Setting, bank: Bank) -> dict[str, Any]:
    """Run a part to its end; return its result."""
    with bank.row(_WHOLE):
        measure(setting, bank)
    return bank.finish("dry" if setting.is_dry else "measured")


def release() -> None:
    """Free the device memory that is no longer referenced."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def shown(number: float | None, form: str) -> str:
    """Return a number for the table, `-` for an unknown one."""
    return "-" if number is None else format(number, form)


def known(value: Any) -> Any:
    """Return a value with None for numbers that are none: JSON has no NaN."""
    if isinstance(value, dict):
        return {name: known(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [known(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _named(name: str, reason: str) -> str:
    return f"{name}: {reason}" if name else reason


def _leave(number: int, frame: FrameType | None) -> None:
    """End by way of everything that is open: samplers and Nsight Compute end with the part."""
    sys.exit(128 + number)
