"""Rotation and gating in Triton, one kernel each where plain torch takes three and two.

Imported only on a GPU whose torch has Triton. torch writes the result of each operation to memory
and reads it again in the next one: a rotation moves 9 times its elements instead of 2 (7 where the
heads are contiguous), and a gating 5 times the width instead of 3. Here intermediate results are
rounded to 16 bits as torch rounds them; float32 differs in the last places of quotients.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_HEADS = 8
"""Heads of a token that one program rotates."""
_TILE = 1024
"""Outputs of a token that one program gates."""


@triton.jit
def _rotate(
    heads: tl.tensor,
    cos: tl.tensor,
    signed_sin: tl.tensor,
    out: tl.tensor,
    token_stride: tl.tensor,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    HEADS: tl.constexpr,
) -> None:
    """Rotate up to `HEADS` heads of a token."""
    token = tl.program_id(0).to(tl.int64)
    rows, dims = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, HEAD_PAD)
    is_dim = dims < HEAD_DIM
    mask = (rows < NUM_HEADS)[:, None] & is_dim[None, :]
    first = heads + token * token_stride + rows[:, None] * HEAD_DIM
    here = tl.load(first + dims[None, :], mask=mask, other=0.0).to(tl.float32)
    opposite = (dims + HEAD_DIM // 2) % HEAD_DIM
    there = tl.load(first + opposite[None, :], mask=mask, other=0.0).to(tl.float32)
    cosine = tl.load(cos + token * HEAD_DIM + dims, mask=is_dim, other=0.0).to(tl.float32)
    sine = tl.load(signed_sin + token * HEAD_DIM + dims, mask=is_dim, other=0.0).to(tl.float32)
    product = (here * cosine[None, :]).to(out.dtype.element_ty).to(tl.float32)
    rotated = product + there * sine[None, :]
    where = out + (token * NUM_HEADS + rows[:, None]) * HEAD_DIM + dims[None, :]
    tl.store(where, rotated.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _gate(gate_up: tl.tensor, out: tl.tensor, WIDTH: tl.constexpr, TILE: tl.constexpr) -> None:
    """Gate up to `TILE` outputs of a token."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = at < WIDTH
    gate = tl.load(gate_up + token * 2 * WIDTH + at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * 2 * WIDTH + WIDTH + at, mask=mask, other=0.0).to(tl.float32)
    opened = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + token * WIDTH + at, (opened * up).to(out.dtype.element_ty), mask=mask)


def rotate(heads: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Return rotated heads.

    Args:
        heads: [tokens, heads, dim], whose tokens may be apart.
        cos: [tokens, 1, dim], contiguous.
        signed_sin: As `cos`.
    """
    num_tokens, num_heads, head_dim = heads.shape
    assert heads.stride()[1:] == (head_dim, 1)
    out = torch.empty(heads.shape, dtype=heads.dtype, device=heads.device)
    _rotate[(num_tokens, triton.cdiv(num_heads, _HEADS))](
        heads, cos, signed_sin, out, heads.stride(0),
        NUM_HEADS=num_heads, HEAD_DIM=head_dim, HEAD_PAD=triton.next_power_of_2(head_dim),
        HEADS=_HEADS,
    )  # fmt: skip
    return out


def gate(gate_up: Tensor) -> Tensor:
    """Return `silu(gate) * up` of [tokens, 2 * width], contiguous, the gate first."""
    assert gate_up.is_contiguous()
    num_tokens, width = len(gate_up), gate_up.shape[1] // 2
    out = torch.empty((num_tokens, width), dtype=gate_up.dtype, device=gate_up.device)
    _gate[(num_tokens, triton.cdiv(width, _TILE))](gate_up, out, WIDTH=width, TILE=_TILE)
    return out
