"""NVML, loaded when it is needed, and the devices that it shows."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

from inferscope.counters.source import Unavailable

Told = TypeVar("Told")

_AMD = Path("/dev/kfd")
_FOR_GOOD = ("NOT_SUPPORTED", "NO_PERMISSION", "FUNCTION_NOT_FOUND", "INVALID_ARGUMENT")
"""What is refused like this is refused each time: of MIG devices and of old ones, much is."""


class Instance(NamedTuple):
    """A MIG instance of a device."""

    uuid: str
    handle: Any
    gpu_instance_id: int


class Device(NamedTuple):
    """A device, whole, and its MIG instances where it is divided."""

    uuid: str
    name: str
    handle: Any
    instances: tuple[Instance, ...]
    is_divided: bool


def open_nvml() -> ModuleType:
    """Load NVML's binding and begin with it; `nvmlShutdown` ends it.

    Raises:
        Unavailable: there is no binding, no driver, or no right to use it.
    """
    try:
        nvml = importlib.import_module("pynvml")
    except ModuleNotFoundError:
        raise Unavailable('nvidia-ml-py is missing: pip install "inferscope-llm[gpu]"') from None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise Unavailable(_why_not(nvml, error)) from None
    return nvml


def find_devices(nvml: ModuleType, wanted: Sequence[str]) -> list[Device]:
    """Return the devices whose index or uuid (or its beginning) is wanted; none means all.

    Raises:
        Unavailable: there are none of them.
    """
    found = []
    try:
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            device = _device(nvml, handle)
            uuids = (device.uuid, *(instance.uuid for instance in device.instances))
            if not wanted or any(_is_named(word, index, uuids) for word in wanted):
                found.append(device)
    except nvml.NVMLError as error:
        raise Unavailable(f"NVML cannot list the devices: {error}.") from None
    if not found:
        among = f" among {', '.join(wanted)}" if wanted else ""
        raise Unavailable(f"the driver shows no device{among}. Is one given to this container?")
    return found


def ask(nvml: ModuleType, call: Callable[[], Told]) -> Told | None:
    """Return what NVML tells, None where it never will of this device.

    Raises:
        NVMLError: it could not for another reason.
    """
    try:
        return call()
    except nvml.NVMLError as error:
        if error.value in [getattr(nvml, f"NVML_ERROR_{name}") for name in _FOR_GOOD]:
            return None
        raise


def text(told: Any) -> str:
    """Return a string as one: bindings before 11.5 give bytes."""
    return told.decode("utf-8", "replace") if isinstance(told, bytes) else str(told)


def _device(nvml: ModuleType, handle: Any) -> Device:
    mode = ask(nvml, lambda: nvml.nvmlDeviceGetMigMode(handle))
    is_divided = mode is not None and mode[0] == nvml.NVML_DEVICE_MIG_ENABLE
    return Device(
        text(nvml.nvmlDeviceGetUUID(handle)),
        text(nvml.nvmlDeviceGetName(handle)),
        handle,
        tuple(_instances(nvml, handle)) if is_divided else (),
        is_divided,
    )


def _instances(nvml: ModuleType, handle: Any) -> list[Instance]:
    found = []
    for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            instance = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
        except nvml.NVMLError as error:
            if error.value == nvml.NVML_ERROR_NOT_FOUND:  # places that are not taken
                continue
            raise
        uuid = text(nvml.nvmlDeviceGetUUID(instance))
        found.append(Instance(uuid, instance, nvml.nvmlDeviceGetGpuInstanceId(instance)))
    return found


def _is_named(word: str, index: int, uuids: Sequence[str]) -> bool:
    return word == str(index) if word.isdecimal() else any(u.startswith(word) for u in uuids)


def _why_not(nvml: ModuleType, error: Any) -> str:
    code = error.value
    if code in (nvml.NVML_ERROR_LIBRARY_NOT_FOUND, nvml.NVML_ERROR_DRIVER_NOT_LOADED):
        if _AMD.exists():
            return "the device here is AMD's, whose counters are unsupported."
        return (
            "no NVIDIA driver is loaded here. In a container, start it with the driver "
            "(docker run --gpus all, or the NVIDIA device plugin)."
        )
    if code == nvml.NVML_ERROR_NO_PERMISSION:
        return "the device files may not be opened. Run as a user who may use the GPU."
    if code == nvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH:
        return "the driver's library and kernel module differ in version. Restart the machine."
    return f"NVML does not begin: {error}."
