"""What the fold knows of one ring: who tells, how far it is heard, which requests it numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from inferscope.clock_skew import Offsets, SkewedClock, skew_between_ns
from inferscope.collector.clocks import DeviceClock
from inferscope.collector.slots import SlotMap
from inferscope.collector.steps import RankSpan, rank_span
from inferscope.records import (
    CLOSED,
    FAILED,
    OFF,
    ON,
    OVER_BUDGET,
    PROBE_STATES,
    UNSUPPORTED,
    Clock,
    EngineInfo,
    ProbeHealth,
    RingOpened,
    StepPlan,
    StepSpan,
)

SILENT_NS = 5_000_000_000
"""A ring with requests in flight and no record for this long has lost its process."""
GONE_NS = 15_000_000_000
"""A ring restates itself every 10 s, idle or not."""
DROPPED_NS = 60_000_000_000
"""Time after the last record of a process that was replaced, until its ring is dropped: facts of
earlier times that still come are judged by the rings that there were."""
PAST_NS = 500_000_000
"""A process that is complete up to this long after a step was last spoken of adds nothing to it."""


class RingState:
    """What the fold knows of one ring."""

    def __init__(self, opened: RingOpened) -> None:
        self.opened = opened
        self.is_front_end = opened.role == "frontend"
        """Its times are those the client sees."""
        self.slots = SlotMap(opened.role, opened.rank)
        self.clock = DeviceClock()
        self.info: EngineInfo | None = None
        self.dp_rank = 0
        """Which of the engine's replicas it belongs to; each counts its own steps."""
        self.last_ns = opened.t_ns
        self.health: ProbeHealth | None = None
        self.state = ON
        self.cost_ns = self.hidden_ns = 0
        self.has_spans = False
        self.has_bare_steps = False
        """It has reported who is in a step of which no process reported the execution."""
        self.is_worker = opened.role not in ("core", "frontend")
        """Its spans are waited for even before the first."""
        self.is_out = False
        """Nobody waits for it any more."""
        self.plan: StepPlan | None = None
        """The last plan of its scheduler."""
        self.paused_ns: int | None = None
        """Since when somebody has paused what its process does."""
        self.has_lost_frames = False
        self.is_lost = False
        self.is_unsupported = False
        """Its probe has reported that it cannot observe the engine; it may be closed by now."""
        self.listed: set[int] | None = None
        """Requests that the keyframe being read has named; None outside of one."""
        self.unlisted: set[int] = set()
        """Requests that the last keyframe did not name."""
        self.wall_offsets: Offsets | None = None
        """Wall clock less monotonic clock in its first and in its newest `Clock`."""

    def take_clock(self, clock: Clock) -> None:
        """Note how far apart its process's clocks are."""
        now = Offsets(*[clock.real_ns - clock.at_ns] * 2, *[clock.real_ns] * 2)
        first = self.wall_offsets or now
        self.wall_offsets = Offsets(
            first.first_ns, now.last_ns, first.first_real_ns, now.last_real_ns
        )

    def placed(self, span: StepSpan) -> RankSpan:
        """Place one of its spans on the host's clock."""
        stage = self.info.ranks[1] if self.info is not None else 0
        opened = self.opened
        return rank_span(span, self.clock, ring=opened.ring, rank=opened.rank, stage=stage)

    @property
    def is_core(self) -> bool:
        """Return whether its process has a scheduler."""
        return not (self.is_front_end or self.is_worker)

    @property
    def authority(self) -> int:
        """Return whose word on the engine counts: the core's, then a worker's, a front end's."""
        return 0 if self.is_front_end else 1 if self.is_worker else 2

    @property
    def is_closed(self) -> bool:
        """Tell whether its process has said goodbye."""
        return self.state == CLOSED

    @property
    def is_observing(self) -> bool:
        """Return whether its probe reports what its process does, by its own state."""
        states = (OFF, FAILED, OVER_BUDGET, UNSUPPORTED)
        return not (self.is_unsupported or self.state in states)

    @property
    def is_keeping(self) -> bool:
        """Return whether requests in flight stay known here: a core's only while it is observed."""
        return self.is_observing or not self.is_core

    def enter(self, state: int) -> None:
        """Take the probe's state from a keyframe or a report."""
        self.state = state
        self.is_unsupported |= state == UNSUPPORTED

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


