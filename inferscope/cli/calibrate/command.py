"""Measure this device's memory bandwidth, matrix-product rates by dtype, and step times.

Engines that start on the device afterwards initialize their cost model with the measured rates.
Without a calibration they use the maker's figures or estimates until they have learned from their
own steps. Utilization is then shown as % of the maker's figures and % of the measured ones. Run it
while the device is otherwise idle.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from inferscope.calibration import Calibration, store
from inferscope.cli.arg_types import above_zero
from inferscope.cost import Peaks, peaks_of
from inferscope.engine import EngineOptions, imports_that_stay
from inferscope.errors import BadInput, InferScopeError
from inferscope.json_document import Document, json_line

_FLOAT8 = "float8_e4m3fn"  # as engine.ceilings calls it, which imports torch
_SHOWN_TOKENS = (1, 8, 64, 512)


class MemoryRate(msgspec.Struct, frozen=True):
    """One measured rate of the device's memory, with the peak rate."""

    name: str
    """Name of the measurement: copy or read."""
    measured_bytes_s: float
    """Measured rate."""
    peak_bytes_s: float | None
    """Peak by the device's maker; None where it is not known."""
    share: float | None
    """Measured share of the peak."""


class ComputeRate(msgspec.Struct, frozen=True):
    """One measured rate of dense matrix products, with the device's peak rate."""

    name: str
    """Data type of the matrices."""
    measured_flops_s: float
    """Measured rate."""
    peak_flops_s: float | None
    """Peak by the device's maker; None where it is not known."""
    share: float | None
    """Measured share of the peak."""


class StepTimes(msgspec.Struct, frozen=True):
    """Step times of the reference engine on one model, as a cost model."""

    model: str
    """Name of the model."""
    mode: str
    """Execution mode."""
    coefficients: dict[str, float]
    """Coefficients of the cost model; a name has its unit before the dot."""
    num_steps: int
    """Number of measured steps."""
    error: float
    """Median of |modelled / measured - 1| over the steps."""


class CalibrationDocument(Document, frozen=True, kw_only=True):
    """Rates and step times of one device (`inferscope calibrate --json`)."""

    device: str
    """Name of the device; for a CPU, its model."""
    device_uuid: str
    """Id of the GPU; empty for a CPU."""
    driver: str
    """Version of the NVIDIA driver; empty for a CPU."""
    clocks_mhz: tuple[int, int] | None
    """Highest clocks of SMs and memory; None where they are not known."""
    num_threads: int
    """Threads that computed, on a CPU; 0 on a GPU."""
    measured_real_ns: int
    """Wall time of the measurement, since the Unix epoch."""
    versions: dict[str, str]
    """Versions of the measuring software, by name."""
    memory: tuple[MemoryRate, ...]
    """Rates of the device's memory."""
    compute: tuple[ComputeRate, ...]
    """Rates of dense matrix products, by data type."""
    launch_ns: int
    """Host time to launch one operation."""
    steps: tuple[StepTimes, ...]
    """Step times by model."""
    path: str
    """File in which the calibration is kept."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "models", nargs="*", metavar="MODEL",
        help="model to measure: builtin, random:SHAPE or a checkpoint folder (default: builtin)",
    )  # fmt: skip
    parser.add_argument(
        "--device", default="auto", help="auto, cpu or cuda:N (default: %(default)s)"
    )
    parser.add_argument(
        "--threads", type=int, default=EngineOptions().num_threads,
        metavar="N", help="CPU threads, as many as the engine uses (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--seconds",
        type=above_zero,
        default=20.0,
        help="approximate duration of the measurement in seconds (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.epilog = """examples:
  inferscope calibrate                     the CPU or the first GPU, and the built-in model
  inferscope calibrate random:llama-8b --device cuda:0 --seconds 60
