"""Quantised weight matrices: int8 and int4 weights, and fp8 products on Hopper GPUs.

    int8    w = q * scale    q in -127..127    a scale per output channel
    int4    w = q * scale    q in -8..7        a scale per output channel and 64 or 32 inputs
    fp8     w = q * scale    q in e4m3         a scale per output channel; inputs, too, are
                                               quantised, with a scale per token

Only the layers' matrices are quantised. Embedding, lm_head, norms, biases and routers keep the
activations' dtype. A product either runs a kernel on the small weights, or dequantises the matrix
first and multiplies as usual, which moves more bytes than whole weights do. The kernels are torch's
on a CPU. On a GPU whose torch has Triton they are those of `weight_kernels.py`, for few tokens: a
decode step then reads the small weights alone. Thread milliseconds on an AVX2 CPU, 1024 x 1024
weights, in one run on a loaded machine; "dequantised" adds a dequantisation and a plain product
timed apart:

              float32                          bfloat16
    tokens    plain   dequantised   kernel     plain   dequantised   kernel (int8, int4)
    1         0.13    0.57          1.05       0.20    0.62          0.08   0.16
    32        1.2     1.6           37         6.7     7.1           1.5    1.6
    256       8.4     8.8           365        54      54            13     13

So the kernels run on 16-bit activations only, on a GPU as well. On a CPU with bfloat16 instructions
the int8 kernel runs for few rows only, because there a plain product should be faster; that was not
measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from inferscope.engine import devices
from inferscope.engine.config import QuantizationName
from inferscope.errors import BadInput

_GROUPS = (64, 32)
"""Inputs that share an int4 scale: the first that divides the inputs."""
_KERNEL_MULTIPLE = 64
"""Divisor of rows and columns that the CPU kernels need; other widths crash in torch 2.13."""
_KERNEL_TOKENS = 32
"""Maximum tokens of an int8 kernel on a CPU with bfloat16 instructions."""
_GPU_KERNEL_TOKENS = 128
"""Maximum tokens of a kernel on a GPU; more are worth the bytes of a dequantised matrix."""
_MAX_E4M3 = 448.0
_AMPERE, _HOPPER = (8, 0), (9, 0)
"""Compute capabilities: a large tile of the GPU kernels fits the shared memory from Ampere on."""


class QuantizedMatrix(Protocol):
    """Interface of a quantised weight matrix [outputs, inputs]."""

    def product(self, inputs: Tensor) -> Tensor:
        """Return the inputs [tokens, inputs] times the matrix, [tokens, outputs]."""

    def dequantized(self) -> Tensor:
        """Return the matrix in the dtype of the activations, [outputs, inputs]."""

    def numel(self) -> int:
        """Return the number of weights."""


Matrix: TypeAlias = Tensor | QuantizedMatrix
Quantize: TypeAlias = Callable[[Tensor], Matrix]


def linear(inputs: Tensor, matrix: Matrix, bias: Tensor | None = None) -> Tensor:
    """Return `inputs @ matrix.T + bias` for a plain or quantised matrix."""
    if isinstance(matrix, Tensor):
        return functional.linear(inputs, matrix, bias)
    product = matrix.product(inputs)
    return product if bias is None else product + bias


@dataclass(frozen=True)
class Int8Matrix:
    """Matrix of 8-bit integers.

    Attributes:
        values: [outputs, inputs] int8
        scales: [outputs] in the dtype of the activations
    """

    values: Tensor
    scales: Tensor

    @classmethod
    def of(cls, matrix: Tensor) -> Int8Matrix:
        """Quantise a matrix."""
        scales = _scales(matrix, largest=127)
        values = (matrix.float() / scales.float().unsqueeze(-1)).round_().clamp_(-127, 127)
        return cls(values.to(torch.int8), scales)

    def product(self, inputs: Tensor) -> Tensor:
        """Return the inputs times the matrix."""
        if self._runs_kernel(len(inputs)):
            return torch._weight_int8pack_mm(inputs.contiguous(), self.values, self.scales)
        if _runs_gpu_kernel(inputs):
            from inferscope.engine.weight_kernels import int8_product  # needs Triton

            return int8_product(inputs, self.values, self.scales)
        return functional.linear(inputs, self.dequantized())

    def dequantized(self) -> Tensor:
        """Return the matrix in the dtype of the activations."""
        return self.values * self.scales.unsqueeze(-1)

    def numel(self) -> int:
        """Return the number of weights."""
        return self.values.numel()

    def _runs_kernel(self, num_tokens: int) -> bool:
        if not _has_cpu_kernel(self.values.shape, self.scales):
            return False
        return num_tokens <= _KERNEL_TOKENS or not torch.cpu._is_avx512_bf16_supported()


@dataclass(frozen=True)
class Int4Matrix:
    """Matrix of 4-bit integers, two in a byte, stored as `q + 8`.

    Attributes:
        nibbles: [outputs, inputs / 2] uint8; a low half is of the first half of the inputs, the
            high half of the second
        scales: [outputs, groups] in the dtype of the activations; in memory group by group
    """

    nibbles: Tensor
    scales: Tensor

    @classmethod
    def of(cls, matrix: Tensor) -> Int4Matrix:
        """Quantise a matrix."""
        values, scales = _int4(matrix)
        low, high = values.chunk(2, dim=1)
        return cls(low | (high << 4), scales.T.contiguous().T)

    def product(self, inputs: Tensor) -> Tensor:
        """Return the inputs times the matrix."""
        # A tile of bytes holds a group of each half, so the halves must be whole groups.
        if _runs_gpu_kernel(inputs) and self.scales.shape[1] % 2 == 0:
            from inferscope.engine.weight_kernels import int4_product  # needs Triton

            return int4_product(inputs, self.nibbles, self.scales)
        return functional.linear(inputs, self.dequantized())

    def dequantized(self) -> Tensor:
        """Return the matrix in the dtype of the activations."""
        values = torch.cat([self.nibbles & 15, self.nibbles >> 4], dim=1)
        grouped = values.view(*self.scales.shape, -1).to(self.scales.dtype) - 8
        return (grouped * self.scales.unsqueeze(-1)).flatten(1)

    def numel(self) -> int:
        """Return the number of weights."""
        return 2 * self.nibbles.numel()


@dataclass(frozen=True)
class PackedInt4Matrix:
    """Matrix of 4-bit integers in the order that torch's CPU kernel reads.

    Attributes:
        packed: [outputs, inputs / 2] uint8
        scales_and_zeros: [groups, outputs, 2] in the dtype of the activations; zeros are 0
    """

    packed: Tensor
    scales_and_zeros: Tensor

    @classmethod
    def of(cls, matrix: Tensor) -> PackedInt4Matrix:
        """Quantise a matrix."""
        values, scales = _int4(matrix)
        packed = torch._convert_weight_to_int4pack_for_cpu(values.to(torch.int32), 1)
        pairs = torch.stack([scales.T, torch.zeros_like(scales.T)], dim=-1)
        return cls(packed, pairs.contiguous())

    def product(self, inputs: Tensor) -> Tensor:
        """Return the inputs times the matrix."""
        group = 2 * self.packed.shape[1] // len(self.scales_and_zeros)
        return torch._weight_int4pack_mm_for_cpu(
            inputs.contiguous(), self.packed, group, self.scales_and_zeros
        )

    def dequantized(self) -> Tensor:
        """Return the matrix in the dtype of the activations."""
        # The order of the packed values differs among processors; the kernel knows it.
        num_inputs = 2 * self.packed.shape[1]
        return self.product(torch.eye(num_inputs, dtype=self.scales_and_zeros.dtype)).T

    def numel(self) -> int:
        """Return the number of weights."""
        return 2 * self.packed.numel()


@dataclass(frozen=True)
class Fp8Matrix:
    """Matrix of e4m3 values, multiplied with inputs that are quantised in each product.

    Attributes:
        values: [outputs, inputs] float8_e4m3fn
        scales: [outputs] float32
    """

    values: Tensor
    scales: Tensor

    @classmethod
    def of(cls, matrix: Tensor) -> Fp8Matrix:
        """Quantise a matrix."""
        return cls(*_fp8(matrix))

    def product(self, inputs: Tensor) -> Tensor:
        """Return the quantised inputs times the matrix."""
        values, scales = _fp8_inputs(inputs)
        return torch._scaled_mm(
            values,
            self.values.T,
            scale_a=scales.unsqueeze(1),
            scale_b=self.scales.unsqueeze(0),
            out_dtype=torch.bfloat16,
        )

    def dequantized(self) -> Tensor:
        """Return the matrix in the dtype of the activations."""
        return (self.values.float() * self.scales.unsqueeze(-1)).to(torch.bfloat16)

    def numel(self) -> int:
        """Return the number of weights."""
        return self.values.numel()


WEIGHT_BITS: Mapping[QuantizationName, int] = MappingProxyType({"int8": 8, "int4": 4, "fp8": 8})
"""Bits of a quantised weight, its scale left out."""


def quantizer(
    name: QuantizationName | None, *, dtype: torch.dtype, device: torch.device
) -> Quantize:
    """Return the function that quantises a matrix; `keep` for None.

    Raises:
        BadInput: the device or the dtype cannot compute the quantisation.
    """
    if name is None:
        return keep
    if name == "fp8":
        _check_fp8(dtype, device)
        return Fp8Matrix.of
    return Int8Matrix.of if name == "int8" else _quantize_int4


def keep(matrix: Tensor) -> Matrix:
    """Return the matrix as it is."""
    return matrix


def _quantize_int4(matrix: Tensor) -> Matrix:
    return (PackedInt4Matrix if _has_cpu_kernel(matrix.shape, matrix) else Int4Matrix).of(matrix)


def _check_fp8(dtype: torch.dtype, device: torch.device) -> None:
    needed = "fp8 needs a GPU of compute capability 9.0 (Hopper) or later"
    if device.type != "cuda":
        raise BadInput(f"{needed}; the device is {device.type}. Use --quantization int8 or int4.")
    capability = torch.cuda.get_device_capability(device)
    if capability < _HOPPER:
        name = torch.cuda.get_device_name(device)
        raise BadInput(
            f"{needed}; {name} has {capability[0]}.{capability[1]}. "
            "Use --quantization int8 or int4."
        )
    if dtype is not torch.bfloat16:
        raise BadInput(f"fp8 products are bfloat16, and the dtype is {dtype}. Use bfloat16.")


def _has_cpu_kernel(shape: torch.Size, like: Tensor) -> bool:
    is_aligned = not any(length % _KERNEL_MULTIPLE for length in shape)
    return is_aligned and like.device.type == "cpu" and like.dtype is not torch.float32


def _runs_gpu_kernel(inputs: Tensor) -> bool:
    return (
        inputs.is_cuda
        and len(inputs) <= _GPU_KERNEL_TOKENS
        and inputs.dtype is not torch.float32
        and devices.has_triton()
        and torch.cuda.get_device_capability(inputs.device) >= _AMPERE
    )


def _scales(matrix: Tensor, *, largest: float) -> Tensor:
    """Return scales over the last dimension, rounded to the matrix's dtype; 1 where all are 0."""
    # On a GPU torch divides by a number by multiplying: so that all devices round alike.
    scales = (matrix.float().abs().amax(dim=-1) * (1 / largest)).to(matrix.dtype)
    # Not `where`: it would copy its scalar to a GPU and wait, which no graph can capture.
    return scales.masked_fill_(scales == 0, 1)


