"""State of an engine's rings in the fold: process, progress, health and succession."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from inferscope.clock_skew import Offsets, SkewedClock, skew_between_ns
from inferscope.fold.clocks import DeviceClock
from inferscope.fold.slots import SlotMap
from inferscope.fold.steps import RankSpan, rank_span
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
"""Time without records after which a ring with requests in flight counts as lost."""
GONE_NS = 15_000_000_000
"""Time without records after which a process counts as exited: keyframes come every 10 s."""
_LAST_WORDS_NS = 1_000_000_000
"""Time for which the records of a core that is being stopped may still come."""
DROPPED_NS = 60_000_000_000
"""Time after the last record of a replaced process until its ring is dropped: late facts are judged
by the rings that existed at their time."""
PAST_NS = 500_000_000
"""Time after the last record of a step beyond which a process adds nothing to that step."""


class RingState:
    """State of one ring in the fold."""

    def __init__(self, opened: RingOpened) -> None:
        self.opened = opened
        self.is_front_end = opened.role == "frontend"
        """Whether the ring belongs to a front end, whose times are the client's."""
        self.slots = SlotMap(opened.role, opened.rank)
        self.clock = DeviceClock()
        self.info: EngineInfo | None = None
        self.dp_rank = 0
        """Data-parallel rank of its replica; each replica numbers its own steps."""
        self.last_ns = opened.t_ns
        self.health: ProbeHealth | None = None
        self.state = ON
        self.cost_ns = self.hidden_ns = 0
        self.has_spans = False
        self.spanned_ns = 0
        """Time of its newest span: a step that was launched ahead begins after it."""
        self.has_bare_steps = False
        """Whether it reported slices of a step whose execution no process reported."""
        self.is_worker = opened.role not in ("core", "frontend")
        """Whether it belongs to a worker, whose spans are expected from the start."""
        self.is_out = False
        """Whether no further records are expected from it."""
        self.plan: StepPlan | None = None
        """Last plan of its scheduler."""
        self.paused_ns: int | None = None
        """Start of the pause of its process; None while it is not paused."""
        self.has_lost_frames = False
        self.is_lost = False
        self.front_end_closed_ns: int | None = None
        """Time at which its only front end shut down: vLLM and SGLang kill their cores then, before
        these can write a shutdown record. A front end whose core died leaves none either."""
        self.is_unsupported = False
        """Whether its probe reported that it cannot observe the engine; it may be closed by now."""
        self.listed: set[int] | None = None
        """Requests listed so far by the keyframe being read; None outside of a keyframe."""
        self.unlisted: set[int] = set()
        """Requests that the last keyframe did not list."""
        self.wall_offsets: Offsets | None = None
        """Wall clock minus monotonic clock in its first and in its newest `Clock`."""

    def take_clock(self, clock: Clock) -> None:
        """Update the offset between the clocks of its process."""
        now = Offsets(*[clock.real_ns - clock.at_ns] * 2, *[clock.real_ns] * 2)
        first = self.wall_offsets or now
        self.wall_offsets = Offsets(
            first.first_ns, now.last_ns, first.first_real_ns, now.last_real_ns
        )

    def placed(self, span: StepSpan) -> RankSpan:
        """Return one of its spans on the host's clock."""
        stage = self.info.ranks[1] if self.info is not None else 0
        opened = self.opened
        return rank_span(span, self.clock, ring=opened.ring, rank=opened.rank, stage=stage)

    @property
    def is_core(self) -> bool:
        """Return whether its process runs a scheduler."""
        return not (self.is_front_end or self.is_worker)

    @property
    def authority(self) -> int:
        """Return the precedence of its engine description: front end 0, worker 1, core 2."""
        return 0 if self.is_front_end else 1 if self.is_worker else 2

    @property
    def is_closed(self) -> bool:
        """Return whether its process has written a shutdown record."""
        return self.state == CLOSED

    @property
    def has_shut_down(self) -> bool:
        """Return whether its process ended in good order, or was stopped by its front end."""
        stopped_ns = self.front_end_closed_ns
        return self.is_closed or (
            stopped_ns is not None
            and -GONE_NS <= self.last_ns - stopped_ns <= _LAST_WORDS_NS  # it ran until then
        )

    @property
    def is_observing(self) -> bool:
        """Return whether its probe observes its process, by the state it reports."""
        states = (OFF, FAILED, OVER_BUDGET, UNSUPPORTED)
        return not (self.is_unsupported or self.state in states)

    @property
    def is_keeping(self) -> bool:
        """Return whether requests in flight are kept here: a core's only while it is observed."""
        return self.is_observing or not self.is_core

    def enter(self, state: int) -> None:
        """Set the probe's state from a keyframe or a report."""
        self.state = state
        self.is_unsupported |= state == UNSUPPORTED

    def is_silent(self, now_ns: int) -> bool:
        """Return whether the ring is closed, or has no record for `SILENT_NS` although it is on."""
        return self.is_closed or (self.state != OFF and now_ns - self.last_ns > SILENT_NS)

    def is_gone(self, now_ns: int) -> bool:
        """Return whether the ring is closed, or has no record for `GONE_NS` although it is on."""
        return self.is_closed or (self.state != OFF and now_ns - self.last_ns > GONE_NS)

    def is_past(self, at_ns: int) -> bool:
        """Return whether it has reported everything about a step last reported at this time."""
        through_ns = 0 if self.health is None else self.health.complete_through_ns
        return self.is_out or through_ns > at_ns + PAST_NS


