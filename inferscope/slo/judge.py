"""Verdicts on one engine's requests under its model's objectives, each with a cause if it is bad.

    a deadline passes without a token        bad, at the first Tick half a second later
    a request finishes                       every verdict not decided yet
    a verdict is bad                         its cause, once the request finishes, or ten
                                             seconds after the deadline, from what is known then

So requests of a hung engine become bad, and those of a killed one have a cause distinct from a long
queue. The judge's only clock are Ticks: the same records give the same verdicts at the same places.
Verdicts up to `counts_from_ns` were counted by an earlier collector; they are decided again and not
counted.

Requests that arrived before an engine's first response met cold kernels: they are a warm-up,
counted separately under every latency, up to a cap.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec

from inferscope.attribution import (
    Breach,
    LatencyLimit,
    LedgerView,
    Metric,
    Peers,
    breaches,
    remembered,
)
from inferscope.slo.objectives import LATENCIES, Objective, Objectives
from inferscope.slo.tally import SHED
from inferscope.slo.verdicts import ANSWERS, FAILURES, Judged, judged

SETTLE_NS = 500_000_000
"""Delay after a deadline in ns for records that are late: the maximum lag of a fold."""
EXPLAIN_NS = 10_000_000_000
"""Delay after a deadline in ns for its cause: a killed engine is detected after 5 s."""
WARM_UP_NS = 300_000_000_000
MOST_WARM_UP = 20
_MOST_PEERS = 200
_NEVER_NS = 1 << 62
_FORGET_NS = 600_000_000_000
ENGINE_LOST = "engine_lost"
_OWN_CAUSES = (ENGINE_LOST, SHED)
"""Finish reasons that are causes themselves."""


class InFlight(Protocol):
    """A request in flight, such as `collector.requests.Request`."""

    @property
    def request_id(self) -> str:
        """Return the engine's own ID."""

    @property
    def arrived_ns(self) -> int:
        """Return the arrival time."""

    @property
    def first_edge_ns(self) -> int | None:
        """Return the time of its first token."""

    @property
    def finished_ns(self) -> int | None:
        """Return the time at which the engine finished it."""

    @property
    def joined_late(self) -> bool:
        """Return whether part of it was not observed."""

    @property
    def prompt_tokens(self) -> int | None:
        """Return the prompt's length in tokens."""

    @property
    def attributes(self) -> dict[str, str]:
        """Return the attributes that the front end recorded."""


class SloCounter(Protocol):
    """Receiver of verdicts."""

    def decided(self, objective: Objective, is_good: bool) -> None:
        """Count a verdict under an objective."""

    def warmed_up(self, objective: Objective) -> None:
        """Count a warm-up request, which is neither good nor bad."""

    def explained(self, objective: Objective, cause: str | None) -> None:
        """Count the cause of a bad request; None if it is unknown."""


class PendingVerdict(msgspec.Struct):
    """Verdicts decided so far of a request in flight."""

    decided: set[str]
    """Names of the objectives that it has missed."""
    unexplained: set[str]
    """Names of the missed objectives without a cause so far."""
    explain_ns: int
    is_warm_up: bool = False


