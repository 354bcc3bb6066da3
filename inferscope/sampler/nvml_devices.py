"""NVML's binding, loaded on demand, and the devices that it lists."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

from inferscope.sampler.source import Unavailable

T = TypeVar("T")

_AMD = Path("/dev/kfd")
_FOR_GOOD = ("NOT_SUPPORTED", "NO_PERMISSION", "FUNCTION_NOT_FOUND", "INVALID_ARGUMENT")
"""Errors that a query returns permanently; MIG and old devices return them for many queries."""


class Instance(NamedTuple):
    """A MIG instance of a device."""

    uuid: str
    handle: Any
    gpu_instance_id: int


class Device(NamedTuple):
    """A whole device, with its MIG instances if MIG is enabled."""

    uuid: str
    name: str
    handle: Any
    instances: tuple[Instance, ...]
    is_divided: bool


def open_nvml() -> ModuleType:
    """Load and initialise NVML's binding; the caller ends it with `nvmlShutdown`.

    Raises:
        Unavailable: the binding or the driver is missing, or access is denied.
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
    """Return the devices whose index or UUID prefix is in `wanted`; all if it is empty.

    Raises:
        Unavailable: no device matches.
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
        raise Unavailable(f"the driver lists no device{among}. Give this container a device.")
    return found


def ask(nvml: ModuleType, call: Callable[[], T]) -> T | None:
    """Return the result of a query, None if this device never supports it.

    Raises:
        NVMLError: the query failed for another reason.
    """
    try:
        return call()
    except nvml.NVMLError as error:
        if error.value in [getattr(nvml, f"NVML_ERROR_{name}") for name in _FOR_GOOD]:
            return None
        raise


def text(value: Any) -> str:
    """Return a binding's string as `str`: bindings before 11.5 return bytes."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


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
            if error.value == nvml.NVML_ERROR_NOT_FOUND:  # an index without an instance
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
            return "this machine has an AMD device, whose counters are not supported."
        return (
            "no NVIDIA driver is loaded. Start a container with the driver "
            "(docker run --gpus all, or the NVIDIA device plugin)."
        )
    if code == nvml.NVML_ERROR_NO_PERMISSION:
        return "permission denied on the device files. Run as a user with access to the GPU."
    if code == nvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH:
        return "the driver's library and kernel module differ in version. Restart the machine."
    return f"NVML does not initialise: {error}."