def _int4(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return `q + 8` as uint8 [outputs, inputs], and scales [outputs, groups]."""
    num_inputs = matrix.shape[1]
    group = next((size for size in _GROUPS if num_inputs % size == 0), None)
    if group is None:
        raise BadInput(
            f"int4 scales are shared by groups of {_GROUPS[-1]} inputs, and {num_inputs} inputs "
            f"leave a rest of {num_inputs % _GROUPS[-1]}. Use --quantization int8."
        )
    grouped = matrix.reshape(len(matrix), -1, group)
    scales = _scales(grouped, largest=7)
    values = (grouped.float() / scales.float().unsqueeze(-1)).round_().clamp_(-8, 7)
    return (values + 8).to(torch.uint8).flatten(1), scales


def _fp8(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return e4m3 values, and the float32 scale of each row."""
    scales = _scales(rows.float(), largest=_MAX_E4M3)
    values = (rows.float() / scales.unsqueeze(-1)).clamp_(-_MAX_E4M3, _MAX_E4M3)
    return values.to(torch.float8_e4m3fn), scales


def _fp8_inputs(inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return what `_fp8` does, from one kernel where there is one."""
    if not (inputs.is_cuda and devices.has_triton()):
        return _fp8(inputs)
    from inferscope.engine.weight_kernels import fp8_rows  # needs Triton

    return fp8_rows(inputs, _MAX_E4M3)
