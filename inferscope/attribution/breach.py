"""Causes of a missed objective: what would have met it, and what was unusual.

Two questions, answered from the request's own ledger and from its peers':

    but for it, would it have passed?   a cause took at least as long as the request was over
    what was out of the ordinary?       a cause took longer than in the median compliant request of
                                        like length

The first finds the *minimal set*: the fewest causes without which the objective is met. Own work is
counted among them only where all else together does not suffice. The second finds the *top* cause:
the largest row is mostly necessary work, so without peers a cause is named only if it is the only
candidate, a wait that is twice as long as all other waits together, or own work that alone misses
the objective. Unknown values are None.

A single gap between tokens has no ledger of its own, only all of them together have: for `tbt` a
cause that took too little is ruled out, and none is proved sufficient.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec
import numpy as np

from inferscope.attribution.metric_breakdown import LedgerView, Metric, MetricBreakdown, breakdown
from inferscope.attribution.peers import LatencyLimit as LatencyLimit
from inferscope.attribution.peers import Peer, Peers, beyond_ns
from inferscope.records import CAUSE_ROWS, CAUSES

OWN_WORK = frozenset(row.name for row in CAUSE_ROWS if row.is_own)
"""Causes of a request's own work, on an empty healthy machine."""
_FEWEST_PEERS = 5
"""Smallest number of peers whose median shows what is normal."""
_MOST_PEERS = 50
_DOMINANT = 2
"""Smallest ratio of a wait to all other waits together at which it is the main cause without peers:
in an overload no request of like length meets its objective."""
_QUEUES = frozenset({"queue", "queue_idle"})
"""Two rows of one wait: the queue, with a step running or without."""
_LIKE = 2
"""Largest ratio of two lengths that count as similar."""


class BreachCause(msgspec.Struct, frozen=True):
    """One cause of the time that an objective limits."""

    cause: str
    """Ledger row."""
    ns: int
    """Time of the cause."""
    is_sufficient: bool | None
    """Whether the objective would have been met without the cause; None where that is not known."""
    typical_ns: int | None = None
    """Time of the cause in the median compliant peer; None without peers."""

    @property
    def excess_ns(self) -> int | None:
        """Return how much longer it took than in the median compliant peer."""
        return None if self.typical_ns is None else self.ns - self.typical_ns


class Breach(msgspec.Struct, frozen=True):
    """One missed objective and its causes."""

    metric: Metric
    """Metric of the objective."""
    limit_ns: int
    """Limit of the objective."""
    actual_ns: int
    """Metric's value: of `tbt` the longest gap; a lower bound where no token came."""
    over_ns: int
    """Time beyond the limit, summed over the gaps for `tbt` and `tpot`."""
    num_gaps: int
    """Number of summed gaps; 1 where the metric is one span."""
    causes: tuple[BreachCause, ...]
    """Causes, those with the largest excess over their peers first; without peers the longest
    first, own work last."""
    top: str | None
    """Main cause; None where it is not known."""
    minimal_set: tuple[str, ...]
    """Fewest causes without which the objective would have been met; empty where they are not
    known."""
    num_peers: int
    """Compliant requests of similar length that it was compared with; 0 where there are too few."""

    @property
    def is_for_own_work(self) -> bool:
        """Return whether the request's own work alone would have missed the objective."""
        return any(cause in OWN_WORK for cause in self.minimal_set)


def breaches(
    request: LedgerView,
    objectives: Iterable[LatencyLimit],
    peers: Peers | Sequence[LedgerView] = (),
) -> tuple[Breach, ...]:
    """Explain each objective that a request missed.

    Args:
        request: request with its ledger.
        objectives: latency limits; an objective on a metric that the request lacks is not missed.
        peers: requests to compare with, of any length; those that are similar and met the objective
            are chosen, so the request itself may be among them. A `Peers` evaluates each request
            once for all breaches.
    """
    if not isinstance(peers, Peers):
        peers = Peers(peers)
    missed = (_breach(request, objective, peers) for objective in objectives)
    return tuple(breach for breach in missed if breach is not None)


def top_cause(
    request: LedgerView,
    objectives: Iterable[LatencyLimit],
    peers: Peers | Sequence[LedgerView] = (),
) -> str | None:
    """Return the main cause of the largest miss, relative to its limit."""
    missed = breaches(request, objectives, peers)
    if not missed:
        return None
    return max(missed, key=lambda breach: breach.over_ns / (breach.limit_ns * breach.num_gaps)).top


def is_met(request: LedgerView, objective: LatencyLimit) -> bool | None:
    """Return whether a request met an objective; None if it lacks the metric."""
    took = breakdown(request, objective.metric)
    return None if took is None else not beyond_ns(request, objective, took)


# --- one objective --------------------------------------------------------------------------------


