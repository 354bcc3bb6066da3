"""The Triton products of quantised weights against the exact ones.

Compiled where there is a GPU; else in Triton's interpreter, in an environment with triton, by
`TRITON_INTERPRET=1 python -m pytest tests/engine/test_weight_kernels.py`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from inferscope.engine import quantization
from inferscope.engine.graphs import cuda_capture
from inferscope.engine.quantization import Fp8Matrix, Int4Matrix, Int8Matrix
from tests.engine.triton_device import DEVICE, IS_INTERPRETED, MARKS

pytestmark = MARKS

from inferscope.engine import weight_kernels  # noqa: E402 - needs Triton

needs_hopper = pytest.mark.skipif(
    IS_INTERPRETED or torch.cuda.get_device_capability() < (9, 0), reason="needs a Hopper GPU"
)
DTYPES = (torch.bfloat16, torch.float16)
MOST_ROWS = quantization._GPU_KERNEL_TOKENS


@pytest.fixture(autouse=True)
def kernels_run_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter the device is a CPU, which has kernels of its own."""
    if IS_INTERPRETED:
        monkeypatch.setattr(quantization, "_has_cpu_kernel", lambda shape, like: False)
        monkeypatch.setattr(quantization, "_runs_gpu_kernel", lambda inputs: True)


def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return numbers.to(DEVICE, dtype)


def assert_exact(
    actual: torch.Tensor, inputs: torch.Tensor, matrix: Int8Matrix | Int4Matrix
) -> None:
    """Assert that a product is the exact one, but for the rounding of its sums and its result."""
    weights = replace(matrix, scales=matrix.scales.double()).dequantized()
    expected = inputs.double() @ weights.T
    magnitude = inputs.double().abs() @ weights.T.abs()
    assert actual.dtype is inputs.dtype
    # The interpreter cuts bfloat16 off in place of rounding it.
    eps = torch.finfo(actual.dtype).eps / (1 if IS_INTERPRETED else 2)
    allowed = eps * expected.abs() + 2**-16 * magnitude
    assert ((actual.double() - expected).abs() <= allowed).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 2, 16, 17, 33, MOST_ROWS])
@pytest.mark.parametrize(
    ("num_outputs", "num_inputs"), [(64, 128), (200, 384), (130, 2432), (1, 640)]
)
@pytest.mark.parametrize("kind", [Int8Matrix, Int4Matrix])
def test_products_are_exact_but_for_rounding(
    kind: type[Int8Matrix | Int4Matrix],
    num_outputs: int,
    num_inputs: int,
    num_rows: int,
    dtype: torch.dtype,
) -> None:
    """Cover partial tiles of rows and outputs, and one and several splits of the inputs."""
    matrix = kind.of(drawn(num_outputs, num_inputs, dtype=dtype))
    inputs = drawn(num_rows, num_inputs, dtype=dtype, seed=num_rows)
    assert_exact(matrix.product(inputs), inputs, matrix)


@pytest.mark.parametrize("num_inputs", [1, 40, 700, 1001])
def test_int8_products_take_any_number_of_inputs(num_inputs: int) -> None:
    matrix = Int8Matrix.of(drawn(70, num_inputs))
    inputs = drawn(5, num_inputs, seed=1)
    assert_exact(matrix.product(inputs), inputs, matrix)


