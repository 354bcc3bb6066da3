"""NVML: what every driver tells of every device, without rights and without disturbing anybody.

Utilisation is the driver's own: the share of the last sixth of a second, or second, with a kernel
running; not how much of the device it used. Energy is the driver's counter, exact over windows of
100 ms and more; power is that, smoothed. Of a divided device, energy and power are the board's and
never an instance's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from inferscope.counters.lost import Lost
from inferscope.counters.nvml_devices import Device, Instance, ask, find_devices, open_nvml, text
from inferscope.counters.processes import Observed, holders, observed, sees_host
from inferscope.counters.refused import Refused
from inferscope.counters.source import Claimer, Unavailable, facts, sample
from inferscope.records import CounterSample

SLOW_NS = 1_000_000_000
"""Between looks at what changes slowly or costs the driver long."""
_MOST_XIDS = 16
Gauge = Callable[[], float]


class NvmlSource:
    """Reads NVML.

    Attributes:
        name: nvml.
        period_ns: between two reads.
    """

    name = "nvml"

    def __init__(
        self,
        folder: Path,
        claims: Claimer,
        *,
        period_ns: int,
        wanted: Sequence[str] = (),
        load: Callable[[], ModuleType] = open_nvml,
    ) -> None:
        """Prepare.

        Args:
            folder: of the rings, whose writers are not foreign.
            claims: says which devices are ours.
            period_ns: between two reads.
            wanted: devices, by index or uuid; none means all.
            load: loads NVML and begins with it.
        """
        self.period_ns = period_ns
        self._folder = folder
        self._wanted = wanted
        self._load = load
        self._nvml: ModuleType | None = None
        self._watched: list[_Watched] = []
        self._refused = Refused(self.name, claims, self._begun)
        self._lost = Lost(self.name)
        self._events: Any = None
        self._unheard = ""
        """Why the driver tells of no device's errors."""
        self._from_ns = self._slow_from_ns = 0
        self._sees_host = False

    def open(self, now_ns: int) -> list[CounterSample]:
        """Begin with the devices that nobody else samples.

        Raises:
            Unavailable: there is no driver or no such device, or somebody else has them all.
        """
        nvml = self._nvml = self._load()
        self._sees_host = sees_host()
        self._from_ns = self._slow_from_ns = now_ns
        self._listen(nvml)
        told: list[CounterSample] = []
        for device in find_devices(nvml, self._wanted):
            told += self._refused.begin(nvml, device, now_ns)
        if not self._watched:
            raise Unavailable(" ".join(dict.fromkeys(news.reason for news in told)))
        return told

    def read(self, now_ns: int) -> list[CounterSample]:
        """Return what each device tells.

        Raises:
            Unavailable: no device tells anything any more.
        """
        nvml = self._nvml
        if nvml is None:
            raise Unavailable("it is closed.")
        is_slow = now_ns - self._slow_from_ns >= SLOW_NS
        engines = observed(self._folder, now_ns) if is_slow else []
        told: list[CounterSample] = []
        were_lost = self._lost.num == len(self._watched)
        for watched in self._watched:
            uuid = watched.device.uuid
            try:
                values = watched.fast()
                if is_slow:
                    values |= watched.slow()
                    values |= watched.who(engines, sees_host=self._sees_host)
                    told += self._of_instances(nvml, watched, now_ns)
            except nvml.NVMLError as error:
                told += self._lost.lose(uuid, now_ns, error)
                continue
            if self._lost.is_back(uuid):
                told.append(facts(self.name, uuid, now_ns, self._facts(nvml, watched)))
            told.append(
                sample(self.name, uuid, start_ns=self._from_ns, end_ns=now_ns, values=values)
            )
        if were_lost:
            # Not before the second time: the driver may still say what has befallen the last one.
            self._lost.check(len(self._watched))
        told += self._xids(nvml, now_ns)
        told += self._refused.ask_again(nvml, now_ns)
        self._from_ns = now_ns
        if is_slow:
            self._slow_from_ns = now_ns
        return told

    def close(self) -> None:
        """End with NVML."""
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

    def _begun(self, nvml: ModuleType, device: Device, now_ns: int) -> list[CounterSample]:
        watched = _Watched(nvml, device)
        watched.unheard = self._unheard or self._hear(nvml, device)
        self._watched.append(watched)
        return [facts(self.name, device.uuid, now_ns, self._facts(nvml, watched))]

    def _facts(self, nvml: ModuleType, watched: _Watched) -> dict[str, str]:
        device = watched.device
        told = {"name": device.name}
        version = ask(nvml, nvml.nvmlSystemGetDriverVersion)
        if version is not None:
            told["driver"] = text(version)
        if device.is_divided:
            told["mig"] = " ".join(instance.uuid for instance in device.instances)
        told["xid"] = f"unknown: {watched.unheard}" if watched.unheard else "told"
        if not self._sees_host:
            told["foreign"] = (
                "unknown: the driver names processes as the host does, which this container "
                "cannot translate"
            )
        return told

    def _of_instances(
        self, nvml: ModuleType, watched: _Watched, now_ns: int
    ) -> list[CounterSample]:
        """Return what is told of each MIG instance by itself: its memory."""
        told = []
        for instance in watched.device.instances:
            values = _memory(nvml, instance)
            if values:
                told.append(
                    sample(
                        self.name,
                        instance.uuid,
                        start_ns=self._slow_from_ns,
                        end_ns=now_ns,
                        values=values,
                    )
                )
        return told

    def _listen(self, nvml: ModuleType) -> None:
        """Prepare to be told of errors of devices."""
        self._unheard = ""
        try:
            self._events = nvml.nvmlEventSetCreate()
        except nvml.NVMLError as error:
            self._unheard = f"the driver tells of no errors ({error})"

    def _hear(self, nvml: ModuleType, device: Device) -> str:
        """Have the driver tell of a device's errors; return why it does not, empty if it does."""
        kinds = nvml.nvmlEventTypeXidCriticalError
        try:
            nvml.nvmlDeviceRegisterEvents(device.handle, kinds, self._events)
        except nvml.NVMLError as error:
            return f"the driver does not tell of this device's errors ({error})"
        return ""

    def _xids(self, nvml: ModuleType, now_ns: int) -> list[CounterSample]:
        """Return the errors since the last read, a sample each."""
        told: list[CounterSample] = []
        while self._events is not None and len(told) < _MOST_XIDS:
            try:
                event = nvml.nvmlEventSetWait_v2(self._events, 0)
            except nvml.NVMLError:  # a timeout: there are no more
                break
            # By its handle: a device that has fallen off the bus tells no name any more.
            where = _place(event.device)
            for watched in self._watched:
                if _place(watched.device.handle) == where:
                    values = {"xid": float(event.eventData)}
                    uuid, from_ns = watched.device.uuid, self._from_ns
                    told.append(
                        sample(self.name, uuid, start_ns=from_ns, end_ns=now_ns, values=values)
                    )
        return told


