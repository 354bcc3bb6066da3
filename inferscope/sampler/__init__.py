"""The sampler: a process of its own that writes what devices count into a ring of its own."""

from inferscope.sampler.dcgm import DEFAULT_URL
from inferscope.sampler.nvml_devices import Device, ask, find_devices, open_nvml
from inferscope.sampler.privilege import become, owner_of
from inferscope.sampler.processes import observed
from inferscope.sampler.sampler import Settings, SourceReading, preload, read_once, sample
from inferscope.sampler.source import AUTO, DCGM_URL, SOURCES, Unavailable, has_nvidia

__all__ = [
    "AUTO",
    "DCGM_URL",
    "DEFAULT_URL",
    "SOURCES",
    "Device",
    "Settings",
    "SourceReading",
    "Unavailable",
    "ask",
    "become",
    "find_devices",
    "has_nvidia",
    "observed",
    "open_nvml",
    "owner_of",
    "preload",
    "read_once",
    "sample",
]
