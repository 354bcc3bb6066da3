"""Which rank the others wait for: it is silent, or has not done what they have.

Ranks of one pipeline stage execute a step at the same time. One that hangs keeps the others from
the next step, or, where the device waits in a collective, from the end of this one:

    silent      nothing has come from its process for 5 s, and something from another's
    not over    the others have told their spans of the oldest step, and it has not
    not begun   they are in that step, and it is in none

A rank in a step that all are in is late with all others: that a step takes long says nothing of
who hangs in it. A rank that has nothing to do is heard of every ten seconds, when its ring restates
itself: only silence beyond that is one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from inferscope.collector.rings import SILENT_NS, RingState, in_office
from inferscope.collector.snapshot import RankView
from inferscope.collector.steps import PendingStep
from inferscope.records import ON


def overdue(
    rings: Iterable[RingState], steps: Iterable[PendingStep], now_ns: int, *, is_at_work: bool
) -> tuple[RankView, ...]:
    """Return for how long each rank has been waited for by those beside it.

    Args:
        rings: of an engine.
        steps: of which something is still to come.
        now_ns: the fold's time.
        is_at_work: requests run, or a step is under way; who has nothing to do may be silent.
    """
    there = in_office(rings, now_ns)
    heard_ns = max((ring.last_ns for ring in there), default=0) if is_at_work else 0
    beside: dict[tuple[int, int], list[RingState]] = {}
    for ring in there:
        has_begun = ring.opened.start_ns < now_ns and ring.state == ON
        if has_begun and (ring.is_worker or ring.has_spans):
            stage = 0 if ring.info is None else ring.info.ranks[1]
            beside.setdefault((ring.dp_rank, stage), []).append(ring)
    oldest: dict[int, PendingStep] = {}
    for step in steps:
        first = oldest.get(step.dp_rank)
        if first is None or step.start_ns < first.start_ns:
            oldest[step.dp_rank] = step
    return tuple(
        RankView(dp_rank, ring.opened.rank, since_ns and now_ns - since_ns)
        for (dp_rank, _), group in sorted(beside.items())
        if len(group) > 1
        for ring, since_ns in zip(group, _since(group, oldest.get(dp_rank), heard_ns), strict=True)
    )


def _since(group: Sequence[RingState], step: PendingStep | None, heard_ns: int) -> list[int]:
    """Return since when each of some ranks has been waited for, 0 for one that is not."""
    spans = {} if step is None else step.spans
    told_ns = [spans[ring.opened.ring].t_ns for ring in group if ring.opened.ring in spans]
    under_way_ns = [ns for ring in group if (ns := _under_way_since(ring))]
    since_ns = []
    for ring in group:
        at_ns = 0
        if heard_ns - ring.last_ns > SILENT_NS:
            at_ns = ring.last_ns
        elif told_ns:
            at_ns = 0 if ring.opened.ring in spans else min(told_ns)
        elif under_way_ns and not _under_way_since(ring):
            at_ns = min(under_way_ns)
        since_ns.append(at_ns)
    return since_ns


def _under_way_since(ring: RingState) -> int:
    """Return when the step began that a rank is in by its last report, 0 for none."""
    health = ring.health
    if health is None or health.complete_through_ns >= health.t_ns:
        return 0
    return health.complete_through_ns