class _Watched:
    """One device, and what it can be asked.

    Attributes:
        unheard: why the driver does not tell of its errors; empty where it does.
    """

    def __init__(self, nvml: ModuleType, device: Device) -> None:
        self.device = device
        self.unheard = ""
        self._nvml = nvml
        handle = device.handle
        self._fast = self._asked(
            {
                "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
                "sm_clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
                "throttle_bits": lambda: _throttle_bits(nvml, handle),
            }
        )
        self._slow = self._asked(
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
        self._has_who = True
        self._has_their_use = True
        self._their_use_from_us = 0

    def fast(self) -> dict[str, float]:
        """Return what changes with every step."""
        nvml, handle = self._nvml, self.device.handle
        values = {word: float(gauge()) for word, gauge in self._fast.items()}
        if self._has_use:
            use = nvml.nvmlDeviceGetUtilizationRates(handle)
            values |= {"busy_share": use.gpu / 100, "copy_share": use.memory / 100}
        if self._energy_mj is not None:
            energy_mj = nvml.nvmlDeviceGetTotalEnergyConsumption(handle)
            if energy_mj >= self._energy_mj:  # the driver was loaded anew otherwise
                values["energy_uj"] = float((energy_mj - self._energy_mj) * 1000)
            self._energy_mj = energy_mj
        return values

    def slow(self) -> dict[str, float]:
        """Return what changes seldom."""
        values = {word: float(gauge()) for word, gauge in self._slow.items()}
        return values | _memory(self._nvml, self.device)

    def who(self, engines: list[Observed], *, sees_host: bool) -> dict[str, float]:
        """Return how many processes hold the device, and what is known of those not ours."""
        nvml, handle = self._nvml, self.device.handle
        if not self._has_who:
            return {}
        there = ask(nvml, lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle))
        if there is None:
            self._has_who = False
            return {}
        used = {process.pid: process.usedGpuMemory for process in there}
        found = holders(used, engines, sees_host=sees_host)
        values = {"num_processes": float(len(found.ours | found.foreign | found.unknown))}
        if found.unknown:
            return values
        values["num_foreign"] = float(len(found.foreign))
        theirs = [used[pid] for pid in found.foreign]
        if all(num_bytes is not None for num_bytes in theirs):
            values["foreign_memory_bytes"] = float(sum(theirs))
        if not found.foreign:
            values["foreign_busy_share"] = 0.0
        else:
            values |= self._their_use(found.foreign)
        return values

    def _their_use(self, foreign: frozenset[int]) -> dict[str, float]:
        """Return the share of time with kernels of foreign processes, where the driver tells."""
        nvml, handle = self._nvml, self.device.handle
        if not self._has_their_use:
            return {}
        from_us = self._their_use_from_us
        try:
            told = ask(nvml, lambda: nvml.nvmlDeviceGetProcessUtilization(handle, from_us))
        except nvml.NVMLError as error:
            if error.value != nvml.NVML_ERROR_NOT_FOUND:
                raise
            told = []  # nobody did anything
        if told is None:
            self._has_their_use = False
            return {}
        shares: dict[int, list[int]] = {}
        for one in told:
            if one.timeStamp > from_us and one.pid in foreign:
                shares.setdefault(one.pid, []).append(one.smUtil)
        self._their_use_from_us = max((one.timeStamp for one in told), default=from_us)
        busy = sum(sum(each) / len(each) for each in shares.values()) / 100
        return {"foreign_busy_share": min(1.0, busy)}

    def _asked(self, gauges: dict[str, Gauge]) -> dict[str, Gauge]:
        """Return those that the device tells: asking the others each time costs as much."""
        return {word: gauge for word, gauge in gauges.items() if ask(self._nvml, gauge) is not None}


def _memory(nvml: ModuleType, of: Device | Instance) -> dict[str, float]:
    memory = ask(nvml, lambda: nvml.nvmlDeviceGetMemoryInfo(of.handle))
    if memory is None:
        return {}
    return {"memory_used_bytes": float(memory.used), "memory_total_bytes": float(memory.total)}


def _place(handle: Any) -> int | None:
    """Return where a device's handle points: the driver gives out one for each."""
    return ctypes.cast(handle, ctypes.c_void_p).value


def _throttle_bits(nvml: ModuleType, handle: Any) -> float:
    try:
        return float(nvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
    except (AttributeError, nvml.NVMLError_FunctionNotFound):  # its name before driver 535
        return float(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