class Judge:
    """Judge of one engine's requests.

    Attributes:
        counts_from_ns: verdicts up to this time are not counted.
        in_hand: requests in flight with a verdict, by ID.
        model: served name of the engine's model.
        now_ns: time of the last Tick.
    """

    def __init__(
        self, objectives: Objectives, tally: SloCounter, *, counts_from_ns: int = 0
    ) -> None:
        """Keep the objectives of all models and the receiver of verdicts."""
        self._all = objectives
        self._tally = tally
        self.counts_from_ns = counts_from_ns
        self.in_hand: dict[str, PendingVerdict] = {}
        self.now_ns = 0
        self.model = ""
        self._is_known = False
        self._objectives: tuple[Objective, ...] = ()
        self._deadlines: tuple[tuple[Objective, int], ...] = ()
        self._least_ns = self._least_e2e_ns = 0
        self._started_ns: int | None = None
        self._answered_ns: int | None = None
        self._num_warm_up = 0
        self._peers = Peers(most=_MOST_PEERS)

    def set_model(self, model: str, *, started_ns: int | None) -> None:
        """Set the engine's model.

        Args:
            model: served name.
            started_ns: start time of the engine; None if it was not observed.
        """
        if model != self.model or not self._is_known:
            self.model, self._is_known = model, True
            self._objectives = self._all.of_model(model)
            self._deadlines = tuple(
                (one, one.threshold_ns)
                for one in self._objectives
                if one.metric in ("ttft", "e2e") and one.threshold_ns is not None
            )
            self._least_ns = min((limit_ns for _, limit_ns in self._deadlines), default=0)
            self._least_e2e_ns = min(
                (limit_ns for one, limit_ns in self._deadlines if one.metric == "e2e"),
                default=_NEVER_NS,
            )
        if started_ns != self._started_ns:
            self._started_ns, self._answered_ns, self._num_warm_up = started_ns, None, 0

    def set_objectives(self, objectives: Objectives) -> None:
        """Replace the objectives from now on; verdicts stay as they are."""
        self._all, self._is_known = objectives, False

    # --- deadlines ------------------------------------------------------------------------------

    def tick(
        self,
        now_ns: int,
        in_flight: Mapping[str, InFlight],
        *,
        has_pending_outcome: Callable[[InFlight, int], bool],
        ledger_ns: Callable[[InFlight], dict[str, int]],
    ) -> None:
        """Judge requests whose deadlines have passed, and explain verdicts that are due.

        Args:
            now_ns: time of the Tick.
            in_flight: requests in flight by ID.
            has_pending_outcome: returns whether a record of a token or end up to a time is read
                but not folded.
            ledger_ns: returns the causes of a request so far.
        """
        self.now_ns = now_ns
        if self._deadlines:
            latest_ns = now_ns - SETTLE_NS - self._least_ns
            answering_ns = now_ns - SETTLE_NS - self._least_e2e_ns
            for request in in_flight.values():
                arrived_ns = request.arrived_ns
                if arrived_ns >= latest_ns or request.joined_late:
                    continue
                if arrived_ns >= answering_ns and request.first_edge_ns is not None:
                    continue  # the common case: only the deadline of its end remains
                self._pass_deadlines(request, now_ns - SETTLE_NS, has_pending_outcome)
        for request_id, hand in list(self.in_hand.items()):
            if hand.explain_ns > now_ns:
                continue
            found = in_flight.get(request_id)
            if hand.unexplained and found is not None:
                so_far = _PartialRequest(found, now_ns, ledger_ns(found), self._usual_finish())
                self._explain(so_far, hand.unexplained, hand.is_warm_up)
                hand.unexplained = set()
            elif found is None and now_ns - hand.explain_ns > _FORGET_NS:
                self.forget(request_id, now_ns=now_ns)  # its end was not observed

    def _pass_deadlines(
        self, request: InFlight, now_ns: int, has_pending_outcome: Callable[[InFlight, int], bool]
    ) -> None:
        hand = self.in_hand.get(request.request_id)
        finished_ns = request.finished_ns
        for one, limit_ns in self._deadlines:
            deadline_ns = request.arrived_ns + limit_ns
            if deadline_ns >= now_ns or (hand is not None and one.name in hand.decided):
                continue
            if one.metric == "ttft" and (
                request.first_edge_ns is not None or _is_in_one_piece(request)
            ):
                continue
            if finished_ns is not None and finished_ns <= deadline_ns:
                continue
            if has_pending_outcome(request, deadline_ns):
                continue
            if hand is None:
                is_warm_up = self._count_warm_up(request.arrived_ns)
                hand = PendingVerdict(set(), set(), self.now_ns + EXPLAIN_NS, is_warm_up)
                self.in_hand[request.request_id] = hand
            for missed in (one, *(each for each in self._objectives if each.metric == "goodput")):
                if missed.name not in hand.decided:
                    hand.decided.add(missed.name)
                    hand.unexplained.add(missed.name)
                    self._count(missed, False, hand.is_warm_up)

    # --- ends -----------------------------------------------------------------------------------

    def request(self, request: LedgerView, request_id: str, *, now_ns: int) -> Judged:
        """Decide the remaining verdicts of a finished request; return all of them.

        Args:
            request: the finished request.
            request_id: the engine's own ID.
            now_ns: time at which the fold finalized it.
        """
        self.now_ns = max(self.now_ns, now_ns)
        hand = self.in_hand.pop(request_id, None)
        decided = frozenset[str]() if hand is None else frozenset(hand.decided)
        kept = remembered(request)  # caches the longest gap, which is expensive to find
        results = judged(kept, self._objectives) | dict.fromkeys(decided, False)
        is_warm_up = self._count_warm_up(request.arrived_ns) if hand is None else hand.is_warm_up
        for one in self._objectives:
            if one.name in results and one.name not in decided:
                self._count(one, results[one.name], is_warm_up and _is_latency(one, request))
        bad = {name for name, is_good in results.items() if not is_good}
        cause = None
        if bad:
            names = (bad - decided) | (set() if hand is None else hand.unexplained)
            cause = self._explain(request, names, is_warm_up)
        if request.finish in ANSWERS:
            if self._answered_ns is None:
                self._answered_ns = request.delivered_ns
            if not request.joined_late:
                self._peers.append(kept)
        return Judged(results, cause)

    def forget(self, request_id: str, *, now_ns: int) -> Judged:
        """Drop a request whose end was not observed; its verdicts stay."""
        self.now_ns = max(self.now_ns, now_ns)
        hand = self.in_hand.pop(request_id, None)
        if hand is None:
            return Judged({})
        for one in self._objectives:
            if one.name in hand.unexplained and not hand.is_warm_up and self._counts_here():
                self._tally.explained(one, None)
        return Judged(dict.fromkeys(hand.decided, False))

    # --- counting
    # ----------------------------------------------------------------------------------

    def _count(self, one: Objective, is_good: bool, is_warm_up: bool) -> None:
        if not self._counts_here():
            return
        if is_warm_up:
            self._tally.warmed_up(one)
        else:
            self._tally.decided(one, is_good)

    def _explain(self, request: LedgerView, names: set[str], is_warm_up: bool) -> str | None:
        """Count the causes of a request's misses; return that of the worst."""
        limits = {
            one.name: LatencyLimit(explained_metric(one, request), one.threshold_ns)
            for one in self._objectives
            if one.threshold_ns is not None
        }
        missed = breaches(request, limits.values(), self._peers)
        by_metric = {each.metric: each for each in missed}
        worst = max(missed, key=_excess, default=None)
        own_cause = request.finish if request.finish in _OWN_CAUSES else None
        cause = own_cause or (None if worst is None else worst.top)
        if self._counts_here():
            for one in self._objectives:
                if one.name not in names or (is_warm_up and _is_latency(one, request)):
                    continue
                top = cause
                if one.name in limits:
                    own = by_metric.get(limits[one.name].metric)
                    top = (None if own is None else own.top) or own_cause
                self._tally.explained(one, top)
        return cause

    def _counts_here(self) -> bool:
        """Return whether verdicts are counted now, not by an earlier collector."""
        return self.now_ns > self.counts_from_ns

    def _count_warm_up(self, arrived_ns: int) -> bool:
        """Return whether a request belongs to the engine's warm-up; count it if it does."""
        started_ns, answered_ns = self._started_ns, self._answered_ns
        if started_ns is None or arrived_ns - started_ns > WARM_UP_NS:
            return False
        if answered_ns is not None and arrived_ns >= answered_ns:
            return False
        self._num_warm_up += 1
        return self._num_warm_up <= MOST_WARM_UP

    def _usual_finish(self) -> str:
        """Return the usual finish reason here, to compare requests in flight with."""
        newest = self._peers.newest()
        return "stop" if newest is None else newest.finish


