"""Device of a model: lookup, names, maximum clocks and step timer."""

from __future__ import annotations

import importlib
from functools import cache
from importlib.util import find_spec

import torch

from inferscope.errors import BadInput
from inferscope.probe import EventTimer, StepTimer, TorchEvents

AUTO = "auto"


def find_device(name: str) -> torch.device:
    """Return the device with this name; `auto` is the first GPU, else the CPU.

    Raises:
        BadInput: the device is not available.
    """
    if name == AUTO:
        name = "cuda:0" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    # torch raises these for a missing driver, an unknown index and a build without the backend.
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise BadInput(f"cannot use device {name!r}: {reason}. Use auto, cpu, or cuda:0.") from None
    return device


@cache
def has_triton() -> bool:
    """Return whether Triton is installed, whose kernels serve GPUs."""
    return find_spec("triton") is not None


def device_name(device: torch.device) -> str:
    """Return the vendor's name of a GPU, or torch's name of a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def device_uuid(device: torch.device) -> str:
    """Return a GPU's UUID in NVML's format; empty for a CPU or an older torch."""
    if device.type != "cuda":
        return ""
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return "" if uuid is None else f"GPU-{uuid}"


def highest_clocks_mhz(device: torch.device) -> tuple[int, int] | None:
    """Return the maximum SM and memory clocks of a GPU in MHz; None if unavailable."""
    uuid = device_uuid(device)
    if not uuid:
        return None
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception:  # the extra or NVML is missing; the error types are NVML's own
        return None
    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        sm_mhz, memory_mhz = (
            nvml.nvmlDeviceGetMaxClockInfo(handle, clock)
            for clock in (nvml.NVML_CLOCK_SM, nvml.NVML_CLOCK_MEM)
        )
    except nvml.NVMLError:
        return None
    finally:
        nvml.nvmlShutdown()
    return int(sm_mhz), int(memory_mhz)


def step_timer(device: torch.device) -> StepTimer | None:
    """Return a timer on the device's own clock; None if the host's clock suffices."""
    return EventTimer(TorchEvents(device)) if device.type == "cuda" else None


def has_fast_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether a device multiplies matrices of a dtype at least as fast as in float32.

    A CPU does where oneDNN has kernels, which takes AVX-512 or similar for 16 bits. Without them
    torch's own loops run: 6 times slower than float32 at 256 tokens, on a CPU with AVX2 alone.
    """
    if device.type != "cpu" or dtype is torch.float32:
        return True
    kind = "bf16" if dtype is torch.bfloat16 else "fp16"
    is_supported = getattr(torch.ops.mkldnn, f"_is_mkldnn_{kind}_supported", None)
    return is_supported is not None and bool(is_supported())
