"""Detection of overdue ranks: those that are silent or behind their peers.

Ranks of one pipeline stage execute a step at the same time. A hung rank delays the others' next
step or, if the devices wait in a collective, the end of the current one:

    silent      no record from its process for 5 s, while another process reports
    not over    the others have reported their spans of the oldest step, and it has not
    not begun   the others are in that step, and it is in none

If all ranks are in a step, its duration does not show which of them hangs. An idle rank reports
every ten seconds, when its ring writes a keyframe: it is silent only after longer than that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from inferscope.fold.rings import SILENT_NS, RingState, current_rings
from inferscope.fold.snapshots import RankView
from inferscope.fold.steps import PendingStep
from inferscope.records import ON


def overdue(
    rings: Iterable[RingState], steps: Iterable[PendingStep], now_ns: int, *, is_at_work: bool
) -> tuple[RankView, ...]:
    """Return how long the other ranks of its stage have waited for each rank.

    Args:
        rings: rings of an engine.
        steps: incomplete steps.
        now_ns: time of the fold.
        is_at_work: whether requests run or a step is in progress; idle ranks may be silent.
    """
    there = current_rings(rings, now_ns)
    newest_ns = max((ring.last_ns for ring in there), default=0) if is_at_work else 0
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
        for ring, since_ns in zip(group, _since(group, oldest.get(dp_rank), newest_ns), strict=True)
    )


def _since(group: Sequence[RingState], step: PendingStep | None, newest_ns: int) -> list[int]:
    """Return the time since which the others wait for each rank; 0 for a rank not waited for."""
    spans = {} if step is None else step.spans
    ended_ns = [spans[ring.opened.ring].t_ns for ring in group if ring.opened.ring in spans]
    under_way_ns = [ns for ring in group if (ns := _under_way_since(ring))]
    since_ns = []
    for ring in group:
        at_ns = 0
        if newest_ns - ring.last_ns > SILENT_NS:
            at_ns = ring.last_ns
        elif ended_ns:
            at_ns = 0 if ring.opened.ring in spans else min(ended_ns)
        elif under_way_ns and not _under_way_since(ring):
            at_ns = min(under_way_ns)
        since_ns.append(at_ns)
    return since_ns


def _under_way_since(ring: RingState) -> int:
    """Return when the step began that a rank is in by its last report; 0 without one."""
    health = ring.health
    if health is None or health.complete_through_ns >= health.t_ns:
        return 0
    return health.complete_through_ns
