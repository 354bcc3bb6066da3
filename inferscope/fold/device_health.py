"""Health of devices as their drivers report it: throttled clocks with reasons, and Xid errors.

Health is tracked by device, for all engines on it. A sampler reports it on the host's clock, so
nothing here waits for an anchor.
"""

from __future__ import annotations

from collections import Counter

from inferscope.fold.final_records import DeviceHealth
from inferscope.records import (
    IDLE_CLOCKS,
    THROTTLES,
    CounterSample,
    plain_uuid,
    throttle_words,
    xid_word,
)

_TELLS = "nvml"
_SILENT_NS = 2_000_000_000
"""Age after which the last report no longer describes the present."""
_MOST_BITS = 1 << 53
"""Upper bound of bit masks: values of a sample are floats, exact only below it."""


class DeviceHealthTracker:
    """Throttle and Xid state of every device on the host."""

    def __init__(self) -> None:
        self._by_uuid: dict[str, _OfDevice] = {}
        self._board_of: dict[str, str] = {}
        """UUID of the device by MIG instance: a device's state applies to its instances."""

    def opened(self, record: CounterSample) -> None:
        """Note whether a device's Xid errors are reported, and which MIG instances it has."""
        if record.source != _TELLS or not record.device_uuid:
            return
        if record.facts.get("xid") == "told":
            self._device(record.device_uuid).hears_xids = True
        for instance in record.facts.get("mig", "").split():
            self._board_of[plain_uuid(instance)] = plain_uuid(record.device_uuid)

    def take(self, record: CounterSample) -> None:
        """Add a sample of any device."""
        if "throttle_bits" in record.values or "xid" in record.values:
            self._device(record.device_uuid).take(record)

    def of(self, device_uuid: str, now_ns: int) -> DeviceHealth | None:
        """Return the health of a device or of a MIG instance; None without a source."""
        uuid = plain_uuid(device_uuid)
        device = self._by_uuid.get(self._board_of.get(uuid, uuid))
        return None if device is None else device.health(now_ns)

    def _device(self, device_uuid: str) -> _OfDevice:
        return self._by_uuid.setdefault(plain_uuid(device_uuid), _OfDevice())


class _OfDevice:
    """Throttle and Xid state of one device."""

    def __init__(self) -> None:
        self.hears_xids = False
        self._covered_ns = self._until_ns = 0
        self._ns_by_bits = Counter[int]()
        self._bits = 0
        self._xids = Counter[int]()

    def take(self, record: CounterSample) -> None:
        """Add a sample, without the time that earlier samples cover."""
        xid, bits = record.values.get("xid"), record.values.get("throttle_bits")
        if xid is not None and 0 <= xid < _MOST_BITS:
            self._xids[int(xid)] += 1
        if bits is None or not 0 <= bits < _MOST_BITS:
            return
        end_ns = min(record.end_ns, record.t_ns)
        lasted_ns = end_ns - max(record.start_ns, self._until_ns, 0)
        if lasted_ns > 0:
            self._bits, self._until_ns = int(bits), end_ns
            self._covered_ns += lasted_ns
            self._ns_by_bits[self._bits & ~IDLE_CLOCKS] += lasted_ns

    def health(self, now_ns: int) -> DeviceHealth:
        """Return the health so far; throttle reasons that never applied have 0 ns."""
        throttle_ns = None
        if self._covered_ns:
            throttle_ns = {word: 0 for bit, word in THROTTLES.items() if bit != IDLE_CLOCKS}
            for bits, ns in self._ns_by_bits.items():
                for word in throttle_words(bits):
                    throttle_ns[word] = throttle_ns.get(word, 0) + ns
        xids = None
        if self.hears_xids or self._xids:
            xids = {xid_word(code): num for code, num in self._xids.items()}
        is_now = now_ns - self._until_ns < _SILENT_NS
        now = tuple(throttle_words(self._bits)) if is_now else ()
        return DeviceHealth(throttle_ns, self._covered_ns, xids, now)
