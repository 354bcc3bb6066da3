"""Devices of a source that have stopped answering while others still answer."""

from __future__ import annotations

from inferscope.records import CounterSample
from inferscope.sampler.source import Unavailable, silence


class LostDevices:
    """Devices of one source that did not answer the last read."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._reasons: dict[str, str] = {}
        """Reason of each lost device, by UUID."""

    @property
    def num(self) -> int:
        """Return the number of lost devices."""
        return len(self._reasons)

    def lose(self, device_uuid: str, now_ns: int, error: Exception) -> list[CounterSample]:
        """Mark a device as lost; return the record of it the first time."""
        is_new = device_uuid not in self._reasons
        reason = self._reasons[device_uuid] = f"{device_uuid} does not answer: {error}."
        return [silence(self._source, device_uuid, now_ns, reason)] if is_new else []

    def mark_answering(self, device_uuid: str) -> bool:
        """Mark a device as answering; return whether it was lost before."""
        return self._reasons.pop(device_uuid, None) is not None

    def check(self, num_devices: int) -> None:
        """Check that at least one of `num_devices` devices answers.

        Raises:
            Unavailable: none answers.
        """
        if 0 < num_devices == len(self._reasons):
            raise Unavailable(" ".join(self._reasons.values()))

    def forget(self) -> None:
        """Clear all state."""
        self._reasons.clear()