"""


def run(options: argparse.Namespace) -> int:
    """Measure the device, store the calibration and print it."""
    if options.threads < 1:
        raise BadInput(f"--threads is {options.threads}. Give at least 1.")
    # Imported here because it imports torch, which would delay --help by seconds.
    with imports_that_stay():
        from inferscope.cli.calibrate.measure import calibrate

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
            f"cannot store the calibration: {error}. Set INFERSCOPE_CACHE to a writable folder."
        ) from error
    document = document_of(calibration, path)
    if options.json:
        sys.stdout.write(json_line(document))
    else:
        sys.stdout.write("\n".join(_lines(calibration, document)) + "\n")
    return 0


def document_of(calibration: Calibration, path: Path) -> CalibrationDocument:
    """Return a calibration as a document, with the maker's peak rates where they are known.

    Args:
        calibration: measured rates and step times.
        path: file in which the calibration is stored.
    """
    peaks = peaks_of(calibration.device) if calibration.device_uuid else None
    peaks = peaks if peaks is not None and peaks.is_known else None
    memory_s = None if peaks is None else peaks.memory_bytes_s
    measured = (("copy", calibration.copy_bytes_s), ("read", calibration.read_bytes_s))
    products = (
        (dtype, flops_s, _maker_s(peaks, dtype)) for dtype, flops_s in calibration.flops_s.items()
    )
    return CalibrationDocument(
        device=calibration.device,
        device_uuid=calibration.device_uuid,
        driver=calibration.driver,
        clocks_mhz=calibration.clocks_mhz,
        num_threads=calibration.num_threads,
        measured_real_ns=calibration.measured_real_s * 10**9,
        versions=calibration.versions,
        memory=tuple(
            MemoryRate(name, rate_s, memory_s, _share(rate_s, memory_s))
            for name, rate_s in measured
        ),
        compute=tuple(
            ComputeRate(dtype, rate_s, peak_s, _share(rate_s, peak_s))
            for dtype, rate_s, peak_s in products
        ),
        launch_ns=round(calibration.launch_s * 1e9),
        steps=tuple(
            StepTimes(table.model, table.mode, table.coefficients, table.num_steps, table.error)
            for table in calibration.steps
        ),
        path=str(path),
    )


def _share(measured: float, peak: float | None) -> float | None:
    return None if peak is None else measured / peak


def _maker_s(peaks: Peaks | None, dtype: str) -> float | None:
    if peaks is None:
        return None
    if dtype in ("bfloat16", "float16"):
        return peaks.bf16_flops_s
    return peaks.fp8_flops_s if dtype == _FLOAT8 else None


def _lines(calibration: Calibration, document: CalibrationDocument) -> Iterator[str]:
    yield _device(calibration)
    for memory in document.memory:
        yield _rate(memory.name, memory.measured_bytes_s, memory.peak_bytes_s, "B/s")
    for compute in document.compute:
        yield _rate(compute.name, compute.measured_flops_s, compute.peak_flops_s, "FLOP/s")
    yield f"  {'launch':<14} {calibration.launch_s * 1e6:>10.2f} µs/op"
    for table in document.steps:
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
    yield f"stored in {document.path}; engines that start on this device from now on use it"


def _rate(name: str, measured: float, peak: float | None, unit: str) -> str:
    of_peak = "-" if peak is None else f"{measured / peak:.0%} of {_si(peak)}{unit}"
    return f"  {name:<14} {_si(measured) + unit:>14}   {of_peak}"


def _device(calibration: Calibration) -> str:
    parts = [calibration.device]
    if calibration.num_threads:
        parts.append(f"{calibration.num_threads} threads")
    if calibration.device_uuid:
        parts += [calibration.device_uuid, f"driver {calibration.driver}"]
    if calibration.clocks_mhz is not None:
        parts.append("SM {} MHz, memory {} MHz at most".format(*calibration.clocks_mhz))
    return ", ".join(parts)


def _si(rate: float) -> str:
    for prefix, factor in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if rate >= factor:
            return f"{rate / factor:.3g} {prefix}"
    return f"{rate:.3g} "
