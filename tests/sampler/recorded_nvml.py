"""The driver's library as a recording: what stands behind the binding's C calls is replayed.

The binding itself is the real one, with its structures, conversions and exceptions: only
`libnvidia-ml.so.1` is replaced, by an object whose functions fill in what the caller points to.
"""

from __future__ import annotations

import ctypes
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pynvml

H200 = Path(__file__).parent / "recordings" / "h200.json"
MIG_HANDLES = 1000


@dataclass
class Recording:
    """What a driver would tell, turn by turn.

    Attributes:
        turn: which of a device's turns is now.
        processes: by pid, the memory that it holds.
        use: by pid, the share of SM time in percent.
        unsupported: functions that this driver refuses.
        fails: functions that fail, with which code.
        is_loaded: whether the kernel's part is there.
        calls: by function, how often it was called.
    """

    document: dict[str, Any]
    turn: int = 0
    processes: dict[int, int] = field(default_factory=dict)
    use: dict[int, int] = field(default_factory=dict)
    unsupported: set[str] = field(default_factory=set)
    fails: dict[str, int] = field(default_factory=dict)
    is_loaded: bool = True
    calls: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, path: Path) -> Recording:
        return cls(json.loads(path.read_text(encoding="utf-8")))

    def device(self, handle: Any) -> dict[str, Any]:
        number = ctypes.cast(handle, ctypes.c_void_p).value or 0
        found: dict[str, Any] = self.document["devices"][number % MIG_HANDLES - 1]
        return found

    def now(self, handle: Any) -> dict[str, Any]:
        found: dict[str, Any] = self.device(handle)["turns"][self.turn]
        return found


