"""What devices can do at best, by their makers: dense matrix throughput and memory bandwidth.

Dense figures without sparsity, from the vendors' datasheets. A device that is not here is given
conservative defaults, and every number that rests on them says `roofline`; the online fit replaces
them within the first few hundred steps anyway.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Peaks(NamedTuple):
    """Peak rates of one device."""

    bf16_flops_s: float
    memory_bytes_s: float
    launch_s: float
    """Host time to launch one operation."""
    is_known: bool


_TERA, _GIGA = 1e12, 1e9
_GPU_LAUNCH_S = 4e-6

_GPUS: tuple[tuple[str, float, float], ...] = (
    ("A100-SXM4-40GB", 312, 1555),
    ("A100-PCIE-40GB", 312, 1555),
    ("A100 80GB PCIe", 312, 1935),
    ("A100-SXM4-80GB", 312, 2039),
    ("H100 NVL", 835, 3900),
    ("H100 PCIe", 756, 2000),
    ("H100", 989, 3350),
    ("H200", 989, 4800),
    ("GH200", 989, 4000),
    ("GB200", 2500, 8000),
    ("B200", 2250, 7700),
    ("L40S", 362, 864),
    ("L40", 181, 864),
    ("L4", 121, 300),
    ("A10G", 70, 600),
    ("A10", 125, 600),
    ("T4", 65, 320),
    ("RTX 4090", 165, 1008),
    ("RTX 5090", 209.5, 1792),
    ("MI300X", 1307, 5300),
)
"""Words of the device's name, bf16 TFLOP/s (fp16 on T4), memory GB/s. The longer names first."""

_ONE_CPU_THREAD = Peaks(40e9, 8e9, 6e-6, False)
_UNKNOWN_GPU = Peaks(300 * _TERA, 2000 * _GIGA, _GPU_LAUNCH_S, False)


def peaks_of(device: str, num_threads: int = 1) -> Peaks:
    """Return the peaks of a device by its name; a CPU counts by its computing threads."""
    for name, tflops, gbytes in _GPUS:
        if re.search(rf"\b{name}\b", device):
            return Peaks(tflops * _TERA, gbytes * _GIGA, _GPU_LAUNCH_S, True)
    if not device or "cpu" in device.lower():
        threads = max(1, num_threads)
        one = _ONE_CPU_THREAD
        return one._replace(
            bf16_flops_s=one.bf16_flops_s * threads,
            memory_bytes_s=one.memory_bytes_s * min(threads, 4),
        )
    return _UNKNOWN_GPU
