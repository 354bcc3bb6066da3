"""Measure what this device can do: memory, dense products by dtype, and the engine's step times.

Engines that start on the device afterwards begin with a cost model made of it, where they would
otherwise begin with the maker's figures or with guesses, until they have learned from their own
steps. Shares of what is possible can then be told as % of the maker's figures and % of measured
ones. The device should have nothing else to do meanwhile.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from inferscope.calibration import Calibration, store
from inferscope.cli.numbers import above_zero
from inferscope.cost.peaks import Peaks, peaks_of
from inferscope.engine.config import EngineOptions
from inferscope.engine.start import imports_that_stay
from inferscope.errors import BadInput, InferScopeError

_FLOAT8 = "float8_e4m3fn"  # as engine.ceilings calls it, which imports torch
_SHOWN_TOKENS = (1, 8, 64, 512)


class Rate(NamedTuple):
    """One measured rate beside the maker's; `share` is of that."""

    name: str
    measured: float
    maker: float | None
    unit: str

    @property
    def share(self) -> float | None:
        """Return the measured rate as a share of the maker's."""
        return None if self.maker is None else self.measured / self.maker


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "models", nargs="*", metavar="MODEL",
        help="whose steps to measure: builtin, random:SHAPE or a folder (default: builtin)",
    )  # fmt: skip
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda:0 (%(default)s)")
    parser.add_argument(
        "--threads", type=int, default=EngineOptions().num_threads,
        help="that compute, on a CPU: as many as the engine has (%(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--seconds", type=above_zero, default=20.0, help="to take, about (%(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.epilog = """examples:
  inferscope calibrate                     the CPU or the first GPU, and the built-in model
  inferscope calibrate random:llama-8b --device cuda:0 --seconds 60
"""


def run(options: argparse.Namespace) -> int:
    """Measure, keep and print."""
    if options.threads < 1:
        raise BadInput(f"--threads is {options.threads}. Give at least 1.")
    # It imports torch, for which no help should wait.
    with imports_that_stay():
        from inferscope.cli.calibrate_run import calibrate

    calibration = calibrate(
        options.models or ["builtin"],
        device=options.device,
        num_threads=options.threads,
        seconds=options.seconds,
    )
    try:
        path = store(calibration)
    except OSError as error:
        raise InferScopeError(
            f"cannot keep the calibration: {error}. Set INFERSCOPE_CACHE to a folder of your own."
        ) from error
    rates = rates_of(calibration)
    if options.json:
        sys.stdout.write(msgspec.json.encode(_told(calibration, rates, path)).decode() + "\n")
    else:
        sys.stdout.write("\n".join(_lines(calibration, rates, path)) + "\n")
    return 0


def rates_of(calibration: Calibration) -> list[Rate]:
    """Return the measured rates beside the maker's, where those are known."""
    peaks = peaks_of(calibration.device) if calibration.device_uuid else None
    peaks = peaks if peaks is not None and peaks.is_known else None
    memory = None if peaks is None else peaks.memory_bytes_s
    rates = [
        Rate("copy", calibration.copy_bytes_s, memory, "B/s"),
        Rate("read", calibration.read_bytes_s, memory, "B/s"),
    ]
    for dtype, flops_s in calibration.flops_s.items():
        rates.append(Rate(dtype, flops_s, _maker_s(peaks, dtype), "FLOP/s"))
    return rates


def _maker_s(peaks: Peaks | None, dtype: str) -> float | None:
    if peaks is None:
        return None
    if dtype in ("bfloat16", "float16"):
        return peaks.bf16_flops_s
    return peaks.fp8_flops_s if dtype == _FLOAT8 else None


def _told(calibration: Calibration, rates: list[Rate], path: Path) -> dict[str, object]:
    return {
        "calibration": calibration,
        "rates": [{**rate._asdict(), "share": rate.share} for rate in rates],
        "path": str(path),
    }


def _lines(calibration: Calibration, rates: list[Rate], path: Path) -> Iterator[str]:
    yield _device(calibration)
    for rate in rates:
        maker = (
            "-"
            if rate.share is None
            else f"{rate.share:.0%} of {_si(rate.maker or 0.0)}{rate.unit}"
        )
        yield f"  {rate.name:<14} {_si(rate.measured) + rate.unit:>14}   {maker}"
    yield f"  {'launch':<14} {calibration.launch_s * 1e6:>10.2f} µs/op"
    for table in calibration.steps:
        f, g = (
            ", ".join(
                f"{name}({num}) {table.coefficients[f'{name}_ns.{num}'] / 1e6:.2f} ms"
                for num in _SHOWN_TOKENS
            )
            for name in ("f", "g")
        )
        yield f"  {table.model}: {table.num_steps} steps, median model error {table.error:.1%}"
        yield f"    tokens  {f}"
        yield f"    rows    {g}"
    yield f"kept in {path}; engines that start on this device from now on begin with it"


def _device(calibration: Calibration) -> str:
    words = [calibration.device]
    if calibration.num_threads:
        words.append(f"{calibration.num_threads} threads")
    if calibration.device_uuid:
        words += [calibration.device_uuid, f"driver {calibration.driver}"]
    if calibration.clocks_mhz is not None:
        words.append("SM {} MHz, memory {} MHz at most".format(*calibration.clocks_mhz))
    return ", ".join(words)


def _si(rate: float) -> str:
    for prefix, factor in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if rate >= factor:
            return f"{rate / factor:.3g} {prefix}"
    return f"{rate:.3g} "
