"""Device offsets → host time, by the anchors in `Clock` records.

An anchor says that the device reached an offset at a host time, give or take an error. Between two
anchors time runs linearly; beyond the last it runs on at the same slope.
"""

from __future__ import annotations

import bisect

_KEPT_ANCHORS = 64


class DeviceClock:
    """One device's clock as seen from the host.

    Attributes:
        error_ns: of the newest anchor, None before the first.
    """

    def __init__(self) -> None:
        self._device: list[int] = []
        self._host: list[int] = []
        self.error_ns: int | None = None

    def anchor(self, device_ns: int, host_ns: int, error_ns: int) -> None:
        """Take an anchor; one that runs backwards is left out."""
        if self._device and (device_ns <= self._device[-1] or host_ns <= self._host[-1]):
            return
        self._device.append(device_ns)
        self._host.append(host_ns)
        self.error_ns = error_ns
        if len(self._device) > _KEPT_ANCHORS:
            del self._device[0], self._host[0]

    def host_ns(self, device_ns: int) -> int | None:
        """Map an offset; None before the first anchor."""
        if not self._device:
            return None
        if len(self._device) == 1:
            return self._host[0] + device_ns - self._device[0]
        right = min(max(bisect.bisect_right(self._device, device_ns), 1), len(self._device) - 1)
        d0, d1 = self._device[right - 1], self._device[right]
        h0, h1 = self._host[right - 1], self._host[right]
        return h0 + round((device_ns - d0) * (h1 - h0) / (d1 - d0))
