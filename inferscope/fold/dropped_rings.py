"""Totals over the dropped rings of an engine: those of replaced processes.

An engine that restarts for months under one ID has thousands of rings; each one that is kept takes
time at every Tick.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from inferscope.clock_skew import SkewedClock
from inferscope.fold.devices import Line, RankTime, successions
from inferscope.fold.rings import RingState, liveness_rings, skewed_clock

_MOST_SKEWED = 64


class DroppedRings:
    """Sums over dropped rings.

    Attributes:
        lines: device time of their ranks, which later processes continue.
        cost_ns: cost of their probes.
        num_replaced: rings whose end was the engine's, and which did not shut down.
        has_spans: whether one reported executed steps.
        is_synthetic: whether one has synthetic records.
        skewed_clocks: skewed clocks of the newest rings.
    """

    def __init__(self) -> None:
        self.lines: list[Line] = []
        self.cost_ns = 0
        self.num_replaced = 0
        self.has_spans = False
        self.is_synthetic = False
        self.skewed_clocks: deque[SkewedClock] = deque(maxlen=_MOST_SKEWED)

    def add(
        self,
        ring: RingState,
        time: RankTime | None,
        *,
        rings: Iterable[RingState],
        is_synthetic: bool,
    ) -> None:
        """Add a ring to the totals.

        Args:
            ring: ring to drop, after the older ones of its role and rank that have device time.
            time: time of its rank's device, None if it reported no steps.
            rings: rings of the engine, this one included.
            is_synthetic: whether its records, or those of its device, are synthetic.
        """
        rings = list(rings)
        if time is not None:
            self.lines = successions([(ring, time)], before=self.lines)
        self.cost_ns += 0 if ring.health is None else ring.health.cost_ns
        self.num_replaced += ring in liveness_rings(rings) and not ring.has_shut_down
        self.has_spans |= ring.has_spans
        self.is_synthetic |= is_synthetic
        skewed = skewed_clock(ring, rings)
        if skewed is not None:
            self.skewed_clocks.append(skewed)
