"""Products with quantised weights in Triton, and the quantisation of fp8 inputs.

Imported only on a GPU whose torch has Triton. A decode step reads each weight once for few tokens,
so its time is that of reading the weights. These kernels read the small integers and turn them into
the activations' dtype in registers; a matrix in that dtype is written nowhere.

A matrix of few outputs occupies a GPU only if the inputs, too, are divided among programs. Each
then writes the sum over its inputs in float32, and a second kernel adds these in their order. How
the inputs are divided depends on the matrix alone, and results are the same in every run.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_FEW_ROWS = 16
"""Rows of a small tile: the minimum side of a matrix product in Triton."""
_MANY_ROWS = 64
"""Rows of a large tile, which has more outputs too: it reads more inputs for its weights."""
_FEW_OUTPUTS, _MANY_OUTPUTS = 64, 128
"""Outputs of a small and of a large tile."""
_PROGRAMS = 512
"""Programs of a product of few rows, about: four for each processor of an H100."""
_LEAST_SPLIT_TILES = 4
"""Minimum size of a split in tiles: adding up a smaller one costs as much as it saves."""
_TILE_INPUTS = 128
"""Inputs of a small tile of int8 weights, twice those of a large one; int4 has two groups."""
_SUM_TILE = 512
_THREAD_ELEMENTS = 32
"""Elements of a row in the registers of one thread."""


@triton.jit(do_not_specialize=["num_rows"])
def _int8_product(
    inputs: tl.tensor,
    values: tl.tensor,
    scales: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    num_outputs: tl.tensor,
    num_inputs: tl.tensor,
    split_inputs: tl.tensor,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    """Compute a tile of the product, over one split of the inputs."""
    split = tl.program_id(2)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    outputs = (tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)).to(tl.int64)
    is_row, is_output = rows < num_rows, outputs < num_outputs
    sums = tl.zeros([ROWS, OUTPUTS], tl.float32)
    first = split * split_inputs
    for tile in range(first, tl.minimum(first + split_inputs, num_inputs), INPUTS):
        at = tile + tl.arange(0, INPUTS)
        is_input = at < num_inputs
        row = tl.load(
            inputs + rows[:, None] * num_inputs + at[None, :],
            mask=is_row[:, None] & is_input[None, :], other=0.0,
        )  # fmt: skip
        value = tl.load(
            values + outputs[None, :] * num_inputs + at[:, None],
            mask=is_output[None, :] & is_input[:, None], other=0,
        )  # fmt: skip
        if WIDE:
            row = row.to(tl.float32)
        sums = tl.dot(row, value.to(row.dtype), sums)
    sums *= tl.load(scales + outputs, mask=is_output, other=0.0).to(tl.float32)[None, :]
    where = out + (split * num_rows + rows)[:, None] * num_outputs + outputs[None, :]
    tl.store(where, sums.to(out.dtype.element_ty), mask=is_row[:, None] & is_output[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def _int4_product(
    inputs: tl.tensor,
    nibbles: tl.tensor,
    scales: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    num_outputs: tl.tensor,
    half_inputs: tl.tensor,
    split_bytes: tl.tensor,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    """Compute a tile of the product, over one split of the bytes of a row of weights.

    The bytes of a tile hold one group of the first half of the inputs and one of the second.
    """
    split = tl.program_id(2)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    outputs = (tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)).to(tl.int64)
    is_row, is_output = rows < num_rows, outputs < num_outputs
    sums = tl.zeros([ROWS, OUTPUTS], tl.float32)
    first = split * split_bytes
    for tile in range(first, tl.minimum(first + split_bytes, half_inputs), GROUP):
        at = tile + tl.arange(0, GROUP)
        group = tile // GROUP
        # Loaded first, since they are needed last: they are not copied ahead as the bytes are.
        low_scale = tl.load(scales + group * num_outputs + outputs, mask=is_output, other=0.0)
        group += half_inputs // GROUP
        high_scale = tl.load(scales + group * num_outputs + outputs, mask=is_output, other=0.0)
        byte = tl.load(
            nibbles + outputs[None, :] * half_inputs + at[:, None],
            mask=is_output[None, :], other=0,
        )  # fmt: skip
        where = inputs + rows[:, None] * (2 * half_inputs) + at[None, :]
        low_row = tl.load(where, mask=is_row[:, None], other=0.0)
        high_row = tl.load(where + half_inputs, mask=is_row[:, None], other=0.0)
        if WIDE:
            low_row, high_row = low_row.to(tl.float32), high_row.to(tl.float32)
        low = (byte & 15).to(tl.int8).to(low_row.dtype) - 8
        high = (byte >> 4).to(tl.int8).to(high_row.dtype) - 8
        low_sums, high_sums = tl.dot(low_row, low), tl.dot(high_row, high)
        sums += low_sums * low_scale.to(tl.float32)[None, :]
        sums += high_sums * high_scale.to(tl.float32)[None, :]
    where = out + (split * num_rows + rows)[:, None] * num_outputs + outputs[None, :]
    tl.store(where, sums.to(out.dtype.element_ty), mask=is_row[:, None] & is_output[None, :])


@triton.jit
def _sum_splits(
    partial: tl.tensor,
    out: tl.tensor,
    length: tl.tensor,
    SPLITS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Add the splits of a tile of the product."""
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    sums = tl.zeros([TILE], tl.float32)
    for split in tl.static_range(SPLITS):
        sums += tl.load(partial + split * length + at, mask=at < length, other=0.0)
    tl.store(out + at, sums.to(out.dtype.element_ty), mask=at < length)


