"""Mapping of device offsets and wall-clock stamps to host time by the anchors in `Clock` records.

An anchor states a device offset, the host time at which it was read, and an error bound. Time is
linear between two anchors. Before the first and after the last it continues at the slope of anchors
at least a second apart: over a shorter time their errors would dominate the slope.

The wall clock is such a clock too, until it is set:

    wall  ──a──a──a──a─┐  jump                 a: anchors
                       └──a──a──a──a──         stamps in between cannot be mapped
"""

from __future__ import annotations

import bisect
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

_KEPT_ANCHORS = 64
_BASELINE_NS = 1_000_000_000
_MOST_DRIFT = 1e-3
"""Greatest relative drift between clocks of one machine, apart from the anchors' errors: a greater
one means that the device was reset or a record is wrong."""
_MOST_MISFITS = 3
_UNKNOWN_DRIFT = 1e-4
"""Relative drift assumed for a device with one anchor: ten times that of crystals."""
_KEPT_MAPPINGS = 8
_END_OF_TIME_NS = 1 << 62


class Mapped(NamedTuple):
    """Offsets mapped to the host's clock: [offsets] each."""

    host_ns: Ints
    error_ns: Ints
    """Error bound, even if the clock was set between two anchors."""
    is_between: NDArray[np.bool_]
    """Mask of offsets with an anchor on both sides; other offsets are not mapped."""


