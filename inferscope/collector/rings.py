"""What the fold knows of one ring: who tells, how far it is heard, which requests it numbers."""

from __future__ import annotations

from inferscope.collector.clocks import DeviceClock
from inferscope.collector.rows import KeptRows
from inferscope.collector.slots import SlotMap
from inferscope.collector.steps import RankSpan, rank_span
from inferscope.records import CLOSED, OFF, ON, EngineInfo, ProbeHealth, RingOpened, StepSpan

SILENT_NS = 5_000_000_000
"""A ring with requests in flight and no record for this long has lost its process."""
GONE_NS = 15_000_000_000
"""A ring restates itself every 10 s, idle or not."""
PAST_NS = 500_000_000
"""A process that is complete up to this long after a step was last spoken of adds nothing to it."""


class RingState:
    """What the fold knows of one ring."""

    def __init__(self, opened: RingOpened) -> None:
        self.opened = opened
        self.slots = SlotMap(opened.role, opened.rank)
        self.clock = DeviceClock()
        self.info: EngineInfo | None = None
        self.dp_rank = 0
        """Which of the engine's replicas it belongs to; each counts its own steps."""
        self.last_ns = opened.t_ns
        self.health: ProbeHealth | None = None
        self.state = ON
        self.cost_ns = 0
        self.has_spans = False
        self.is_worker = opened.role not in ("core", "frontend")
        """Its spans are waited for even before the first."""
        self.is_out = False
        """Nobody waits for it any more."""
        self.has_lost_frames = False
        self.is_lost = False
        self.listed: set[int] | None = None
        """Requests that the keyframe being read has named; None outside of one."""
        self.unlisted: set[int] = set()
        """Requests that the last keyframe did not name."""
        self.kept_rows = KeptRows()

    def placed(self, span: StepSpan) -> RankSpan:
        """Place one of its spans on the host's clock."""
        stage = self.info.ranks[1] if self.info is not None else 0
        opened = self.opened
        return rank_span(span, self.clock, ring=opened.ring, rank=opened.rank, stage=stage)

    @property
    def is_front_end(self) -> bool:
        """Tell whether it is a front end's, whose times are those the client sees."""
        return self.opened.role == "frontend"

    @property
    def authority(self) -> int:
        """Return whose word on the engine counts: the core's, then a worker's, a front end's."""
        return 0 if self.is_front_end else 1 if self.is_worker else 2

    @property
    def is_closed(self) -> bool:
        """Tell whether its process has said goodbye."""
        return self.state == CLOSED

    def is_silent(self, now_ns: int) -> bool:
        """Tell whether it has said goodbye, or nothing for long although it is switched on."""
        return self.is_closed or (self.state != OFF and now_ns - self.last_ns > SILENT_NS)

    def is_gone(self, now_ns: int) -> bool:
        """Tell whether its process has said goodbye, or nothing for too long."""
        return self.is_closed or (self.state != OFF and now_ns - self.last_ns > GONE_NS)

    def is_past(self, at_ns: int) -> bool:
        """Tell whether it has told all it will tell of a step last spoken of at this time."""
        through_ns = 0 if self.health is None else self.health.complete_through_ns
        return self.is_out or through_ns > at_ns + PAST_NS
