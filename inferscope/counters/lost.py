"""Devices that a source reads and that have ceased to answer, while others still do."""

from __future__ import annotations

from inferscope.counters.source import Unavailable, silence
from inferscope.records import CounterSample


class Lost:
    """The devices of one source that did not answer the last time."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._reasons: dict[str, str] = {}
        """By uuid."""

    @property
    def num(self) -> int:
        """Return how many they are."""
        return len(self._reasons)

    def lose(self, device_uuid: str, now_ns: int, error: Exception) -> list[CounterSample]:
        """Note that a device does not answer; return the news, once."""
        is_news = device_uuid not in self._reasons
        reason = self._reasons[device_uuid] = f"{device_uuid} does not answer: {error}."
        return [silence(self._source, device_uuid, now_ns, reason)] if is_news else []

    def is_back(self, device_uuid: str) -> bool:
        """Note that a device answers; tell whether it did not the last time."""
        return self._reasons.pop(device_uuid, None) is not None

    def check(self, num_devices: int) -> None:
        """Hold on as long as one of so many devices answers.

        Raises:
            Unavailable: none does.
        """
        if 0 < num_devices == len(self._reasons):
            raise Unavailable(" ".join(self._reasons.values()))

    def forget(self) -> None:
        """Begin anew."""
        self._reasons.clear()