@pytest.mark.parametrize("group", [32, 64])
@pytest.mark.parametrize("num_groups", [2, 6, 34])
def test_int4_products_take_groups_of_each_size(group: int, num_groups: int) -> None:
    draw = torch.Generator().manual_seed(group)
    nibbles = torch.randint(0, 256, (70, group * num_groups // 2), generator=draw)
    scales = drawn(num_groups, 70, seed=2)
    matrix = Int4Matrix(nibbles.to(DEVICE, torch.uint8), scales.T)
    inputs = drawn(5, group * num_groups, seed=1)
    assert_exact(matrix.product(inputs), inputs, matrix)


def test_int4_halves_without_whole_groups_are_dequantised() -> None:
    matrix = Int4Matrix.of(drawn(70, 192))
    inputs = drawn(5, 192, seed=1)
    expected = torch.nn.functional.linear(inputs, matrix.dequantized())
    assert torch.equal(matrix.product(inputs), expected)


@pytest.mark.parametrize("kind", [Int8Matrix, Int4Matrix])
def test_a_row_s_product_is_the_same_beside_others_and_in_each_run(
    kind: type[Int8Matrix | Int4Matrix],
) -> None:
    """Bit for bit, among tiles of the same size."""
    matrix = kind.of(drawn(130, 2048))
    inputs = drawn(7, 2048, seed=1)
    together = matrix.product(inputs)
    for row in range(7):
        assert torch.equal(matrix.product(inputs[row : row + 1])[0], together[row])
    assert torch.equal(matrix.product(inputs), together)


@pytest.mark.parametrize("num_outputs", [64, 2200])
def test_inputs_are_divided_where_the_outputs_are_too_few(
    num_outputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The products of several splits and of one are the same but for rounding."""
    matrix = Int8Matrix.of(drawn(num_outputs, 1024))
    inputs = drawn(3, 1024, seed=1)
    assert_exact(matrix.product(inputs), inputs, matrix)
    monkeypatch.setattr(weight_kernels, "_PROGRAMS", 1)
    assert_exact(matrix.product(inputs), inputs, matrix)


def hard_rows(width: int) -> torch.Tensor:
    """Return rows of several magnitudes: one of zeros, one with an infinity, one with a NaN."""
    rows = drawn(6, width, seed=width)
    rows[1] = 0
    rows[2] *= 1e-30
    rows[3] *= 1e30
    rows[4, width // 2] = float("inf")
    rows[5, width // 2] = float("nan")
    return rows


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("width", [3, 48, 300, 4096, 14336])
def test_fp8_rows_are_scaled_as_in_torch(width: int) -> None:
    """The interpreter rounds to e4m3 wrongly: the kernel stores what it would round."""
    rows = hard_rows(width)
    scaled = torch.empty(rows.shape, device=DEVICE)
    scales = torch.empty(len(rows), device=DEVICE)
    padded = 1 << (width - 1).bit_length()
    weight_kernels._fp8_row[(len(rows),)](
        rows, scaled, scales, width, WIDTH_PAD=padded, LARGEST=quantization._MAX_E4M3
    )
    values, expected = quantization._fp8(rows)
    assert torch.equal(scales[:5], expected[:5])
    assert torch.equal(scaled.to(torch.float8_e4m3fn)[:4].float(), values[:4].float())
    assert scaled[4:, width // 2].isnan().all()


@needs_hopper
@pytest.mark.parametrize("num_rows", [1, 64, 300])
@pytest.mark.parametrize("width", [48, 300, 4096, 14336])
def test_fp8_rows_are_those_of_torch(width: int, num_rows: int) -> None:
    rows = drawn(num_rows, width, seed=width)
    rows[num_rows // 2] = 0
    values, scales = weight_kernels.fp8_rows(rows, quantization._MAX_E4M3)
    expected, expected_scales = quantization._fp8(rows)
    assert torch.equal(scales, expected_scales)
    assert torch.equal(values.float(), expected.float())


@needs_hopper
@pytest.mark.parametrize("kind", [Int8Matrix, Int4Matrix, Fp8Matrix])
def test_products_in_a_graph_are_those_outside(
    kind: type[Int8Matrix | Int4Matrix | Fp8Matrix],
) -> None:
    matrix = kind.of(drawn(256, 2048))
    inputs = drawn(4, 2048, seed=1)
    replay = cuda_capture()(lambda: matrix.product(inputs))
    inputs.copy_(drawn(4, 2048, seed=2))
    assert torch.equal(replay(), matrix.product(inputs))
