"""What the samplers of a host tell: which sources count what, and since when one is silent.

A sampler's ring belongs to a host and not to an engine, so it has a fold of its own beside theirs.
"""

from __future__ import annotations

from inferscope.collector.finals import DeviceHealth
from inferscope.collector.stamps import Placed, Stamps
from inferscope.collector.troubles import Troubles
from inferscope.records import Clock, CounterSample, Record, RingOpened, plain_uuid


class SamplerFold:
    """The samplers' rings of one host.

    Attributes:
        num_samples: with values, folded so far.
        silent: by source and device, why it has nothing to tell.
        facts: by source and device, what it said of the device when it opened.
        made_up: devices told of by a ring whose header says `synthetic`, by plain uuid.
    """

    def __init__(self) -> None:
        self.num_samples = 0
        self.silent: dict[tuple[str, str], str] = {}
        self.facts: dict[tuple[str, str], CounterSample] = {}
        self.made_up: set[str] = set()
        self._synthetic: set[int] = set()
        """Rings."""
        self._stamps: dict[int, Stamps] = {}
        """By ring."""
        self._placed: list[Placed] = []
        self._troubles = Troubles()

    def open(self, opened: RingOpened) -> None:
        """Add a sampler's ring."""
        if opened.synthetic:
            self._synthetic.add(opened.ring)

    def fold(self, number: int, record: Record) -> None:
        """Take one record of one of the rings."""
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
        """Give up what has waited too long for an anchor."""
        for stamps in self._stamps.values():
            self._placed += stamps.give_up(now_ns)

    def take(self) -> list[Placed]:
        """Return the samples that have come, or have been placed, since the last call."""
        placed, self._placed = self._placed, []
        return placed

    def health_of(self, device_uuid: str, now_ns: int) -> DeviceHealth | None:
        """Return how a device or a MIG instance is; None where nobody tells."""
        return self._troubles.of(device_uuid, now_ns)

    def _stamps_of(self, number: int) -> Stamps:
        stamps = self._stamps.get(number)
        if stamps is None:
            stamps = self._stamps[number] = Stamps()
        return stamps
