"""NVML: counters that every driver provides for every device, without privileges or disturbance.

Utilisation is the driver's: the share of the last sixth of a second, or second, in which a kernel
ran, not how much of the device the kernel used. Energy is the driver's counter, exact over windows
of 100 ms or more; power is its smoothed rate. On a MIG device, energy and power describe the
board, never an instance.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from inferscope.records import CounterSample
from inferscope.sampler.lost_devices import LostDevices
from inferscope.sampler.nvml_devices import Device, Instance, ask, find_devices, open_nvml, text
from inferscope.sampler.processes import Observed, holders, observed, sees_host
from inferscope.sampler.refused_devices import RefusedDevices
from inferscope.sampler.source import Claimer, Unavailable, facts, sample

SLOW_NS = 1_000_000_000
"""Interval in nanoseconds between reads of values that change slowly or are slow to read."""
_MOST_XIDS = 16
Gauge = Callable[[], float]


class NvmlSource:
    """Reader of NVML.

    Attributes:
        name: "nvml".
        period_ns: period of reads in nanoseconds.
    """

    name = "nvml"

    def __init__(
        self,
        folder: Path,
        claims: Claimer,
        *,
        period_ns: int,
        wanted: Sequence[str] = (),
    ) -> None:
        """Store the settings.

        Args:
            folder: ring directory, whose writers are not foreign processes.
            claims: claims of devices, shared with the other sources.
            period_ns: period of reads in nanoseconds.
            wanted: device indices or UUID prefixes; empty for all.
        """
        self.period_ns = period_ns
        self._folder = folder
        self._wanted = wanted
        self._nvml: ModuleType | None = None
        self._watched: list[_Watched] = []
        self._refused = RefusedDevices(self.name, claims, self._start)
        self._lost = LostDevices(self.name)
        self._events: Any = None
        self._xid_blocker = ""
        """Why the driver reports no device's Xid errors; empty if it does."""
        self._from_ns = self._slow_from_ns = 0
        self._sees_host = False

    def open(self, now_ns: int) -> list[CounterSample]:
        """Claim the devices; return their properties.

        Raises:
            Unavailable: there is no driver, no such device, or other samplers hold all of them.
        """
        nvml = self._nvml = open_nvml()
        self._sees_host = sees_host()
        self._from_ns = self._slow_from_ns = now_ns
        self._create_event_set(nvml)
        states: list[CounterSample] = []
        for device in find_devices(nvml, self._wanted):
            states += self._refused.begin(nvml, device, now_ns)
        if not self._watched:
            raise Unavailable(" ".join(dict.fromkeys(state.reason for state in states)))
        return states

    def read(self, now_ns: int) -> list[CounterSample]:
        """Return a sample of each device, and the Xid errors since the last read.

        Raises:
            Unavailable: no device answers any more.
        """
        nvml = self._nvml
        if nvml is None:
            raise Unavailable("the source is closed.")
        is_slow = now_ns - self._slow_from_ns >= SLOW_NS
        engines = observed(self._folder, now_ns) if is_slow else []
        samples: list[CounterSample] = []
        were_lost = self._lost.num == len(self._watched)
        for watched in self._watched:
            uuid = watched.device.uuid
            try:
                values = watched.fast()
                if is_slow:
                    values |= watched.slow()
                    values |= watched.device_processes(engines, sees_host=self._sees_host)
                    samples += self._sample_instances(nvml, watched, now_ns)
            except nvml.NVMLError as error:
                samples += self._lost.lose(uuid, now_ns, error)
                continue
            if self._lost.mark_answering(uuid):
                samples.append(facts(self.name, uuid, now_ns, self._facts(nvml, watched)))
            samples.append(
                sample(self.name, uuid, start_ns=self._from_ns, end_ns=now_ns, values=values)
            )
        if were_lost:
            # On the second failure only: the driver may still report the Xid of the last device.
            self._lost.check(len(self._watched))
        samples += self._xids(nvml, now_ns)
        samples += self._refused.ask_again(nvml, now_ns)
        self._from_ns = now_ns
        if is_slow:
            self._slow_from_ns = now_ns
        return samples

    def close(self) -> None:
        """Shut NVML down; safe to call twice."""
        nvml, self._nvml = self._nvml, None
        self._watched = []
        self._refused.forget()
        self._lost.forget()
        events, self._events = self._events, None
        if nvml is not None:
            with suppress(nvml.NVMLError):
                if events is not None:
                    nvml.nvmlEventSetFree(events)
                nvml.nvmlShutdown()

    def _start(self, nvml: ModuleType, device: Device, now_ns: int) -> list[CounterSample]:
        watched = _Watched(nvml, device)
        watched.xid_blocker = self._xid_blocker or self._register_xids(nvml, device)
        self._watched.append(watched)
        return [facts(self.name, device.uuid, now_ns, self._facts(nvml, watched))]

    def _facts(self, nvml: ModuleType, watched: _Watched) -> dict[str, str]:
        device = watched.device
        properties = {"name": device.name}
        version = ask(nvml, nvml.nvmlSystemGetDriverVersion)
        if version is not None:
            properties["driver"] = text(version)
        if device.is_divided:
            properties["mig"] = " ".join(instance.uuid for instance in device.instances)
        blocker = watched.xid_blocker
        properties["xid"] = f"unknown: {blocker}" if blocker else "told"
        if not self._sees_host:
            properties["foreign"] = (
                "unknown: the driver reports PIDs of the host's namespace, which this container "
                "cannot translate"
            )
        return properties

    def _sample_instances(
        self, nvml: ModuleType, watched: _Watched, now_ns: int
    ) -> list[CounterSample]:
        """Return a sample of each MIG instance with its memory, the only value per instance."""
        samples = []
        for instance in watched.device.instances:
            values = _memory(nvml, instance)
            if values:
                samples.append(
                    sample(
                        self.name,
                        instance.uuid,
                        start_ns=self._slow_from_ns,
                        end_ns=now_ns,
                        values=values,
                    )
                )
        return samples

    def _create_event_set(self, nvml: ModuleType) -> None:
        """Create the event set that receives the devices' Xid errors."""
        self._xid_blocker = ""
        try:
            self._events = nvml.nvmlEventSetCreate()
        except nvml.NVMLError as error:
            self._xid_blocker = f"the driver reports no errors ({error})"

    def _register_xids(self, nvml: ModuleType, device: Device) -> str:
        """Register a device's Xid errors; return why that failed, empty if it succeeded."""
        kinds = nvml.nvmlEventTypeXidCriticalError
        try:
            nvml.nvmlDeviceRegisterEvents(device.handle, kinds, self._events)
        except nvml.NVMLError as error:
            return f"the driver does not report this device's errors ({error})"
        return ""

    def _xids(self, nvml: ModuleType, now_ns: int) -> list[CounterSample]:
        """Return the Xid errors since the last read, one sample each."""
        samples: list[CounterSample] = []
        while self._events is not None and len(samples) < _MOST_XIDS:
            try:
                event = nvml.nvmlEventSetWait_v2(self._events, 0)
            except nvml.NVMLError:  # a timeout: there are no more
                break
            # By its handle: a device that fell off the bus no longer returns its UUID.
            address = _address(event.device)
            for watched in self._watched:
                if _address(watched.device.handle) == address:
                    values = {"xid": float(event.eventData)}
                    uuid, from_ns = watched.device.uuid, self._from_ns
                    samples.append(
                        sample(self.name, uuid, start_ns=from_ns, end_ns=now_ns, values=values)
                    )
        return samples


