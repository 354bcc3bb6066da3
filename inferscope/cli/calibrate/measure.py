"""Measurements of `inferscope calibrate`: the device's peak rates and models' step times."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch

from inferscope import __version__
from inferscope.calibration import Calibration, StepTable, cpu_name, driver_version
from inferscope.cost import REMEMBERED_STEPS, OnlineFit, coefficients, features
from inferscope.cost import StepTable as StepColumns
from inferscope.engine import (
    EngineOptions,
    StepTime,
    describe_model,
    device_name,
    device_uuid,
    find_device,
    highest_clocks_mhz,
    load_model,
    measure_ceilings,
    measure_steps,
    pool_blocks,
)
from inferscope.errors import InferScopeError

_CEILINGS_SHARE = 0.4
"""Share of the time spent on the device's peak rates; the rest is divided among the models."""
_MIN_STEPS = 64
_MODE = "eager"


def calibrate(
    models: Sequence[str], *, device: str, num_threads: int, seconds: float
) -> Calibration:
    """Measure a device, and models' steps on it, for about `seconds`.

    Raises:
        BadInput: the device or a model does not exist.
        InferScopeError: a model runs too few steps in its time.
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


def _measured(name: str, options: EngineOptions, *, seconds: float) -> StepTable:
    """Measure a model's steps and fit the cost model to them."""
    model = load_model(name, options)
    num_blocks = pool_blocks(model, options)
    shape = describe_model(model, options, name=name, num_blocks=num_blocks).shape
    assert shape is not None, "the reference engine knows its models' shapes"
    times = measure_steps(model, options, seconds=seconds)[-REMEMBERED_STEPS:]
    fit, steps = OnlineFit("calibration"), list(map(_step, times))
    for step, time_ in zip(steps, times, strict=True):
        fit.observe(features(step), time_.took_ns)
    fitted = fit.solve() if len(times) >= _MIN_STEPS else None
    if fitted is None:
        raise InferScopeError(
            f"{name} ran {len(times)} warm steps in {seconds:.0f} s: {_MIN_STEPS} are needed. "
            "Give more --seconds, or a smaller model."
        )
    errors = [
        abs(fitted.steps_ns(step).item() / time_.took_ns - 1)
        for step, time_ in zip(steps, times, strict=True)
    ]
    return StepTable(
        model=name,
        shape=shape,
        mode=_MODE,
        coefficients=coefficients(fitted),
        num_steps=len(times),
        error=float(np.median(errors)),
    )


def _step(step: StepTime) -> StepColumns:
    tokens, contexts, sampled = (
        np.array(column, dtype=np.int64) for column in (step.tokens, step.contexts, step.sampled)
    )
    return StepColumns.of(tokens, contexts, sampled)