def _breach(request: LedgerView, objective: LatencyLimit, peers: Peers) -> Breach | None:
    took = breakdown(request, objective.metric)
    if took is None:
        return None
    over_ns = beyond_ns(request, objective, took)
    if over_ns <= 0:
        return None
    alike = [
        peer for peer in peers.compliant(objective) if _is_like(peer.request, request, objective)
    ]
    # Take the nearest in time: normal durations drift with the machine and the load.
    alike.sort(key=lambda peer: abs(peer.request.arrived_ns - request.arrived_ns))
    like = alike[:_MOST_PEERS]
    typical_ns = _typical_ns(like, took.num_gaps) if len(like) >= _FEWEST_PEERS else None
    causes = _ranked(took, over_ns, typical_ns, is_one_span=objective.metric != "tbt")
    is_tbt = objective.metric == "tbt"
    return Breach(
        metric=objective.metric,
        limit_ns=objective.limit_ns,
        actual_ns=request.longest_gap_ns if is_tbt else round(took.whole_ns / took.num_gaps),
        over_ns=over_ns,
        num_gaps=took.num_gaps,
        causes=causes,
        top=_top(causes, over_ns, unseen_ns=took.whole_ns - sum(took.by_cause.values())),
        minimal_set=() if is_tbt else _minimal_set(took.by_cause, over_ns),
        num_peers=len(like) if typical_ns is not None else 0,
    )


def _ranked(
    took: MetricBreakdown, over_ns: int, typical_ns: Mapping[str, int] | None, *, is_one_span: bool
) -> tuple[BreachCause, ...]:
    causes = [
        BreachCause(
            cause,
            ns,
            (is_one_span or None) if ns >= over_ns else False,
            None if typical_ns is None else typical_ns.get(cause, 0),
        )
        for cause, ns in took.by_cause.items()
    ]

    def rank(one: BreachCause) -> tuple[bool, int, str]:
        excess_ns = one.excess_ns
        if excess_ns is not None:
            return False, -excess_ns, one.cause
        return one.cause in OWN_WORK, -one.ns, one.cause

    return tuple(sorted(causes, key=rank))


def _top(causes: tuple[BreachCause, ...], over_ns: int, *, unseen_ns: int) -> str | None:
    """Return the main cause; None if unobserved time may exceed it."""
    if not causes:
        return None
    first = causes[0]
    if first.excess_ns is not None:
        return first.cause if first.excess_ns > max(0, unseen_ns) else None
    if unseen_ns > 0:
        return None
    could = [one for one in causes if one.is_sufficient is not False]
    if len(could) == 1:
        return could[0].cause
    # Each kind is sorted, the longest first.
    waits = [one for one in causes if one.cause not in OWN_WORK]
    own = [one for one in causes if one.cause in OWN_WORK]
    if own and sum(one.ns for one in waits) < over_ns:
        return own[0].cause
    if not waits:
        return None
    longest = waits[0]
    same = _QUEUES if longest.cause in _QUEUES else {longest.cause}
    same_ns = sum(one.ns for one in waits if one.cause in same)
    others_ns = sum(one.ns for one in waits if one.cause not in same)
    if longest.is_sufficient is False and same_ns < over_ns:
        return None
    return longest.cause if same_ns >= _DOMINANT * others_ns else None


def _minimal_set(by_cause: Mapping[str, int], over_ns: int) -> tuple[str, ...]:
    """Return the fewest causes whose time covers the excess; empty if none do.

    The longest come first: any other choice of equal size sums to less, so no strict subset
    suffices.
    """
    others = {cause: ns for cause, ns in by_cause.items() if cause not in OWN_WORK}
    candidates = others if sum(others.values()) >= over_ns else by_cause
    chosen: list[str] = []
    for cause, ns in sorted(candidates.items(), key=lambda item: (-item[1], item[0])):
        chosen.append(cause)
        over_ns -= ns
        if over_ns <= 0:
            return tuple(chosen)
    return ()


# --- peers ----------------------------------------------------------------------------------------


def _is_like(peer: LedgerView, request: LedgerView, objective: LatencyLimit) -> bool:
    """Return whether a peer is comparable with a request."""
    if peer.finish != request.finish:
        return False
    if not _are_alike(peer.prompt_tokens, request.prompt_tokens):
        return False
    is_of_all = objective.metric in ("e2e", "delivered")
    return not is_of_all or _are_alike(peer.output_tokens, request.output_tokens)


def _are_alike(one: int | None, other: int | None) -> bool:
    if one is None or other is None:
        return one is other
    return one <= _LIKE * other and other <= _LIKE * one


def _typical_ns(like: list[Peer], num_gaps: int) -> dict[str, int]:
    """Return the median of each cause in nanoseconds, for a request with `num_gaps` gaps."""
    rows = np.array([peer.row_ns() for peer in like])
    typical = np.rint(np.median(rows, axis=0) * num_gaps).astype(np.int64).tolist()
    return dict(zip(CAUSES, typical, strict=True))
