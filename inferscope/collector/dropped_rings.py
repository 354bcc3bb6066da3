"""What an engine's totals need of the rings that it dropped: those of processes that were replaced.

An engine that is restarted for months under one id has thousands of rings, and each would take
time at every Tick.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from inferscope.clock_skew import SkewedClock
from inferscope.collector.devices import Line, RankTime, successions
from inferscope.collector.rings import RingState, chiefs, skewed_clock

_MOST_SKEWED = 64


class DroppedRings:
    """Sums over dropped rings.

    Attributes:
        lines: device time of their ranks, which later processes continue.
        cost_ns: of their probes.
        num_replaced: those whose end was the engine's, and not in good order.
        has_spans: some reported when steps were executed.
        is_synthetic: some said that their records are made up.
        skewed_clocks: of the newest ones.
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
        """Add what one ring adds to the totals.

        Args:
            ring: to be dropped; older ones of its role and rank were, if they have device time.
            time: of its rank's device, None where it reported no steps.
            rings: the engine's, this one among them.
            is_synthetic: its records, or those of its device, are made up.
        """
        rings = list(rings)
        if time is not None:
            self.lines = successions([(ring, time)], before=self.lines)
        self.cost_ns += 0 if ring.health is None else ring.health.cost_ns
        self.num_replaced += ring in chiefs(rings) and not ring.is_closed
        self.has_spans |= ring.has_spans
        self.is_synthetic |= is_synthetic
        skewed = skewed_clock(ring, rings)
        if skewed is not None:
            self.skewed_clocks.append(skewed)