class _PartialRequest:
    """A request in flight, viewed as if it finished now."""

    token_times_ns = ()
    output_tokens = 0
    first_token_ns = None
    last_token_ns = None
    joined_late = False
    is_in_one_piece = False

    def __init__(
        self, request: InFlight, now_ns: int, ledger_ns: dict[str, int], finish: str
    ) -> None:
        self.prompt_tokens = request.prompt_tokens
        self.arrived_ns = request.arrived_ns
        self.delivered_ns = now_ns
        self.finish = finish
        self.ledger_ns = ledger_ns
        self.ttft_ledger_ns: dict[str, int] = {}
        self.tbt_ns: list[int] = []
        self.num_gaps = self.longest_gap_ns = 0


def _is_in_one_piece(request: InFlight) -> bool:
    return request.attributes.get("stream", "").lower() == "false"


def _is_latency(one: Objective, request: LedgerView) -> bool:
    """Return whether a result concerns latency; failures are never a warm-up's."""
    return one.metric in LATENCIES or (one.metric == "goodput" and request.finish not in FAILURES)


def explained_metric(one: Objective, request: LedgerView) -> Metric:
    """Return the metric whose interval explains an objective; without an end, the whole request."""
    assert one.metric != "availability"
    assert one.metric != "goodput"
    return "delivered" if one.metric == "e2e" and request.last_token_ns is None else one.metric


def _excess(missed: Breach) -> float:
    return missed.over_ns / (missed.limit_ns * missed.num_gaps)
