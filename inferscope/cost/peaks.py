"""Peak rates of devices by manufacturer: dense matrix throughput and memory bandwidth.

Dense figures, without sparsity, from the vendors' datasheets (where one gives the sparse figure
alone, half of it). A device that is not here is given conservative defaults, and every number that
rests on them says `roofline`; `inferscope calibrate` measures what this device really does, and the
online fit replaces both within the first few hundred steps.

    A100           nvidia.com/en-us/data-center/a100
    H100, H200     nvidia.com/en-us/data-center/h100, …/h200
    GH200          nvidia.com/en-us/data-center/grace-hopper-superchip
    B200, GB200    nvidia.com/en-us/data-center/dgx-b200, …/gb200-nvl72
    L4, L40, L40S  nvidia.com/en-us/data-center/l4, …/l40, …/l40s
    A10, A10G, T4  nvidia.com/en-us/data-center/products/a10-gpu, …/tesla-t4; A10G: AWS G5
    RTX 4090, 5090 the Ada and Blackwell architecture whitepapers (fp32 accumulation)
    MI300X         amd.com/en/products/accelerators/instinct/mi300/mi300x.html

312 is the A100's bf16 TFLOP/s and not, as some write, its FLOPs per byte: those are 153 to 201.
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
    fp8_flops_s: float | None = None
    """FP8 rate in FLOPs per second; None if the device has no fp8, or is unknown."""


_TERA, _GIGA = 1e12, 1e9
_GPU_LAUNCH_S = 4e-6

_GPUS: tuple[tuple[str, float, float | None, float], ...] = (
    ("A100-SXM4-40GB", 312, None, 1555),
    ("A100-PCIE-40GB", 312, None, 1555),
    ("A100 80GB PCIe", 312, None, 1935),
    ("A100-SXM4-80GB", 312, None, 2039),
    ("H100 NVL", 835, 1671, 3900),
    ("H100 PCIe", 756, 1513, 2000),
    ("H100", 989, 1979, 3350),
    ("H200 NVL", 835, 1671, 4800),
    ("H200", 989, 1979, 4800),
    ("GH200", 989, 1979, 4000),
    ("GB200", 2500, 5000, 8000),
    ("B200", 2250, 4500, 7700),
    ("L40S", 362, 733, 864),
    ("L40", 181, 362, 864),
    ("L4", 121, 242, 300),
    ("A10G", 70, None, 600),
    ("A10", 125, None, 600),
    ("T4", 65, None, 320),
    ("RTX 4090", 165, 330, 1008),
    ("RTX 5090", 209.5, 419, 1792),
    ("MI300X", 1307, 2615, 5300),
)
"""Words of the device's name, bf16 TFLOP/s (fp16 on T4), fp8 TFLOP/s, memory GB/s, with the longer
names first."""

_ONE_CPU_THREAD = Peaks(40e9, 8e9, 6e-6, False)
_UNKNOWN_GPU = Peaks(300 * _TERA, 2000 * _GIGA, _GPU_LAUNCH_S, False)


def peaks_of(device: str, num_threads: int = 1) -> Peaks:
    """Return the peaks of a device by its name; a CPU counts by its computing threads."""
    for name, bf16_tflops, fp8_tflops, gbytes in _GPUS:
        if re.search(rf"\b{name}\b", device):
            fp8 = None if fp8_tflops is None else fp8_tflops * _TERA
            return Peaks(bf16_tflops * _TERA, gbytes * _GIGA, _GPU_LAUNCH_S, True, fp8)
    if not device or "cpu" in device.lower():
        threads = max(1, num_threads)
        one = _ONE_CPU_THREAD
        return one._replace(
            bf16_flops_s=one.bf16_flops_s * threads,
            memory_bytes_s=one.memory_bytes_s * min(threads, 4),
        )
    return _UNKNOWN_GPU