class RecordedLibrary:
    """Stands where the binding keeps the loaded library."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._samples: dict[int, tuple[Any, int, int]] = {}
        self._xid_told = -1

    def __getattr__(self, name: str) -> Any:
        function = type(self).__dict__.get(f"_{name}")
        if function is None:
            raise AttributeError(name)
        recording = self._recording

        def call(*arguments: Any) -> int:
            recording.calls[name] = recording.calls.get(name, 0) + 1
            if name in recording.unsupported:
                return int(pynvml.NVML_ERROR_NOT_SUPPORTED)
            if name in recording.fails:
                return recording.fails[name]
            is_of_device = arguments and isinstance(arguments[0], pynvml.c_nvmlDevice_t)
            if is_of_device and recording.now(arguments[0]).get("error"):
                return int(recording.now(arguments[0])["error"])
            return int(function(self, *arguments) or 0)

        return call

    # --- the machine --------------------------------------------------------------------------

    def _nvmlInitWithFlags(self, flags: Any) -> int:
        return 0 if self._recording.is_loaded else int(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)

    def _nvmlShutdown(self) -> None:
        pass

    def _nvmlSystemGetDriverVersion(self, into: Any, size: Any) -> None:
        into.value = self._recording.document["driver"].encode()

    def _nvmlDeviceGetCount_v2(self, into: Any) -> None:
        into._obj.value = len(self._recording.document["devices"])

    def _nvmlDeviceGetHandleByIndex_v2(self, index: Any, into: Any) -> None:
        point(into, index.value + 1)

    # --- a device -----------------------------------------------------------------------------

    def _nvmlDeviceGetUUID(self, handle: Any, into: Any, size: Any) -> None:
        number = ctypes.cast(handle, ctypes.c_void_p).value or 0
        device = self._recording.device(handle)
        place = number // MIG_HANDLES
        into.value = (device["mig"][place - 1] if place else device["uuid"]).encode()

    def _nvmlDeviceGetName(self, handle: Any, into: Any, size: Any) -> None:
        into.value = self._recording.device(handle)["name"].encode()

    def _nvmlDeviceGetUtilizationRates(self, handle: Any, into: Any) -> int:
        if self._recording.device(handle)["mig"]:
            return int(pynvml.NVML_ERROR_NOT_SUPPORTED)
        into._obj.gpu, into._obj.memory = self._recording.now(handle)["utilization"]
        return 0

    def _nvmlDeviceGetPowerUsage(self, handle: Any, into: Any) -> None:
        into._obj.value = self._recording.now(handle)["power_mw"]

    def _nvmlDeviceGetEnforcedPowerLimit(self, handle: Any, into: Any) -> None:
        into._obj.value = self._recording.device(handle)["power_limit_mw"]

    def _nvmlDeviceGetTotalEnergyConsumption(self, handle: Any, into: Any) -> None:
        into._obj.value = self._recording.now(handle)["energy_mj"]

    def _nvmlDeviceGetClockInfo(self, handle: Any, kind: Any, into: Any) -> None:
        name = "sm" if kind.value == pynvml.NVML_CLOCK_SM else "memory"
        into._obj.value = self._recording.now(handle)["clock_mhz"][name]

    def _nvmlDeviceGetMaxClockInfo(self, handle: Any, kind: Any, into: Any) -> None:
        into._obj.value = self._recording.device(handle)["max_memory_clock_mhz"]

    def _nvmlDeviceGetMemoryBusWidth(self, handle: Any, into: Any) -> None:
        into._obj.value = self._recording.device(handle)["bus_width_bits"]

    def _nvmlDeviceGetTemperature(self, handle: Any, sensor: Any, into: Any) -> None:
        into._obj.value = self._recording.now(handle)["temperature_c"]

    def _nvmlDeviceGetCurrentClocksEventReasons(self, handle: Any, into: Any) -> None:
        into._obj.value = self._recording.now(handle)["event_reasons"]

    def _nvmlDeviceGetMemoryInfo(self, handle: Any, into: Any) -> None:
        device = self._recording.device(handle)
        into._obj.total = device["memory_total_bytes"]
        into._obj.used = self._recording.now(handle)["memory_used_bytes"]

    # --- its processes ------------------------------------------------------------------------

    def _nvmlDeviceGetComputeRunningProcesses_v3(self, handle: Any, num: Any, into: Any) -> int:
        there = self._recording.processes
        num._obj.value, room = len(there), num._obj.value
        if not there:
            return 0
        if into is None or room < len(there):
            return int(pynvml.NVML_ERROR_INSUFFICIENT_SIZE)
        for place, (pid, num_bytes) in enumerate(there.items()):
            into[place].pid, into[place].usedGpuMemory = pid, num_bytes
        return 0

    def _nvmlDeviceGetProcessUtilization(
        self, handle: Any, into: Any, num: Any, since_us: Any
    ) -> int:
        use = self._recording.use
        now_us = 1_000_000 + self._recording.turn
        if not use or now_us <= since_us.value:
            return int(pynvml.NVML_ERROR_NOT_FOUND)
        num._obj.value = len(use)
        if into is None:
            return int(pynvml.NVML_ERROR_INSUFFICIENT_SIZE)
        for place, (pid, percent) in enumerate(use.items()):
            into[place].pid, into[place].smUtil = pid, percent
            into[place].timeStamp = now_us
        return 0

    # --- its instances ------------------------------------------------------------------------

    def _nvmlDeviceGetMigMode(self, handle: Any, now: Any, pending: Any) -> None:
        now._obj.value = bool(self._recording.device(handle)["mig"])

    def _nvmlDeviceGetMaxMigDeviceCount(self, handle: Any, into: Any) -> None:
        into._obj.value = 7

    def _nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Any, index: Any, into: Any) -> int:
        if index.value >= len(self._recording.device(handle)["mig"]):
            return int(pynvml.NVML_ERROR_NOT_FOUND)
        number = ctypes.cast(handle, ctypes.c_void_p).value or 0
        point(into, number + MIG_HANDLES * (index.value + 1))
        return 0

    def _nvmlDeviceGetGpuInstanceId(self, handle: Any, into: Any) -> None:
        into._obj.value = (ctypes.cast(handle, ctypes.c_void_p).value or 0) // MIG_HANDLES

    # --- its errors ---------------------------------------------------------------------------

    def _nvmlEventSetCreate(self, into: Any) -> None:
        point(into, 1)

    def _nvmlDeviceRegisterEvents(self, handle: Any, kinds: Any, events: Any) -> None:
        assert kinds.value == pynvml.nvmlEventTypeXidCriticalError

    def _nvmlEventSetWait_v2(self, events: Any, into: Any, timeout_ms: Any) -> int:
        assert timeout_ms.value == 0  # the sampler never waits for an error
        recording = self._recording
        xid = recording.document["devices"][0]["turns"][recording.turn].get("xid")
        if xid is None or self._xid_told == recording.turn:
            return int(pynvml.NVML_ERROR_TIMEOUT)
        self._xid_told = recording.turn
        into._obj.eventData = xid
        ctypes.c_void_p.from_buffer(into._obj, pynvml.c_nvmlEventData_t.device.offset).value = 1
        return 0

    def _nvmlEventSetFree(self, events: Any) -> None:
        pass

    # --- GPM ----------------------------------------------------------------------------------

    def _nvmlGpmQueryDeviceSupport(self, handle: Any, into: Any) -> None:
        into._obj.isSupportedDevice = self._recording.device(handle)["has_gpm"]

    def _nvmlGpmSampleAlloc(self, into: Any) -> None:
        point(into, 0x100 + len(self._samples))
        self._samples[0x100 + len(self._samples)] = (None, 0, 0)

    def _nvmlGpmSampleFree(self, sample: Any) -> None:
        del self._samples[ctypes.cast(sample, ctypes.c_void_p).value or 0]

    def _nvmlGpmSampleGet(self, handle: Any, sample: Any) -> None:
        where = ctypes.cast(sample, ctypes.c_void_p).value or 0
        self._samples[where] = (handle, self._recording.turn, 0)

    def _nvmlGpmMigSampleGet(self, handle: Any, instance_id: Any, sample: Any) -> None:
        where = ctypes.cast(sample, ctypes.c_void_p).value or 0
        self._samples[where] = (handle, self._recording.turn, int(instance_id))

    def _nvmlGpmMetricsGet(self, into: Any) -> int:
        request = into._obj
        places = (request.sample1, request.sample2)
        older, newer = (self._samples[ctypes.cast(at, ctypes.c_void_p).value or 0] for at in places)
        assert older[1] <= newer[1]  # the older one first
        turn_read = self._recording.device(newer[0])["turns"][newer[1]]
        for place in range(request.numMetrics):
            metric = request.metrics[place]
            name = str(metric.metricId)
            metric.nvmlReturn = turn_read.get("gpm_error", {}).get(name, 0)
            metric.value = turn_read["gpm"][name] / (newer[2] or 1)
        return 0


def point(into: Any, number: int) -> None:
    """Store a pointer that is only a number."""
    ctypes.c_void_p.from_buffer(into._obj).value = number
