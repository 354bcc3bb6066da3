"""Fold of a host's samplers: sources, devices, and the reasons of silent ones.

A sampler's ring belongs to a host and not to an engine, so it has a fold of its own.
"""

from __future__ import annotations

from inferscope.fold.device_health import DeviceHealthTracker
from inferscope.fold.final_records import DeviceHealth
from inferscope.fold.join.stamps import MappedSample, WallClockMapper
from inferscope.records import Clock, CounterSample, Record, RingOpened, plain_uuid


class SamplerFold:
    """Fold of one host's sampler rings.

    Attributes:
        num_samples: number of samples with values folded so far.
        silent: reason why a source reports nothing, by source and device.
        facts: description of the device at the source's start, by source and device.
        made_up: plain UUIDs of devices in rings marked `synthetic`.
    """

    def __init__(self) -> None:
        self.num_samples = 0
        self.silent: dict[tuple[str, str], str] = {}
        self.facts: dict[tuple[str, str], CounterSample] = {}
        self.made_up: set[str] = set()
        self._synthetic: set[int] = set()
        """Numbers of synthetic rings."""
        self._stamps: dict[int, WallClockMapper] = {}
        """Wall clock mappers by ring."""
        self._placed: list[MappedSample] = []
        self._troubles = DeviceHealthTracker()

    def open(self, opened: RingOpened) -> None:
        """Add a sampler's ring."""
        if opened.synthetic:
            self._synthetic.add(opened.ring)

    def fold(self, number: int, record: Record) -> None:
        """Fold one record of one of the rings."""
        if isinstance(record, Clock):
            self._placed += self._stamps_of(number).anchor(record)
        if not isinstance(record, CounterSample):
            return
        if number in self._synthetic and record.device_uuid:
            self.made_up.add(plain_uuid(record.device_uuid))
        if record.reason:
            self.silent[record.source, record.device_uuid] = record.reason
        elif record.facts:
            key = (record.source, record.device_uuid)
            self.silent.pop((record.source, ""), None)
            self.silent.pop(key, None)
            self.facts[key] = record
            self._troubles.opened(record)
        else:
            self.num_samples += 1
            self._troubles.take(record)
            self._placed += self._stamps_of(number).place(record)

    def tick(self, now_ns: int) -> None:
        """Release the samples that have waited too long for an anchor."""
        for stamps in self._stamps.values():
            self._placed += stamps.give_up(now_ns)

    def take(self) -> list[MappedSample]:
        """Return the samples that have arrived, or have been mapped, since the last call."""
        placed, self._placed = self._placed, []
        return placed

    def health_of(self, device_uuid: str, now_ns: int) -> DeviceHealth | None:
        """Return the health of a device or a MIG instance; None without a source."""
        return self._troubles.of(device_uuid, now_ns)

    def _stamps_of(self, number: int) -> WallClockMapper:
        stamps = self._stamps.get(number)
        if stamps is None:
            stamps = self._stamps[number] = WallClockMapper()
        return stamps
