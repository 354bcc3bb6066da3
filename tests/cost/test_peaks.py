from __future__ import annotations

import pytest

from inferscope.cost.peaks import peaks_of


@pytest.mark.parametrize(
    ("device", "tflops", "gbytes_s"),
    [
        ("NVIDIA A100-SXM4-40GB", 312, 1555),
        ("NVIDIA A100-SXM4-80GB", 312, 2039),
        ("NVIDIA A100-PCIE-40GB", 312, 1555),
        ("NVIDIA A100 80GB PCIe", 312, 1935),
        ("NVIDIA A10", 125, 600),
        ("NVIDIA A10G", 70, 600),
        ("NVIDIA L4", 121, 300),
        ("NVIDIA L40", 181, 864),
        ("NVIDIA L40S", 362, 864),
        ("NVIDIA H100 80GB HBM3", 989, 3350),
        ("NVIDIA H100 PCIe", 756, 2000),
        ("NVIDIA H100 NVL", 835, 3900),
        ("NVIDIA H200", 989, 4800),
        ("NVIDIA H200 NVL", 835, 4800),
        ("NVIDIA GeForce RTX 5090", 209.5, 1792),
        ("NVIDIA GH200 480GB", 989, 4000),
        ("NVIDIA B200", 2250, 7700),
        ("NVIDIA GB200", 2500, 8000),
        ("Tesla T4", 65, 320),
        ("AMD Instinct MI300X", 1307, 5300),
    ],
)
def test_devices_with_similar_names_have_their_own_peaks(
    device: str, tflops: float, gbytes_s: float
) -> None:
    peaks = peaks_of(device)
    assert peaks.is_known
    assert (peaks.bf16_flops_s / 1e12, peaks.memory_bytes_s / 1e9) == (tflops, gbytes_s)


def test_an_unknown_device_is_reported_as_unknown() -> None:
    assert not peaks_of("NVIDIA Z9000").is_known
    assert not peaks_of("NVIDIA A1000").is_known


def test_a_cpu_counts_by_its_threads_its_memory_by_four_at_most() -> None:
    one, many = peaks_of("cpu"), peaks_of("cpu", 16)
    assert many.bf16_flops_s == 16 * one.bf16_flops_s
    assert many.memory_bytes_s == 4 * one.memory_bytes_s
    assert peaks_of("") == one


@pytest.mark.parametrize(
    ("device", "ridge"),
    [
        ("NVIDIA A100-SXM4-40GB", 201),
        ("NVIDIA A100 80GB PCIe", 161),
        ("NVIDIA A100-SXM4-80GB", 153),
        ("NVIDIA H100 80GB HBM3", 295),
        ("NVIDIA H100 PCIe", 378),
        ("NVIDIA H100 NVL", 214),
        ("NVIDIA H200", 206),
        ("NVIDIA B200", 292),
        ("NVIDIA L4", 403),
        ("Tesla T4", 203),
        ("NVIDIA GeForce RTX 4090", 164),
        ("AMD Instinct MI300X", 247),
    ],
)
def test_the_ridge_follows_from_both_columns(device: str, ridge: float) -> None:
    peaks = peaks_of(device)
    assert peaks.bf16_flops_s / peaks.memory_bytes_s == pytest.approx(ridge, abs=1)


def test_where_there_is_fp8_it_is_twice_bf16_and_elsewhere_unknown() -> None:
    for device in ("NVIDIA H200", "NVIDIA L40S", "NVIDIA B200", "AMD Instinct MI300X"):
        peaks = peaks_of(device)
        assert peaks.fp8_flops_s is not None
        assert peaks.fp8_flops_s == pytest.approx(2 * peaks.bf16_flops_s, rel=0.02)
    for device in ("NVIDIA A100-SXM4-80GB", "Tesla T4", "cpu", "NVIDIA Z9000"):
        assert peaks_of(device).fp8_flops_s is None
