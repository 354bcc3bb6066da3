"""NVML GPM: device utilisation on Hopper and later, without privileges; suited to fleets.

A metric is the difference of two samples at least 100 ms apart; closer samples give invalid
values. Each MIG instance is sampled separately. The driver reports memory traffic as a share of
the device's peak, so samples carry that peak, computed from memory clock and bus width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from types import ModuleType
from typing import Any

from inferscope.probe import Clock
from inferscope.records import CounterSample
from inferscope.sampler.lost_devices import LostDevices
from inferscope.sampler.nvml_devices import Device, ask, find_devices, open_nvml
from inferscope.sampler.refused_devices import RefusedDevices
from inferscope.sampler.source import Claimer, Unavailable, facts, sample

SHORTEST_NS = 100_000_000
_LATE_NS = 5_000_000
"""How late a read may come without the next one, on time, being too early."""
_METRICS = {
    "busy_share": "GRAPHICS_UTIL",
    "sm_active_share": "SM_UTIL",
    "sm_occupancy_share": "SM_OCCUPANCY",
    "tensor_share": "ANY_TENSOR_UTIL",
    "dram_share": "DRAM_BW_UTIL",
}
_TRANSFERS_PER_CLOCK = 2
"""Transfers per data line and memory clock: NVIDIA reports a clock of half the data rate."""


class GpmSource:
    """Reader of GPM metrics.

    Attributes:
        name: "gpm".
        period_ns: period of reads in nanoseconds, at least 105 ms.
    """

    name = "gpm"

    def __init__(
        self,
        claims: Claimer,
        *,
        clock: Clock,
        period_ns: int,
        wanted: Sequence[str] = (),
        load: Callable[[], ModuleType] = open_nvml,
    ) -> None:
        """Store the settings: those of NvmlSource, and the clock that stamps windows."""
        self.period_ns = max(period_ns, SHORTEST_NS + _LATE_NS)
        self._clock = clock
        self._wanted = wanted
        self._load = load
        self._nvml: ModuleType | None = None
        self._pairs: list[_Pair] = []
        self._refused = RefusedDevices(self.name, claims, self._start)
        self._lost = LostDevices(self.name)

    def open(self, now_ns: int) -> list[CounterSample]:
        """Claim the devices that support GPM; return their properties.

        Raises:
            Unavailable: no device can be read.
        """
        nvml = self._nvml = self._load()
        if not hasattr(nvml, "nvmlGpmSampleGet"):
            raise Unavailable("nvidia-ml-py lacks GPM: pip install -U nvidia-ml-py")
        states: list[CounterSample] = []
        for device in find_devices(nvml, self._wanted):
            states += self._refused.begin(nvml, device, now_ns)
        if not self._pairs:
            reasons = dict.fromkeys(state.reason for state in states)
            raise Unavailable(" ".join(reasons) or "there is no MIG instance.")
        return states

    def read(self, now_ns: int) -> list[CounterSample]:
        """Return the metrics of each device or MIG instance since the last read.

        Raises:
            Unavailable: no device answers any more.
        """
        nvml = self._nvml
        if nvml is None:
            raise Unavailable("the source is closed.")
        samples: list[CounterSample] = []
        for pair in self._pairs:
            try:
                found = pair.read()
            except nvml.NVMLError as error:
                samples += self._lost.lose(pair.uuid, now_ns, error)
                continue
            if found is None:
                continue
            if self._lost.mark_answering(pair.uuid):
                samples.append(facts(self.name, pair.uuid, now_ns, pair.properties))
            start_ns, end_ns, values = found
            samples.append(
                sample(self.name, pair.uuid, start_ns=start_ns, end_ns=end_ns, values=values)
            )
        self._lost.check(len(self._pairs))
        return samples + self._refused.ask_again(nvml, now_ns)

    def close(self) -> None:
        """Free the samples and shut NVML down; safe to call twice."""
        nvml, self._nvml = self._nvml, None
        pairs, self._pairs = self._pairs, []
        self._refused.forget()
        self._lost.forget()
        if nvml is None:
            return
        with suppress(nvml.NVMLError):
            for pair in pairs:
                pair.free()
        with suppress(nvml.NVMLError):
            nvml.nvmlShutdown()

    def _start(self, nvml: ModuleType, device: Device, now_ns: int) -> list[CounterSample]:
        support = ask(nvml, lambda: nvml.nvmlGpmQueryDeviceSupport(device.handle))
        if support is None or not support.isSupportedDevice:
            raise Unavailable(
                f"{device.name} has no GPM, which needs Hopper or later and is absent on some "
                "virtual GPUs. Use --counters dcgm to read dcgm-exporter's page instead."
            )
        of: list[tuple[str, int | None]] = [(device.uuid, None)]
        if device.is_divided:
            of = [(instance.uuid, instance.gpu_instance_id) for instance in device.instances]
        peak = None if device.is_divided else _peak_bytes_per_s(nvml, device)
        states = []
        for uuid, instance_id in of:
            properties = {"name": device.name}
            if instance_id is not None:
                properties["of"] = device.uuid
            pair = _Pair(
                nvml, device, uuid, instance_id, clock=self._clock, peak=peak, properties=properties
            )
            self._pairs.append(pair)
            states.append(facts(self.name, uuid, now_ns, properties))
        return states


class _Pair:
    """The two most recent GPM samples of one device or MIG instance.

    Attributes:
        uuid: UUID of the device or instance.
        properties: properties for its record of facts.
    """

    def __init__(
        self,
        nvml: ModuleType,
        device: Device,
        uuid: str,
        instance_id: int | None,
        *,
        clock: Clock,
        peak: float | None,
        properties: dict[str, str],
    ) -> None:
        self.uuid = uuid
        self.properties = properties
        self._nvml = nvml
        self._handle = device.handle
        self._instance_id = instance_id
        self._clock = clock
        self._peak = peak
        self._older, self._newer = nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc()
        # One request structure is reused: its array of results takes about 20 KB.
        self._request = nvml.c_nvmlGpmMetricsGet_t()
        self._request.version = nvml.NVML_GPM_METRICS_GET_VERSION
        self._request.numMetrics = len(_METRICS)
        for place, name in enumerate(_METRICS.values()):
            self._request.metrics[place].metricId = getattr(nvml, f"NVML_GPM_METRIC_{name}")
        try:
            self._older_ns = self._take(self._older)
        except nvml.NVMLError:
            self.free()
            raise

    def read(self) -> tuple[int, int, dict[str, float]] | None:
        """Return a window's start, end and metrics; None if less than 100 ms have passed."""
        if self._clock.monotonic_ns() - self._older_ns < SHORTEST_NS:
            return None
        nvml, request = self._nvml, self._request
        start_ns, end_ns = self._older_ns, self._take(self._newer)
        request.sample1, request.sample2 = self._older, self._newer
        self._older, self._newer, self._older_ns = self._newer, self._older, end_ns
        nvml.nvmlGpmMetricsGet(request)
        values = {}
        for place, word in enumerate(_METRICS):
            metric = request.metrics[place]
            if metric.nvmlReturn == nvml.NVML_SUCCESS:
                values[word] = metric.value / 100
        if self._peak is not None and "dram_share" in values:
            values["dram_peak_bytes_per_s"] = self._peak
        return start_ns, end_ns, values

    def free(self) -> None:
        """Free both samples."""
        for one in (self._older, self._newer):
            self._nvml.nvmlGpmSampleFree(one)

    def _take(self, into: Any) -> int:
        """Take a sample into `into`; return its time, halfway between call and return."""
        before_ns = self._clock.monotonic_ns()
        if self._instance_id is None:
            self._nvml.nvmlGpmSampleGet(self._handle, into)
        else:
            self._nvml.nvmlGpmMigSampleGet(self._handle, self._instance_id, into)
        return (before_ns + self._clock.monotonic_ns()) // 2


def _peak_bytes_per_s(nvml: ModuleType, device: Device) -> float | None:
    handle = device.handle
    clock_mhz = ask(nvml, lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_MEM))
    width_bits = ask(nvml, lambda: nvml.nvmlDeviceGetMemoryBusWidth(handle))
    if not clock_mhz or not width_bits:
        return None
    return float(_TRANSFERS_PER_CLOCK * clock_mhz * 1_000_000 * width_bits / 8)
