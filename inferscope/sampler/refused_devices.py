"""Devices that a source could not start on, and retries while it reads the others."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

from inferscope.records import CounterSample
from inferscope.sampler.nvml_devices import Device
from inferscope.sampler.source import ASK_AGAIN_NS, Claimer, Unavailable, silence

Start = Callable[[ModuleType, Device, int], list[CounterSample]]
"""Function that starts reading a claimed device and returns its facts."""


class RefusedDevices:
    """Devices of one source that it could not claim or start."""

    def __init__(self, source: str, claims: Claimer, start: Start) -> None:
        """Create an empty table; `start` may raise Unavailable or an NVML error."""
        self._source = source
        self._claims = claims
        self._start = start
        self._by_uuid: dict[str, Device] = {}
        self._ask_again_ns = 0

    def begin(self, nvml: ModuleType, device: Device, now_ns: int) -> list[CounterSample]:
        """Claim and start one device; return its facts, or a record with the reason."""
        try:
            self._claims.take(device.uuid)
            started = self._start(nvml, device, now_ns)
        except (Unavailable, nvml.NVMLError) as error:
            self._by_uuid[device.uuid] = device
            self._ask_again_ns = now_ns + ASK_AGAIN_NS
            return [silence(self._source, device.uuid, now_ns, str(error))]
        self._by_uuid.pop(device.uuid, None)
        return started

    def ask_again(self, nvml: ModuleType, now_ns: int) -> list[CounterSample]:
        """Retry the refused devices if a retry is due; return the facts of those that started."""
        if not self._by_uuid or now_ns < self._ask_again_ns:
            return []
        again = [self.begin(nvml, device, now_ns) for device in list(self._by_uuid.values())]
        return [sample for samples in again for sample in samples if not sample.reason]

    def forget(self) -> None:
        """Stop retrying."""
        self._by_uuid.clear()