@triton.jit
def _fp8_row(
    rows: tl.tensor,
    values: tl.tensor,
    scales: tl.tensor,
    width: tl.tensor,
    WIDTH_PAD: tl.constexpr,
    LARGEST: tl.constexpr,
) -> None:
    """Quantise one row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WIDTH_PAD)
    value = tl.load(rows + row * width + at, mask=at < width, other=0.0).to(tl.float32)
    scale = tl.max(tl.abs(value), 0) * (1 / LARGEST)
    scale = tl.where(scale == 0.0, 1.0, scale)
    # div_rn: the usual quotient is approximate.
    scaled = tl.div_rn(value, scale)
    clamped = tl.clamp(scaled, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    tl.store(values + row * width + at, clamped.to(values.dtype.element_ty), mask=at < width)
    tl.store(scales + row, scale)


def int8_product(inputs: Tensor, values: Tensor, scales: Tensor) -> Tensor:
    """Return inputs [rows, inputs] times int8 weights, see `Int8Matrix`, in the inputs' dtype."""
    tile = _TILE_INPUTS
    # Half of it leaves shared memory for two large tiles on a processor.
    step = tile if len(inputs) <= _FEW_ROWS else tile // 2
    return _product(_int8_product, inputs, values, scales, tile=tile, INPUTS=step)


def int4_product(inputs: Tensor, nibbles: Tensor, scales: Tensor) -> Tensor:
    """Return inputs [rows, inputs] times int4 weights, see `Int4Matrix`, in the inputs' dtype.

    Each half of the inputs must be whole groups.
    """
    group = inputs.shape[1] // scales.shape[1]
    by_group = scales.T.contiguous()  # as it is in memory already
    return _product(_int4_product, inputs, nibbles, by_group, tile=group, GROUP=group)


def fp8_rows(rows: Tensor, largest: float) -> tuple[Tensor, Tensor]:
    """Return e4m3 values up to `largest`, and the float32 scale of each row."""
    num_rows, width = rows.shape
    values = torch.empty(rows.shape, dtype=torch.float8_e4m3fn, device=rows.device)
    scales = torch.empty(num_rows, dtype=torch.float32, device=rows.device)
    padded = triton.next_power_of_2(width)
    _fp8_row[(num_rows,)](
        rows.contiguous(), values, scales, width, WIDTH_PAD=padded, LARGEST=largest,
        num_warps=min(max(padded // (32 * _THREAD_ELEMENTS), 4), 32),
    )  # fmt: skip
    return values, scales


def _product(
    kernel: Any, inputs: Tensor, weights: Tensor, scales: Tensor, *, tile: int, **shape: int
) -> Tensor:
    """Launch a product kernel.

    Args:
        kernel: of the weights' kind.
        inputs: [rows, inputs]
        weights: [outputs, elements of a row]
        scales: of the weights.
        tile: elements of a row of which a split has whole multiples.
        shape: constants of the kernel.
    """
    num_rows, (num_outputs, row_elements) = len(inputs), weights.shape
    is_few = num_rows <= _FEW_ROWS
    rows, outputs = (_FEW_ROWS, _FEW_OUTPUTS) if is_few else (_MANY_ROWS, _MANY_OUTPUTS)
    # The inputs are divided in the same way for any number of rows.
    most_splits = triton.cdiv(_PROGRAMS, triton.cdiv(num_outputs, _FEW_OUTPUTS))
    num_tiles = triton.cdiv(row_elements, tile)
    split_tiles = max(triton.cdiv(num_tiles, most_splits), _LEAST_SPLIT_TILES)
    num_splits = triton.cdiv(num_tiles, split_tiles)
    out = torch.empty((num_rows, num_outputs), dtype=inputs.dtype, device=inputs.device)
    partial = out
    if num_splits > 1:
        parts = (num_splits, num_rows, num_outputs)
        partial = torch.empty(parts, dtype=torch.float32, device=inputs.device)
    # Tiles of the same weights side by side: one reads them from memory, the others from cache.
    grid = (triton.cdiv(num_rows, rows), triton.cdiv(num_outputs, outputs), num_splits)
    kernel[grid](
        inputs.contiguous(), weights, scales, partial,
        num_rows, num_outputs, row_elements, split_tiles * tile,
        ROWS=rows, OUTPUTS=outputs, num_warps=4 if is_few else 8, num_stages=4 if is_few else 3,
        # On a CPU Triton's interpreter runs, whose products take bfloat16 for whole numbers.
        WIDE=inputs.device.type == "cpu", **shape,
    )  # fmt: skip
    if num_splits > 1:
        _sum_splits[(triton.cdiv(out.numel(), _SUM_TILE),)](
            partial, out, out.numel(), SPLITS=num_splits, TILE=_SUM_TILE
        )
    return out