class DeviceClock:
    """One device's clock as seen from the host."""

    def __init__(self) -> None:
        self._device: list[int] = []
        self._host: list[int] = []
        self._errors: list[int] = []
        self._num_misfits = 0
        """Consecutive anchors that contradict the others."""

    @property
    def error_ns(self) -> int | None:
        """Return the error of the newest anchor, None before the first."""
        return self._errors[-1] if self._errors else None

    def anchor(self, device_ns: int, host_ns: int, error_ns: int) -> None:
        """Insert an anchor in time order; skip it if it contradicts its neighbours."""
        at = bisect.bisect_left(self._device, device_ns)
        if at < len(self._device) and self._device[at] == device_ns:
            return  # a repeated anchor
        if not self.fits(device_ns, host_ns, error_ns):
            self._num_misfits += 1
            if self._num_misfits < _MOST_MISFITS:
                return
            # Several misfits in a row mean that the earlier anchors are wrong.
            self._device, self._host, self._errors = [], [], []
            at = 0
        self._num_misfits = 0
        self._device.insert(at, device_ns)
        self._host.insert(at, host_ns)
        self._errors.insert(at, error_ns)
        if len(self._device) > _KEPT_ANCHORS:
            del self._device[0], self._host[0], self._errors[0]

    def fits(self, device_ns: int, host_ns: int, error_ns: int) -> bool:
        """Return whether an anchor agrees with its neighbours."""
        at = bisect.bisect_left(self._device, device_ns)
        neighbours = [each for each in (at - 1, at) if 0 <= each < len(self._device)]
        return all(self._agrees(each, device_ns, host_ns, error_ns) for each in neighbours)

    def host_ns(self, device_ns: int) -> int | None:
        """Return the host time of an offset, None before the first anchor."""
        if not self._device:
            return None
        if len(self._device) == 1:
            return self._host[0] + device_ns - self._device[0]
        left, right = self._around(device_ns)
        d0, d1 = self._device[left], self._device[right]
        h0, h1 = self._host[left], self._host[right]
        near = right if device_ns > d1 else left
        passed_ns = device_ns - self._device[near]
        return self._host[near] + round(passed_ns * (h1 - h0) / (d1 - d0))

    def error_at_ns(self, device_ns: int) -> int | None:
        """Return the error bound of `host_ns`, None before the first anchor.

        Between anchors it is their greater error; outside, their errors also tilt the slope.
        """
        if not self._device:
            return None
        if len(self._device) == 1:
            return self._errors[0] + round(abs(device_ns - self._device[0]) * _UNKNOWN_DRIFT)
        left, right = self._around(device_ns)
        d0, d1 = self._device[left], self._device[right]
        e0, e1 = self._errors[left], self._errors[right]
        if d0 <= device_ns <= d1:
            return max(e0, e1)
        beyond_ns = max(d0 - device_ns, device_ns - d1)
        return (e1 if device_ns > d1 else e0) + round(beyond_ns * (e0 + e1) / (d1 - d0))

    def _around(self, device_ns: int) -> tuple[int, int]:
        """Return the anchors on both sides of an offset, or the nearest two far enough apart."""
        device, last = self._device, len(self._device) - 1
        right = bisect.bisect_right(device, device_ns)
        if 0 < right <= last:
            return right - 1, right
        if right:
            return max(bisect.bisect_right(device, device[last] - _BASELINE_NS) - 1, 0), last
        return 0, min(bisect.bisect_left(device, device[0] + _BASELINE_NS), last)

    def between(self, device_ns: Ints) -> Mapped:
        """Map the offsets that have an anchor on both sides, as `host_ns` does.

        Args:
            device_ns: [offsets], in nanoseconds.
        """
        if len(self._device) < 2:
            none = np.zeros_like(device_ns)
            return Mapped(none, none, np.zeros(len(device_ns), dtype=np.bool_))
        device, host, errors = (
            np.array(each, dtype=np.int64) for each in (self._device, self._host, self._errors)
        )
        is_between = (device_ns >= device[0]) & (device_ns <= device[-1])
        left = np.clip(np.searchsorted(device, device_ns, side="right") - 1, 0, len(device) - 2)
        steps_ns, bends_ns = np.diff(device), np.diff(host) - np.diff(device)
        # Floats represent the time between two anchors exactly, but not the time of day.
        passed_ns = np.where(is_between, device_ns - device[left], 0)
        bent_ns = np.rint(passed_ns * (bends_ns / steps_ns)[left]).astype(np.int64)
        worst_ns = np.maximum(errors[:-1], errors[1:]) + np.abs(bends_ns)
        return Mapped(host[left] + passed_ns + bent_ns, worst_ns[left], is_between)

    @property
    def first_host_ns(self) -> int:
        """Return the host time of the first anchor; one must exist."""
        return self._host[0]

    @property
    def last_device_ns(self) -> int:
        """Return the offset of the last anchor; one must exist."""
        return self._device[-1]

    def _agrees(self, at: int, device_ns: int, host_ns: int, error_ns: int) -> bool:
        """Return whether an anchor and the one at `at` can both be right."""
        by_device_ns = device_ns - self._device[at]
        by_host_ns = host_ns - self._host[at]
        if by_device_ns * by_host_ns < 0:
            return False
        slack_ns = error_ns + self._errors[at] + _MOST_DRIFT * abs(by_device_ns)
        return abs(by_host_ns - by_device_ns) <= slack_ns


class WallClock:
    """The wall clock mapped to host time: one clock per interval in which it was not set."""

    def __init__(self) -> None:
        self._mappings: list[DeviceClock] = []
        """Clocks of these intervals, in order of host time."""

    @property
    def now(self) -> DeviceClock | None:
        """Return the clock of the newest interval, None before the first anchor."""
        return self._mappings[-1] if self._mappings else None

    def anchor(self, real_ns: int, host_ns: int, error_ns: int) -> None:
        """Insert an anchor into the interval that it fits, or start a new interval."""
        if not (0 <= real_ns < _END_OF_TIME_NS and 0 <= host_ns < _END_OF_TIME_NS):
            return  # a damaged record
        if not 0 <= error_ns < _END_OF_TIME_NS:
            return
        mappings = self._mappings
        at = bisect.bisect_right([each.first_host_ns for each in mappings], host_ns)
        for each in mappings[max(at - 1, 0) : at + 1]:
            if each.fits(real_ns, host_ns, error_ns):
                each.anchor(real_ns, host_ns, error_ns)
                return
        started = DeviceClock()
        started.anchor(real_ns, host_ns, error_ns)
        mappings.insert(at, started)
        del mappings[:-_KEPT_MAPPINGS]
