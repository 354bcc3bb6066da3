"""Queued requests that an engine could admit and does not: the sign of a scheduler that is stuck.

A queue is normal while something is scarce. Nothing is scarce for a queued request where

    no request runs     nothing holds a slot or a KV block
    requests run        the scheduler has planned a step since the request was queued, passed the
                        request over, and reported that neither slots, blocks nor tokens were short

A long step proves nothing: until it ends the scheduler plans none. A prefill or decode
worker of a disaggregated engine has requests that wait for the other worker, and no record shows
which, so the number is unknown there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from inferscope.attribution import HELD, RUNNING, WAITING
from inferscope.fold.requests import Request
from inferscope.fold.rings import RingState


def num_admissible(
    states: Iterable[tuple[Request, int]],
    rings: Iterable[RingState],
    *,
    role: str,
    max_running: int,
    has_admitted: bool,
) -> int | None:
    """Return how many queued requests an engine could admit, None where that is unknown.

    Args:
        states: requests that are not final, with their current states.
        rings: of the engine's current processes.
        role: of the engine in disaggregated serving: prefill, decode or both.
        max_running: slots of a replica, 0 where unknown.
        has_admitted: the engine has reported an admission.
    """
    cores = {id(ring.slots): ring for ring in rings if ring.is_core}
    if not cores or role != "both" or not all(ring.is_observing for ring in cores.values()):
        return None
    num_running: Counter[int] = Counter()
    queued: list[tuple[Request, int]] = []
    num_handed_over = 0
    for request, state in states:
        if state in (RUNNING, WAITING, HELD):
            core = next((id(s) for s, _ in request.bindings if id(s) in cores), None)
            if state == RUNNING:
                num_running[core or 0] += 1
            elif core is not None:
                queued.append((request, core))
            else:  # its prompt is tokenised, so only the core's acceptance is missing
                num_handed_over += 1
    num = sum(
        cores[core].paused_ns is None
        and (
            not num_running[core] or _is_passed_over(request, cores[core], max_running=max_running)
        )
        for request, core in queued
    )
    # Which replica would take a request that no core has accepted is unknown, and a core whose
    # hooks are missing accepts none.
    is_idle = has_admitted and not num_running.total()
    return num + num_handed_over if is_idle else num


def _is_passed_over(request: Request, core: RingState, *, max_running: int) -> bool:
    """Return whether the last plan left a request out although nothing was scarce."""
    plan = core.plan
    if plan is None or plan.binding != "none" or 0 < max_running <= plan.running:
        return False
    if request.adapter:  # slots of adapters are scarce as well, and are not recorded
        return False
    since_ns = request.arrived_ns if request.accepted_ns is None else request.accepted_ns
    if request.preempted_ns:
        since_ns = max(since_ns, request.preempted_ns[-1][0])
    return since_ns < plan.start_ns