def in_office(rings: Iterable[RingState], now_ns: int) -> list[RingState]:
    """Leave out those whose process has ended and has been succeeded.

    An engine that is started again under the same id is the same engine: what its processes before
    said of themselves is over. One is succeeded by the next of its role and rank; where the engine
    has fewer ranks than before, by those of the run that began after it was last heard of.
    """
    rings = list(rings)
    newest = heirs(rings, now_ns)
    since_ns = _run_start_ns(newest.values())
    there = []
    for ring in rings:
        heir = newest.get(ring.slots.teller, ring)
        is_succeeded = heir is not ring or ring.last_ns < since_ns
        has_ended = ring.is_silent(now_ns) or heir.opened.start_ns > ring.last_ns
        if not (is_succeeded and has_ended):
            there.append(ring)
    return there


def _run_start_ns(newest: Iterable[RingState]) -> int:
    """Return when the run began that an engine is in, by the newest ring of each role and rank.

    A core that is heard of after another began is in the same run: one replica may be started
    later than the others, or again. Where no core tells, workers do.
    """
    newest = list(newest)
    top = max((ring.authority for ring in newest), default=0)
    tellers = [ring for ring in newest if ring.authority == top]
    last_start_ns = max((ring.opened.start_ns for ring in tellers), default=0)
    starts_ns = (ring.opened.start_ns for ring in tellers if ring.last_ns >= last_start_ns)
    return min(starts_ns, default=0)


def heirs(rings: Iterable[RingState], now_ns: int) -> dict[tuple[str, int], RingState]:
    """Return the newest ring of each role and rank at a time.

    A reader of the past has opened all rings at once: those that come later succeed nobody yet.
    """
    begun = (ring for ring in rings if ring.opened.start_ns < now_ns)
    by_start = sorted(begun, key=lambda ring: ring.opened.start_ns)
    return {ring.slots.teller: ring for ring in by_start}


def replaced(
    rings: Iterable[RingState], newest: dict[tuple[str, int], RingState], now_ns: int
) -> list[RingState]:
    """Return the rings that have ended long ago and hold no request, and whose heir has begun.

    Args:
        rings: of an engine.
        newest: the newest ring of each role and rank.
        now_ns: the fold's time.
    """
    found = []
    for ring in rings:
        heir = newest.get(ring.slots.teller, ring)
        if heir is ring or now_ns - ring.last_ns <= DROPPED_NS:
            continue
        has_ended = ring.is_gone(now_ns) or heir.opened.start_ns > ring.last_ns
        is_described = heir.info is not None or ring.info is None
        if has_ended and is_described and not ring.slots.known():
            found.append(ring)
    return found


def is_core_observed(rings: Iterable[RingState], now_ns: int) -> bool:
    """Return whether a request that no core has reported was in no core either.

    It was not if the engine has core rings and the probes of all of them report what they see. A
    core that was killed, or whose ring has a gap, counts: its requests are lost or joined late.
    """
    newest = heirs(rings, now_ns).values()
    cores = [ring for ring in newest if not (ring.is_front_end or ring.is_worker)]
    return bool(cores) and all(ring.is_observing for ring in cores)


def has_several_cores(rings: Iterable[RingState], newest: dict[tuple[str, int], RingState]) -> bool:
    """Return whether two processes report as the same core now: their steps cannot be told apart.

    Args:
        rings: of an engine, `is_out` up to date.
        newest: the newest ring of each role and rank.
    """
    for ring in rings:
        other = newest.get(ring.slots.teller, ring)
        if ring.is_core and other is not ring and not (ring.is_out or other.is_out):
            return True
    return False


