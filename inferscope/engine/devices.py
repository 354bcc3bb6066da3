"""Which device a model runs on, what it is called, and how its steps are timed."""

from __future__ import annotations

import importlib

import torch

from inferscope.errors import BadInput
from inferscope.probe import EventTimer, StepTimer, TorchEvents

AUTO = "auto"


def find_device(name: str) -> torch.device:
    """Return a device by its name; `auto` is the first GPU, else the CPU.

    Raises:
        BadInput: it is not there.
    """
    if name == AUTO:
        name = "cuda:0" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    # No driver, no such index, not compiled in: torch has a type for each, all of these families.
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise BadInput(f"cannot use device {name!r}: {reason}. Use auto, cpu, or cuda:0.") from None
    return device


def device_name(device: torch.device) -> str:
    """Return what the vendor calls a GPU, and what torch calls a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def device_uuid(device: torch.device) -> str:
    """Return a GPU's uuid as NVML writes it, empty for a CPU and for a torch that cannot tell."""
    if device.type != "cuda":
        return ""
    told = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return "" if told is None else f"GPU-{told}"


def highest_clocks_mhz(device: torch.device) -> tuple[int, int] | None:
    """Return the highest clocks of a GPU's SMs and memory; None where nobody says."""
    uuid = device_uuid(device)
    if not uuid:
        return None
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception:  # the extra is not there, or NVML is not: of its own kinds of error
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
    """Return what times steps on a device by its own clock; None where the host's clock does."""
    return EventTimer(TorchEvents(device)) if device.type == "cuda" else None
