"""NVML GPM: how full the device was, from Hopper on, without rights: the fleet's source.

A metric is the difference of two samples, at least 100 ms apart: closer ones give invalid values.
Of a divided device each instance is sampled by itself. The driver tells memory traffic as a share
of the device's peak; that peak, by the memory's clock and width, stands beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from types import ModuleType
from typing import Any

from inferscope.counters.lost import Lost
from inferscope.counters.nvml_devices import Device, ask, find_devices, open_nvml
from inferscope.counters.refused import Refused
from inferscope.counters.source import Claimer, Unavailable, facts, sample
from inferscope.probe.clock import Clock
from inferscope.records import CounterSample

SHORTEST_NS = 100_000_000
_METRICS = {
    "busy_share": "GRAPHICS_UTIL",
    "sm_active_share": "SM_UTIL",
    "sm_occupancy_share": "SM_OCCUPANCY",
    "tensor_share": "ANY_TENSOR_UTIL",
    "dram_share": "DRAM_BW_UTIL",
}
_TRANSFERS_PER_CLOCK = 2
"""Of the memory's data lines: all of NVIDIA's report a clock that is half of their data rate."""


class GpmSource:
    """Reads GPM.

    Attributes:
        name: gpm.
        period_ns: between two reads, 100 ms at least.
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
        """Prepare; the arguments are NvmlSource's, and the clock that windows are told by."""
        self.period_ns = max(period_ns, SHORTEST_NS)
        self._clock = clock
        self._wanted = wanted
        self._load = load
        self._nvml: ModuleType | None = None
        self._pairs: list[_Pair] = []
        self._refused = Refused(self.name, claims, self._sampled)
        self._lost = Lost(self.name)

    def open(self, now_ns: int) -> list[CounterSample]:
        """Begin with the devices that have it and that nobody else samples.

        Raises:
            Unavailable: there is none.
        """
        nvml = self._nvml = self._load()
        if not hasattr(nvml, "nvmlGpmSampleGet"):
            raise Unavailable("nvidia-ml-py is older than GPM: pip install -U nvidia-ml-py")
        told: list[CounterSample] = []
        for device in find_devices(nvml, self._wanted):
            told += self._refused.begin(nvml, device, now_ns)
        if not self._pairs:
            reasons = dict.fromkeys(news.reason for news in told)
            raise Unavailable(" ".join(reasons) or "no MIG instance is there.")
        return told

    def read(self, now_ns: int) -> list[CounterSample]:
        """Return the metrics of each device or instance since the last read.

        Raises:
            Unavailable: none tells anything any more.
        """
        nvml = self._nvml
        if nvml is None:
            raise Unavailable("it is closed.")
        told: list[CounterSample] = []
        for pair in self._pairs:
            try:
                found = pair.read()
            except nvml.NVMLError as error:
                told += self._lost.lose(pair.uuid, now_ns, error)
                continue
            if found is None:
                continue
            if self._lost.is_back(pair.uuid):
                told.append(facts(self.name, pair.uuid, now_ns, pair.told))
            start_ns, end_ns, values = found
            told.append(
                sample(self.name, pair.uuid, start_ns=start_ns, end_ns=end_ns, values=values)
            )
        self._lost.check(len(self._pairs))
        return told + self._refused.ask_again(nvml, now_ns)

    def close(self) -> None:
        """Free the samples and end with NVML."""
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

    def _sampled(self, nvml: ModuleType, device: Device, now_ns: int) -> list[CounterSample]:
        support = ask(nvml, lambda: nvml.nvmlGpmQueryDeviceSupport(device.handle))
        if support is None or not support.isSupportedDevice:
            raise Unavailable(
                f"{device.name} has no GPM: that is Hopper and later, and not every virtual GPU. "
                "dcgm-exporter's page is read instead with --counters dcgm."
            )
        of: list[tuple[str, int | None]] = [(device.uuid, None)]
        if device.is_divided:
            of = [(instance.uuid, instance.gpu_instance_id) for instance in device.instances]
        peak = None if device.is_divided else _peak_bytes_per_s(nvml, device)
        told = []
        for uuid, instance_id in of:
            news = {"name": device.name}
            if instance_id is not None:
                news["of"] = device.uuid
            self._pairs.append(
                _Pair(nvml, device, uuid, instance_id, clock=self._clock, peak=peak, told=news)
            )
            told.append(facts(self.name, uuid, now_ns, news))
        return told


class _Pair:
    """Two samples of one device or instance, taken in turn.

    Attributes:
        uuid: of the device or instance.
        told: the facts of it.
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
        told: dict[str, str],
    ) -> None:
        self.uuid = uuid
        self.told = told
        self._nvml = nvml
        self._handle = device.handle
        self._instance_id = instance_id
        self._clock = clock
        self._peak = peak
        self._older, self._newer = nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc()
        # One request, used again: its array of results is some 20 KB.
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
        """Return a window and its metrics; None where too little time has passed for one."""
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
        """Give the samples back."""
        for one in (self._older, self._newer):
            self._nvml.nvmlGpmSampleFree(one)

    def _take(self, into: Any) -> int:
        """Take a sample; return when, halfway between asking and the answer."""
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