class _Watched:
    """One device, and the NVML queries that it supports.

    Attributes:
        xid_blocker: why the driver does not report its Xid errors; empty if it does.
    """

    def __init__(self, nvml: ModuleType, device: Device) -> None:
        self.device = device
        self.xid_blocker = ""
        self._nvml = nvml
        handle = device.handle
        self._fast = self._supported(
            {
                "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
                "sm_clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
                "throttle_bits": lambda: _throttle_bits(nvml, handle),
            }
        )
        self._slow = self._supported(
            {
                "memory_clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(
                    handle, nvml.NVML_CLOCK_MEM
                ),
                "power_limit_w": lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3,
                "temperature_c": lambda: nvml.nvmlDeviceGetTemperature(
                    handle, nvml.NVML_TEMPERATURE_GPU
                ),
            }
        )
        self._energy_mj = ask(nvml, lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle))
        self._has_use = ask(nvml, lambda: nvml.nvmlDeviceGetUtilizationRates(handle)) is not None
        self._lists_processes = True
        self._has_process_use = True
        self._process_use_from_us = 0

    def fast(self) -> dict[str, float]:
        """Return the values that can change with every step."""
        nvml, handle = self._nvml, self.device.handle
        values = {word: float(gauge()) for word, gauge in self._fast.items()}
        if self._has_use:
            use = nvml.nvmlDeviceGetUtilizationRates(handle)
            values |= {"busy_share": use.gpu / 100, "copy_share": use.memory / 100}
        if self._energy_mj is not None:
            energy_mj = nvml.nvmlDeviceGetTotalEnergyConsumption(handle)
            if energy_mj >= self._energy_mj:  # else the driver was reloaded
                values["energy_uj"] = float((energy_mj - self._energy_mj) * 1000)
            self._energy_mj = energy_mj
        return values

    def slow(self) -> dict[str, float]:
        """Return the values that change seldom."""
        values = {word: float(gauge()) for word, gauge in self._slow.items()}
        return values | _memory(self._nvml, self.device)

    def device_processes(self, engines: list[Observed], *, sees_host: bool) -> dict[str, float]:
        """Return the number of processes on the device, and the use by foreign ones if known."""
        nvml, handle = self._nvml, self.device.handle
        if not self._lists_processes:
            return {}
        running = ask(nvml, lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle))
        if running is None:
            self._lists_processes = False
            return {}
        used = {process.pid: process.usedGpuMemory for process in running}
        found = holders(used, engines, sees_host=sees_host)
        values = {"num_processes": float(len(found.ours | found.foreign | found.unknown))}
        if found.unknown:
            return values
        values["num_foreign"] = float(len(found.foreign))
        foreign_bytes = [used[pid] for pid in found.foreign]
        if all(num_bytes is not None for num_bytes in foreign_bytes):
            values["foreign_memory_bytes"] = float(sum(foreign_bytes))
        if not found.foreign:
            values["foreign_busy_share"] = 0.0
        else:
            values |= self._foreign_use(found.foreign)
        return values

    def _foreign_use(self, foreign: frozenset[int]) -> dict[str, float]:
        """Return the share of time with kernels of foreign processes, if the driver reports it."""
        nvml, handle = self._nvml, self.device.handle
        if not self._has_process_use:
            return {}
        from_us = self._process_use_from_us
        try:
            uses = ask(nvml, lambda: nvml.nvmlDeviceGetProcessUtilization(handle, from_us))
        except nvml.NVMLError as error:
            if error.value != nvml.NVML_ERROR_NOT_FOUND:
                raise
            uses = []  # no process ran a kernel
        if uses is None:
            self._has_process_use = False
            return {}
        shares: dict[int, list[int]] = {}
        for use in uses:
            if use.timeStamp > from_us and use.pid in foreign:
                shares.setdefault(use.pid, []).append(use.smUtil)
        self._process_use_from_us = max((use.timeStamp for use in uses), default=from_us)
        busy = sum(sum(each) / len(each) for each in shares.values()) / 100
        return {"foreign_busy_share": min(1.0, busy)}

    def _supported(self, gauges: dict[str, Gauge]) -> dict[str, Gauge]:
        """Return the gauges that the device supports; a failing query costs as much as another."""
        return {word: gauge for word, gauge in gauges.items() if ask(self._nvml, gauge) is not None}


def _memory(nvml: ModuleType, of: Device | Instance) -> dict[str, float]:
    memory = ask(nvml, lambda: nvml.nvmlDeviceGetMemoryInfo(of.handle))
    if memory is None:
        return {}
    return {"memory_used_bytes": float(memory.used), "memory_total_bytes": float(memory.total)}


def _address(handle: Any) -> int | None:
    """Return the address in a device handle, which is unique per device."""
    return ctypes.cast(handle, ctypes.c_void_p).value


def _throttle_bits(nvml: ModuleType, handle: Any) -> float:
    try:
        return float(nvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
    except (AttributeError, nvml.NVMLError_FunctionNotFound):  # its name before driver 535
        return float(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