def current_rings(rings: Iterable[RingState], now_ns: int) -> list[RingState]:
    """Return the rings without those of processes that ended and were replaced.

    An engine restarted under the same ID is the same engine; the descriptions by its earlier
    processes no longer apply. A process is replaced by the next one of its role and rank or, if the
    engine has fewer ranks than before, by the run that began after its last record.
    """
    rings = list(rings)
    newest = newest_rings(rings, now_ns)
    since_ns = _run_start_ns(newest.values())
    there = []
    for ring in rings:
        successor = newest.get(ring.slots.origin, ring)
        is_succeeded = successor is not ring or ring.last_ns < since_ns
        has_ended = ring.is_silent(now_ns) or successor.opened.start_ns > ring.last_ns
        if not (is_succeeded and has_ended):
            there.append(ring)
    return there


def _run_start_ns(newest: Iterable[RingState]) -> int:
    """Return when an engine's current run began, by the newest ring of each role and rank.

    A core with records after another began is in the same run: one replica may start later than the
    others, or restart. Without a core ring, the workers' rings decide.
    """
    newest = list(newest)
    top = max((ring.authority for ring in newest), default=0)
    deciding = [ring for ring in newest if ring.authority == top]
    last_start_ns = max((ring.opened.start_ns for ring in deciding), default=0)
    starts_ns = (ring.opened.start_ns for ring in deciding if ring.last_ns >= last_start_ns)
    return min(starts_ns, default=0)


def newest_rings(rings: Iterable[RingState], now_ns: int) -> dict[tuple[str, int], RingState]:
    """Return the newest ring of each role and rank at a time.

    A reader of a recording opens all rings at once: those that begin later replace no ring yet.
    """
    begun = (ring for ring in rings if ring.opened.start_ns < now_ns)
    by_start = sorted(begun, key=lambda ring: ring.opened.start_ns)
    return {ring.slots.origin: ring for ring in by_start}


