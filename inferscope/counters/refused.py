"""Devices that a source could not begin with, and is to ask again while it goes on."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

from inferscope.counters.nvml_devices import Device
from inferscope.counters.source import ASK_AGAIN_NS, Claimer, Unavailable, silence
from inferscope.records import CounterSample

Start = Callable[[ModuleType, Device, int], list[CounterSample]]
"""Begins with a device that is ours; returns its facts."""


class Refused:
    """The devices of one source that were refused."""

    def __init__(self, source: str, claims: Claimer, start: Start) -> None:
        """Start with none; `start` may raise Unavailable or NVML's error."""
        self._source = source
        self._claims = claims
        self._start = start
        self._by_uuid: dict[str, Device] = {}
        self._ask_again_ns = 0

    def begin(self, nvml: ModuleType, device: Device, now_ns: int) -> list[CounterSample]:
        """Begin with one device; return its facts, or why there are none."""
        try:
            self._claims.take(device.uuid)
            told = self._start(nvml, device, now_ns)
        except (Unavailable, nvml.NVMLError) as error:
            self._by_uuid[device.uuid] = device
            self._ask_again_ns = now_ns + ASK_AGAIN_NS
            return [silence(self._source, device.uuid, now_ns, str(error))]
        self._by_uuid.pop(device.uuid, None)
        return told

    def ask_again(self, nvml: ModuleType, now_ns: int) -> list[CounterSample]:
        """Return the facts of devices that were refused and are not any longer."""
        if not self._by_uuid or now_ns < self._ask_again_ns:
            return []
        again = [self.begin(nvml, device, now_ns) for device in list(self._by_uuid.values())]
        return [news for told in again for news in told if not news.reason]

    def forget(self) -> None:
        """Ask for none of them any more."""
        self._by_uuid.clear()
