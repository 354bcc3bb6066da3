"""Cost models as coefficients in a record, and back.

A step model is piecewise linear in tokens and rows, so its values at a few knots are all of it; a
device's rates are a roofline with measured ceilings. Both say `calibration`.

    f_ns.64     T of 64 tokens             read_bytes_s       of device memory
    g_ns.64     … of 64 sampled rows       flops_s.bfloat16   of dense products
    single_ns … decoding_ns                launch_s           of one operation
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

import numpy as np
from numpy.typing import NDArray

from inferscope.cost.model import MAX_TOKENS, StepModel, Tables, roofline
from inferscope.cost.peaks import Peaks
from inferscope.cost.shape import is_counted
from inferscope.records import CostTable, Shape

Floats = NDArray[np.float64]

KNOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, MAX_TOKENS)
"""Token counts at which a table is stored, including all at which a fit bends."""
_FIRST_TOKENS = 1024
"""Tokens that a table holds before a step has more."""
_OF_SLICES = ("single_ns", "padded_ns", "chunk_ns", "pair_ns", "context_ns", "decoding_ns")
_DTYPES_BY_BITS: dict[int, tuple[str, ...]] = {
    8: ("float8_e4m3fn", "bfloat16", "float16"),
    16: ("bfloat16", "float16"),
    32: ("float32",),
}
"""Compute formats of a model by bits of its activations, the likeliest first."""


def coefficients(model: StepModel) -> dict[str, float]:
    """Return a step model's values at the knots, and its cost per slice."""
    values = {f"f_ns.{knot}": model.f(knot) for knot in KNOTS}
    values |= {f"g_ns.{knot}": model.g(knot) for knot in KNOTS}
    return values | {name: getattr(model, name) for name in _OF_SLICES}


def is_sound(table: CostTable) -> bool:
    """Return whether a table is complete; an incomplete one is ignored."""
    values = table.coefficients
    if not all(math.isfinite(number) and number >= 0 for number in values.values()):
        return False
    return not is_of_steps(table) or all(
        name in values
        for name in (*_OF_SLICES, *(f"{f}.{knot}" for f in ("f_ns", "g_ns") for knot in KNOTS))
    )


def is_of_steps(table: CostTable) -> bool:
    """Return whether a table describes steps rather than a device's rates."""
    return "f_ns.1" in table.coefficients


def model_of(table: CostTable, shape: Shape | None, peaks: Peaks) -> StepModel | None:
    """Return the model that a table describes; None where it is unsound or incomplete.

    Args:
        table: from a calibration.
        shape: of the engine's model: a device's rates alone determine no step time.
        peaks: of the device by its maker, for what was not measured.
    """
    if not is_sound(table):
        return None
    if is_of_steps(table):
        return _of_steps(table)
    if shape is None or not is_counted(shape):
        return None
    measured = _measured(table.coefficients, shape, peaks)
    if measured is None:
        return None
    return roofline(shape, measured, fit_id=table.fit_id, source=table.source)


def _of_steps(table: CostTable) -> StepModel:
    values = table.coefficients
    tables_of = partial(_tables, values)
    f, g = tables_of(_FIRST_TOKENS)
    single, padded, chunk, pair, context, decoding = (values[name] for name in _OF_SLICES)
    return StepModel(
        table.fit_id,
        table.source,
        f,
        g,
        single_ns=single,
        padded_ns=padded,
        chunk_ns=chunk,
        pair_ns=pair,
        context_ns=context,
        decoding_ns=decoding,
        tables_of=tables_of,
    )


def _tables(values: Mapping[str, float], num_tokens: int) -> Tables:
    return _between(values, "f_ns", num_tokens), _between(values, "g_ns", num_tokens)


def _between(coefficients: Mapping[str, float], name: str, num_tokens: int) -> Floats:
    """Return a table from its knots: no work takes no time, and more work never takes less."""
    values = np.maximum.accumulate([coefficients[f"{name}.{knot}"] for knot in KNOTS])
    table: Floats = np.interp(np.arange(num_tokens + 1), KNOTS, values)
    table[0] = 0.0
    return table


def measured_flops_s(measured: Mapping[str, float], shape: Shape) -> float | None:
    """Return the rate of dense products in what a model computes in; None if it is not measured."""
    names = _DTYPES_BY_BITS.get(shape.activation_bits, ())
    rates = [measured[key] for key in (f"flops_s.{name}" for name in names) if measured.get(key)]
    return rates[0] if rates else None


def _measured(rates: Mapping[str, float], shape: Shape, peaks: Peaks) -> Peaks | None:
    flops_s, bytes_s = measured_flops_s(rates, shape), rates.get("read_bytes_s")
    if not flops_s or not bytes_s:
        return None
    return peaks._replace(
        bf16_flops_s=flops_s,
        memory_bytes_s=bytes_s,
        launch_s=rates.get("launch_s", peaks.launch_s),
    )