def replaced(
    rings: Iterable[RingState], newest: dict[tuple[str, int], RingState], now_ns: int
) -> list[RingState]:
    """Return the rings that ended long ago and hold no request, and whose successor has begun.

    Args:
        rings: rings of an engine.
        newest: the newest ring of each role and rank.
        now_ns: time of the fold.
    """
    found = []
    for ring in rings:
        successor = newest.get(ring.slots.origin, ring)
        if successor is ring or now_ns - ring.last_ns <= DROPPED_NS:
            continue
        has_ended = ring.is_gone(now_ns) or successor.opened.start_ns > ring.last_ns
        is_described = successor.info is not None or ring.info is None
        if has_ended and is_described and not ring.slots.known():
            found.append(ring)
    return found


def is_core_observed(rings: Iterable[RingState], now_ns: int) -> bool:
    """Return whether a request that no core has reported was indeed in no core.

    That holds if the engine has core rings and the probes of all of them observe. A core that was
    killed, or whose ring has a gap, counts: its requests are lost or joined late.
    """
    newest = newest_rings(rings, now_ns).values()
    cores = [ring for ring in newest if not (ring.is_front_end or ring.is_worker)]
    return bool(cores) and all(ring.is_observing for ring in cores)


def has_several_cores(rings: Iterable[RingState], newest: dict[tuple[str, int], RingState]) -> bool:
    """Return whether two processes report as the same core now: their steps are ambiguous.

    Args:
        rings: rings of an engine, with `is_out` up to date.
        newest: the newest ring of each role and rank.
    """
    for ring in rings:
        other = newest.get(ring.slots.origin, ring)
        if ring.is_core and other is not ring and not (ring.is_out or other.is_out):
            return True
    return False


def is_compute_observed(newest: Iterable[RingState]) -> bool:
    """Return whether every replica has a process that reports step executions.

    A replica has none if no process reports them now, and its workers' probes do not observe or a
    step passed without an execution.

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
    """Return the features that the rings' probes report as unsupported, each once."""
    reports = [ring.health for ring in rings if ring.health is not None]
    return tuple(dict.fromkeys(name for report in reports for name in report.unsupported))


def skewed_clocks(rings: Iterable[RingState]) -> tuple[SkewedClock, ...]:
    """Return the processes of an engine whose clocks were corrected or differ from the core's."""
    rings = list(rings)
    found = (skewed_clock(ring, rings) for ring in rings)
    return tuple(skewed for skewed in found if skewed is not None)


def skewed_clock(ring: RingState, rings: Sequence[RingState]) -> SkewedClock | None:
    """Return the skew of the clock of one of an engine's processes; None without skew."""
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
    process = opened.engine_id, opened.role, opened.rank, opened.pid
    return SkewedClock(*process, skew_ns, is_corrected)


def paused_since(rings: Iterable[RingState], now_ns: int) -> int | None:
    """Return since when an engine is paused: all its cores are, or all its front ends are.

    If only one of several replicas is paused, the requests that wait for it are unknown.
    """
    there = (ring for ring in current_rings(rings, now_ns) if ring.opened.start_ns <= now_ns)
    rings = [ring for ring in there if not (ring.is_closed or ring.is_worker)]
    for is_front_end in (False, True):
        paused = [ring.paused_ns for ring in rings if ring.is_front_end == is_front_end]
        since_ns = [at_ns for at_ns in paused if at_ns is not None]
        if since_ns and len(since_ns) == len(paused):
            return max(since_ns)
    return None


def liveness_rings(rings: Iterable[RingState]) -> list[RingState]:
    """Return the core rings, or all rings without a core."""
    rings = list(rings)
    return [ring for ring in rings if ring.opened.role == "core"] or rings


def probe_state(rings: Iterable[RingState]) -> str:
    """Return the worst state of an engine's rings: one of PROBE_STATES, or lost."""
    rings = list(rings)
    if any(ring.is_lost and not ring.has_shut_down for ring in rings):
        return "lost"
    if all(ring.has_shut_down for ring in liveness_rings(rings)):
        return PROBE_STATES[CLOSED]
    worst = max((ring.state for ring in rings if not ring.has_shut_down), default=ON)
    return PROBE_STATES[worst] if worst < len(PROBE_STATES) else "unknown"
