"""The Triton kernels of rotation and gating against plain torch.

Compiled where there is a GPU; else in Triton's interpreter, in an environment with triton, by
`TRITON_INTERPRET=1 python -m pytest tests/engine/test_elementwise_kernels.py`.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from inferscope.engine.model import rotate_by_torch
from tests.engine.triton_device import DEVICE, MARKS

pytestmark = MARKS
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-6}
"""Largest allowed difference of two results, absolute and relative: bfloat16 has 8 bits, and torch
also rounds the products within a sum on a CPU."""
DTYPES = [torch.float32, torch.bfloat16]


def drawn(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [24, 64, 128])
@pytest.mark.parametrize("num_tokens", [1, 5, 33])
def test_rotation_equals_torch_s_for_heads_within_a_product(
    dtype: torch.dtype, head_dim: int, num_tokens: int
) -> None:
    from inferscope.engine.elementwise_kernels import rotate

    qkv = drawn(num_tokens, 13, head_dim, dtype=dtype, seed=head_dim)
    angles = drawn(num_tokens, 1, head_dim, dtype=torch.float32, seed=1)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    most = TOLERANCE[dtype]
    for heads in (qkv[:, :9], qkv[:, :9].contiguous()):
        torch.testing.assert_close(
            rotate(heads, cos, sin), rotate_by_torch(heads, cos, sin), rtol=most, atol=most
        )


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # of the interpreter's NumPy
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [24, 1024, 1500])
def test_gating_equals_torch_s(dtype: torch.dtype, width: int) -> None:
    from inferscope.engine.elementwise_kernels import gate

    gate_up = drawn(7, 2 * width, dtype=dtype, seed=width) * 8
    gate_up[0, :4] = torch.tensor([-300.0, 300.0, 0.0, -1e4])
    opened, up = gate_up.chunk(2, dim=-1)
    most = TOLERANCE[dtype]
    torch.testing.assert_close(gate(gate_up), functional.silu(opened) * up, rtol=most, atol=most)
    assert gate(gate_up[:0]).shape == (0, width)
