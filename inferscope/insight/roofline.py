"""Steps on the roofline: how fast their work is done, and which ceiling limits it.

    attainable FLOP/s = min(peak FLOP/s, peak byte/s · FLOP per byte)

Work is modelled from the shape and time is measured, so a point is as exact as the counts of FLOPs
and bytes. The ridge is where both ceilings meet: left of it bytes limit a step, right of it FLOPs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from inferscope.fold import CountersView, KindSums

ALL_TOUCHED = 0.98
"""Part of the weights that a step reads from which more requests read no more of them."""


class Ceiling(NamedTuple):
    """Peak rates of one device, `spec` by its maker or `measured` by a calibration."""

    name: str
    flops_s: float | None
    bytes_s: float | None

    @property
    def ridge(self) -> float | None:
        """Return the FLOPs per byte at which both peaks are reached; None if one is unknown."""
        return self.flops_s / self.bytes_s if self.flops_s and self.bytes_s else None

    def attainable(self, intensity: float) -> float | None:
        """Return the FLOP/s that the known peaks allow; None if none is known."""
        known = [self.flops_s] if self.flops_s else []
        known += [self.bytes_s * intensity] if self.bytes_s else []
        return min(known, default=None)


class Point(NamedTuple):
    """Rates of some steps, per device."""

    flops_s: float
    bytes_s: float
    intensity: float
    """FLOPs per byte."""


class Load(NamedTuple):
    """Work of a mean step, in parts: what it reads once, and what each unit adds.

    A unit is a prompt token of a prefill step, or a request of a decode step.
    """

    units: float
    weight_bytes: float
    unit_bytes: float
    unit_flops: float

    def seconds(self, ceiling: Ceiling, *, units: float, weight_bytes: float) -> float | None:
        """Return the time that a ceiling allows for another step; None if a peak is unknown."""
        if not ceiling.flops_s or not ceiling.bytes_s:
            return None
        moved = weight_bytes + units * self.unit_bytes
        return max(moved / ceiling.bytes_s, units * self.unit_flops / ceiling.flops_s)


def ceilings(counters: CountersView) -> list[Ceiling]:
    """Return the known ceilings of an engine's device, the measured one first."""
    found = []
    for name in ("measured", "spec"):
        flops_s = counters.compute_peaks_flops_s.get(name)
        bytes_s = counters.memory_peaks_bytes_s.get(name)
        if flops_s or bytes_s:
            found.append(Ceiling(name, flops_s, bytes_s))
    return found


def total(seconds: Iterable[KindSums]) -> KindSums:
    """Return the sums over some seconds."""
    rows = [[getattr(each, name) for name in KindSums.__struct_fields__] for each in seconds]
    return KindSums(*(sum(column) for column in zip(*rows, strict=True))) if rows else KindSums()


def point_of(sums: KindSums) -> Point | None:
    """Return the point of some steps; None without steps, or if their work is not counted."""
    moved = sums.read_bytes + sums.write_bytes
    if not (sums.device_ns and sums.flops and moved):
        return None
    scale = 1e9 / sums.device_ns
    return Point(sums.flops * scale, moved * scale, sums.flops / moved)


def load_of(sums: KindSums, *, is_prefill: bool) -> Load | None:
    """Return the work of a mean step; None without counted steps."""
    units = sums.prefill_tokens if is_prefill else sums.requests
    if not (sums.steps and units and sums.flops):
        return None
    rest_bytes = sums.read_bytes + sums.write_bytes - sums.weight_bytes
    return Load(
        units / sums.steps, sums.weight_bytes / sums.steps, rest_bytes / units, sums.flops / units
    )


def compute_bound_from(load: Load, ceiling: Ceiling, *, weight_bytes: float) -> float | None:
    """Return the units per step at which FLOPs begin to limit a step.

    Args:
        load: work of a mean step.
        ceiling: peaks of the device.
        weight_bytes: bytes of all weights, which so large a step reads.

    Returns:
        None without a ridge, and infinity if the bytes of a unit alone keep it left of the ridge.
    """
    ridge = ceiling.ridge
    if ridge is None:
        return None
    spare = load.unit_flops - ridge * load.unit_bytes
    return weight_bytes * ridge / spare if spare > 0 else math.inf


def speedup(
    load: Load,
    ceiling: Ceiling,
    *,
    times_units: float = 1.0,
    times_weights: float = 1.0,
    weight_bytes: float,
) -> float | None:
    """Return how much more units per second the ceilings allow after a change.

    Args:
        load: work of a mean step now.
        ceiling: peaks of the device.
        times_units: factor of the units in a step, at the same context.
        times_weights: factor of the bytes of the weights.
        weight_bytes: bytes of all weights.

    Returns:
        None if a peak is unknown, or if more units would read more of the weights.
    """
    if times_units > 1 and load.weight_bytes < ALL_TOUCHED * weight_bytes:
        return None
    before_s = load.seconds(ceiling, units=load.units, weight_bytes=load.weight_bytes)
    after_s = load.seconds(
        ceiling,
        units=load.units * times_units,
        weight_bytes=load.weight_bytes * times_weights,
    )
    return before_s * times_units / after_s if before_s and after_s else None