def is_compute_observed(newest: Iterable[RingState]) -> bool:
    """Return whether every replica has a process that reports when its steps were executed.

    It has none if none did so far, or all that did have stopped, and its workers' probes report
    nothing, or a step went by without.

    Args:
        newest: the newest ring of each role and rank.
    """
    replicas: dict[int, list[RingState]] = {}
    for ring in newest:
        if not ring.is_front_end:
            replicas.setdefault(ring.dp_rank, []).append(ring)
    for rings in replicas.values():
        if any(ring.has_spans and ring.is_observing for ring in rings):
            continue
        workers = [ring for ring in rings if ring.is_worker]
        if workers and not any(ring.is_observing for ring in workers):
            return False
        if any(ring.has_bare_steps for ring in rings):
            return False
    return True


def unsupported_by(rings: Iterable[RingState]) -> tuple[str, ...]:
    """Return what the probes of some rings report as unsupported, each feature once."""
    reports = [ring.health for ring in rings if ring.health is not None]
    return tuple(dict.fromkeys(name for report in reports for name in report.unsupported))


def skewed_clocks(rings: Iterable[RingState]) -> tuple[SkewedClock, ...]:
    """Return the processes of an engine whose clocks were corrected, or are not the core's."""
    rings = list(rings)
    found = (skewed_clock(ring, rings) for ring in rings)
    return tuple(skewed for skewed in found if skewed is not None)


def skewed_clock(ring: RingState, rings: Sequence[RingState]) -> SkewedClock | None:
    """Return how far off the clock of one of an engine's processes is; None where it is not."""
    cores = (ring for ring in rings if not (ring.is_front_end or ring.is_worker))
    reference = next((ring for ring in cores if ring.wall_offsets is not None), None)
    opened = ring.opened
    skew_ns, is_corrected = opened.skew_ns, True
    if (
        reference is not None
        and reference.wall_offsets is not None
        and ring.wall_offsets is not None
        and opened.boot_id == reference.opened.boot_id
    ):
        rest_ns = skew_between_ns(ring.wall_offsets, reference.wall_offsets)
        if rest_ns:
            skew_ns, is_corrected = rest_ns, False
    if not skew_ns:
        return None
    who = opened.engine_id, opened.role, opened.rank, opened.pid
    return SkewedClock(*who, skew_ns, is_corrected)


def paused_since(rings: Iterable[RingState], now_ns: int) -> int | None:
    """Return since when an engine is paused: all its cores are, or nobody in front lets anyone in.

    Where one of several replicas is paused, nobody knows whose requests wait for that.
    """
    there = (ring for ring in in_office(rings, now_ns) if ring.opened.start_ns <= now_ns)
    rings = [ring for ring in there if not (ring.is_closed or ring.is_worker)]
    for is_front_end in (False, True):
        paused = [ring.paused_ns for ring in rings if ring.is_front_end == is_front_end]
        since_ns = [at_ns for at_ns in paused if at_ns is not None]
        if since_ns and len(since_ns) == len(paused):
            return max(since_ns)
    return None


def chiefs(rings: Iterable[RingState]) -> list[RingState]:
    """Return the rings whose goodbye is the engine's: the cores', where there is none all."""
    rings = list(rings)
    return [ring for ring in rings if ring.opened.role == "core"] or rings


def probe_state(rings: Iterable[RingState]) -> str:
    """Return the worst state of an engine's rings: one of PROBE_STATES, or lost.

    Front ends leave in good order when their core is killed: their goodbyes say nothing.
    """
    rings = list(rings)
    if any(ring.is_lost for ring in rings):
        return "lost"
    if all(ring.is_closed for ring in chiefs(rings)):
        return PROBE_STATES[CLOSED]
    worst = max((ring.state for ring in rings if not ring.is_closed), default=ON)
    return PROBE_STATES[worst] if worst < len(PROBE_STATES) else "unknown"
