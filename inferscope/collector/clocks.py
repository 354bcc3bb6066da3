"""Device offsets, and stamps of the wall clock → host time, by the anchors in `Clock` records.

An anchor says that the device reached an offset at a host time, give or take an error. Between two
anchors time runs linearly. Before the first and beyond the last it runs on at the slope of anchors
at least a second apart: over less, their own errors would make the slope.

The wall clock is such a clock too, until somebody sets it:

    wall  ──a──a──a──a─┐  jump                 a: anchors
                       └──a──a──a──a──         what is stamped in between is nobody's
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
"""Clocks of one machine differ by less, apart from the anchors' errors: what differs by more is a
device that was reset, or a record that is wrong."""
_MOST_MISFITS = 3
_UNKNOWN_DRIFT = 1e-4
"""Of a device of which there is one anchor: ten times what crystals do."""
_KEPT_STRETCHES = 8
_END_OF_TIME_NS = 1 << 62


class Mapped(NamedTuple):
    """Offsets on the host's clock: [offsets] each."""

    host_ns: Ints
    error_ns: Ints
    """How far off that can be, even if the clock was set between two anchors unnoticed."""
    is_between: NDArray[np.bool_]
    """Tells which offsets have an anchor on both sides; of others the rest says nothing."""


class DeviceClock:
    """One device's clock as seen from the host."""

    def __init__(self) -> None:
        self._device: list[int] = []
        self._host: list[int] = []
        self._errors: list[int] = []
        self._num_misfits = 0
        """In a row."""

    @property
    def error_ns(self) -> int | None:
        """Return the error of the newest anchor, None before the first."""
        return self._errors[-1] if self._errors else None

    def anchor(self, device_ns: int, host_ns: int, error_ns: int) -> None:
        """Take an anchor; a late one goes to its place, one that contradicts others is left out."""
        at = bisect.bisect_left(self._device, device_ns)
        if at < len(self._device) and self._device[at] == device_ns:
            return  # told again
        if not self.fits(device_ns, host_ns, error_ns):
            self._num_misfits += 1
            if self._num_misfits < _MOST_MISFITS:
                return
            # Then it is what was there before that is wrong.
            self._device, self._host, self._errors = [], [], []
            at = 0
        self._num_misfits = 0
        self._device.insert(at, device_ns)
        self._host.insert(at, host_ns)
        self._errors.insert(at, error_ns)
        if len(self._device) > _KEPT_ANCHORS:
            del self._device[0], self._host[0], self._errors[0]

    def fits(self, device_ns: int, host_ns: int, error_ns: int) -> bool:
        """Tell whether an anchor contradicts none of those beside it."""
        at = bisect.bisect_left(self._device, device_ns)
        neighbours = [each for each in (at - 1, at) if 0 <= each < len(self._device)]
        return all(self._agrees(each, device_ns, host_ns, error_ns) for each in neighbours)

    def host_ns(self, device_ns: int) -> int | None:
        """Map an offset; None before the first anchor."""
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
        """Return how far off `host_ns` can be, None before the first anchor.

        Between anchors as much as they are; outside, their errors tilt the slope.
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
        """Return the anchors to go by: those on both sides, or the last ones far enough apart."""
        device, last = self._device, len(self._device) - 1
        right = bisect.bisect_right(device, device_ns)
        if 0 < right <= last:
            return right - 1, right
        if right:
            return max(bisect.bisect_right(device, device[last] - _BASELINE_NS) - 1, 0), last
        return 0, min(bisect.bisect_left(device, device[0] + _BASELINE_NS), last)

    def between(self, device_ns: Ints) -> Mapped:
        """Map offsets as `host_ns` does, as far as anchors are on both sides of them.

        Args:
            device_ns: [offsets].
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
        # Floats hold what passes between two anchors, but not the time of day.
        passed_ns = np.where(is_between, device_ns - device[left], 0)
        bent_ns = np.rint(passed_ns * (bends_ns / steps_ns)[left]).astype(np.int64)
        worst_ns = np.maximum(errors[:-1], errors[1:]) + np.abs(bends_ns)
        return Mapped(host[left] + passed_ns + bent_ns, worst_ns[left], is_between)

    @property
    def first_host_ns(self) -> int:
        """Return when its first anchor was; there is one."""
        return self._host[0]

    @property
    def last_device_ns(self) -> int:
        """Return the offset of its last anchor; there is one."""
        return self._device[-1]

    def _agrees(self, at: int, device_ns: int, host_ns: int, error_ns: int) -> bool:
        """Tell whether an anchor and one of ours can both be right."""
        by_device_ns = device_ns - self._device[at]
        by_host_ns = host_ns - self._host[at]
        if by_device_ns * by_host_ns < 0:
            return False
        slack_ns = error_ns + self._errors[at] + _MOST_DRIFT * abs(by_device_ns)
        return abs(by_host_ns - by_device_ns) <= slack_ns


class WallClock:
    """The wall clock as seen from the host's: one clock for each stretch in which nobody set it."""

    def __init__(self) -> None:
        self._stretches: list[DeviceClock] = []
        """By host time."""

    @property
    def now(self) -> DeviceClock | None:
        """Return the clock of the newest stretch, None before the first anchor."""
        return self._stretches[-1] if self._stretches else None

    def anchor(self, real_ns: int, host_ns: int, error_ns: int) -> None:
        """Take an anchor; a late one goes to its stretch, one that fits none begins another."""
        if not (0 <= real_ns < _END_OF_TIME_NS and 0 <= host_ns < _END_OF_TIME_NS):
            return  # a damaged record
        if not 0 <= error_ns < _END_OF_TIME_NS:
            return
        stretches = self._stretches
        at = bisect.bisect_right([each.first_host_ns for each in stretches], host_ns)
        for each in stretches[max(at - 1, 0) : at + 1]:
            if each.fits(real_ns, host_ns, error_ns):
                each.anchor(real_ns, host_ns, error_ns)
                return
        started = DeviceClock()
        started.anchor(real_ns, host_ns, error_ns)
        stretches.insert(at, started)
        del stretches[:-_KEPT_STRETCHES]
