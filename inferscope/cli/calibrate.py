"""Measure what this device can do: memory, dense products by dtype, and the engine's step times.

Engines that start on the device afterwards begin with a cost model made of it, where they would
otherwise begin with the maker's figures or with guesses, until they have learned from their own
steps. Shares of what is possible can then be told as % of the maker's figures and % of measured
ones. The device should have nothing else to do meanwhile.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from inferscope import __version__
from inferscope.attribution.split import fair
from inferscope.calibration import Calibration, StepTable, cpu_name, driver_version, store
from inferscope.cli.numbers import above_zero
from inferscope.cost.batch import Batch, Team
from inferscope.cost.fit import REMEMBERED_STEPS, OnlineFit, features
from inferscope.cost.peaks import Peaks, peaks_of
from inferscope.cost.table import coefficients
from inferscope.engine.ceilings import FLOAT8, measure_ceilings
from inferscope.engine.config import EngineOptions
from inferscope.engine.devices import device_name, device_uuid, find_device, highest_clocks_mhz
from inferscope.engine.load import describe_model, load_model
from inferscope.engine.runner import default_num_blocks
from inferscope.engine.steptimes import StepTime, measure_steps
from inferscope.errors import BadInput, InferScopeError

_CEILINGS_SHARE = 0.4
"""Of the time; the rest is the models'."""
_LEAST_STEPS = 64
_MODE = "eager"
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


def calibrate(
    models: Sequence[str], *, device: str, num_threads: int, seconds: float
) -> Calibration:
    """Measure a device and the steps of models on it, for about so many seconds.

    Raises:
        BadInput: there is no such device or model.
        InferScopeError: a model is too slow for the time given.
    """
    torch.set_num_threads(num_threads)
    found = find_device(device)
    is_cuda = found.type == "cuda"
    if is_cuda:
        torch.cuda.set_device(found)
    with torch.inference_mode():
        ceilings = measure_ceilings(found, seconds=_CEILINGS_SHARE * seconds)
    if is_cuda:
        torch.cuda.empty_cache()
    each_s = (1 - _CEILINGS_SHARE) * seconds / len(models)
    options = EngineOptions(device=device, num_threads=num_threads, prefix_cache=False)
    return Calibration(
        device=device_name(found) if is_cuda else cpu_name(),
        device_uuid=device_uuid(found),
        driver=driver_version() if is_cuda else "",
        clocks_mhz=highest_clocks_mhz(found),
        num_threads=0 if is_cuda else num_threads,
        measured_real_s=int(time.time()),
        versions={"inferscope": __version__, "torch": str(torch.__version__)},
        copy_bytes_s=ceilings.copy_bytes_s,
        read_bytes_s=ceilings.read_bytes_s,
        launch_s=ceilings.launch_s,
        flops_s=ceilings.flops_s,
        steps=tuple(_measured(model, options, seconds=each_s) for model in models),
    )


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
    return peaks.fp8_flops_s if dtype == FLOAT8 else None


def _measured(name: str, options: EngineOptions, *, seconds: float) -> StepTable:
    """Measure a model's steps and fit the cost model to them."""
    model = load_model(name, options)
    num_blocks = default_num_blocks(model, options)
    shape = describe_model(model, options, name=name, num_blocks=num_blocks).shape
    assert shape is not None, "the reference engine knows its models' shapes"
    times = measure_steps(model, options, seconds=seconds)[-REMEMBERED_STEPS:]
    fit, batches = OnlineFit("calibration"), list(map(_batch, times))
    for batch, time_ in zip(batches, times, strict=True):
        fit.observe(features(batch), time_.took_ns)
    fitted = fit.solve() if len(times) >= _LEAST_STEPS else None
    if fitted is None:
        raise InferScopeError(
            f"{name} ran {len(times)} warm steps in {seconds:.0f} s: {_LEAST_STEPS} are needed. "
            "Give more --seconds, or a smaller model."
        )
    errors = [
        abs(fair(fitted, batch, fitted.own(batch)).total(batch) / time_.took_ns - 1)
        for batch, time_ in zip(batches, times, strict=True)
    ]
    return StepTable(
        model=name,
        shape=shape,
        mode=_MODE,
        coefficients=coefficients(fitted),
        num_steps=len(times),
        error=float(np.median(errors)),
    )


def _batch(step: StepTime) -> Batch:
    tokens, contexts, sampled = (
        np.array(column, dtype=np.int64) for column in (step.tokens, step.contexts, step.sampled)
    )
    return Batch(Team(tokens, sampled), contexts)


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
