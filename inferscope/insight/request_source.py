"""Source of one request's records: the rings of some engines or a recording, read twice."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from inferscope.attribution import LatencyLimit, breaches, is_met
from inferscope.errors import NotFound
from inferscope.fold import FinalRequest, KvTransfer, Sink
from inferscope.insight.facts import Facts, PrefillLeg
from inferscope.insight.peers import PeerSink
from inferscope.insight.request_observer import RequestObserver
from inferscope.readers import (
    Listener,
    RecordingSource,
    RequestRef,
    RingSource,
    final_books,
    open_replay,
    requests_in_recording,
    requests_in_rings,
)
from inferscope.records import Record
from inferscope.ring import EngineRings
from inferscope.slo import Objectives, latency_limits

_BEHIND_NS = 1_000_000_000
"""Maximum lag of a live fold, rounded up: it is up to half a second behind."""
_POLL_S = 0.01


class RequestSource:
    """A recording, or the rings of engines.

    Attributes:
        name: display name, for messages.
        notes: caveats of the recording that was read; empty before, and for rings.
    """

    def __init__(
        self,
        name: str,
        *,
        engines: Iterable[EngineRings] = (),
        recording: Path | None = None,
        refit: Path | None = None,
    ) -> None:
        """Keep one of the two sources.

        Args:
            name: display name of the source.
            engines: engines whose rings are read.
            recording: file to read instead.
            refit: the same records' file or folder, if its final cost models price all steps.
        """
        self.name = name
        self.notes: tuple[str, ...] = ()
        self._engines = list(engines)
        self._recording = recording
        self._refit = refit

    def refs(self, name: str) -> list[RequestRef]:
        """Return all requests of every engine that knows a request of this name."""
        if self._recording is not None:
            return requests_in_recording(self._recording)
        return requests_in_rings(self._engines, name)

    def facts(
        self,
        ref: RequestRef,
        refs: Iterable[RequestRef],
        *,
        objectives: tuple[LatencyLimit, ...] = (),
        promised: Objectives | None = None,
    ) -> Facts:
        """Fold the records until all facts of a request are known.

        Args:
            ref: the request.
            refs: all requests found, for display names.
            objectives: latency limits to judge; with any, all records are folded to find its peers.
            promised: objectives of its model; where both have a metric, `objectives` hold.

        Raises:
            NotFound: the fold does not know the request.
        """
        facts, final, peers = self._observe(ref, refs, is_whole=bool(objectives or promised))
        if promised is not None:
            asked = {objective.metric for objective in objectives}
            limits = latency_limits(promised.of_model(facts.model))
            objectives += tuple(limit for limit in limits if limit.metric not in asked)
        notes = self.notes
        transfers = () if final is None else final.transfers
        facts = replace(facts, prefill_legs=tuple(map(self._prefill_leg, transfers)))
        self.notes = notes
        return _judged(facts, final, objectives, peers)

    def facts_of_run(
        self,
        requests: Sequence[FinalRequest],
        *,
        promised: Objectives | None = None,
        sinks: tuple[Sink, ...] = (),
    ) -> dict[str, Facts]:
        """Fold all records of one engine once, for the facts of several of its requests.

        Args:
            requests: final requests of one engine, as another fold of the same records gave them.
            promised: objectives of its model, to judge the requests by.
            sinks: further sinks of the fold.

        Returns:
            Facts by request ID. A request whose ledger differs in this fold is left out: the rings
            of a running engine have lost its records meanwhile.
        """
        engine_id = requests[0].engine_id
        refs = self._refs_of(requests)
        names = {ref.request_id: ref.external_id or ref.request_id for ref in refs}
        observers: dict[str, RequestObserver] = {}
        for request in requests:
            ref = _ref_of(request, refs)
            if ref is not None:
                observers[request.request_id] = RequestObserver(ref, names)
        peers = PeerSink(engine_id)

        def listen(ring: int, record: Record) -> None:
            for observer in observers.values():
                observer.on_record(ring, record)

        source = self._open(engine_id, (*observers.values(), peers, *sinks), listen)
        try:
            _advance(source, None)
            found = {
                request_id: (observer.facts(source.collector), observer.final)
                for request_id, observer in observers.items()
            }
        finally:
            source.close()
        judged: dict[str, Facts] = {}
        for request in requests:
            facts, final = found.get(request.request_id, (None, None))
            if facts is None or final is None or final.ledger_ns != request.ledger_ns:
                continue
            limits = () if promised is None else latency_limits(promised.of_model(facts.model))
            judged[request.request_id] = _judged(facts, final, limits, tuple(peers.requests))
        return judged

    def _refs_of(self, requests: Sequence[FinalRequest]) -> list[RequestRef]:
        """Return the known requests of the engine of some requests."""
        engine_id = requests[0].engine_id
        if self._recording is not None:
            found = requests_in_recording(self._recording)
        else:
            engines = [each for each in self._engines if each.engine_id == engine_id]
            known = (requests_in_rings(engines, each.request_id) for each in requests)
            found = next(filter(None, known), [])
        return [ref for ref in found if ref.engine_id == engine_id]

    def _prefill_leg(self, transfer: KvTransfer) -> PrefillLeg:
        """Return the sender's part of a request, with its ledger if its records are here."""
        leg = PrefillLeg(transfer.peer, transfer.num_bytes)
        name = transfer.peer_request_id
        refs = self.refs(name) if name else []
        for ref in refs:
            if (ref.engine_id, ref.request_id) == (transfer.peer, name):
                try:
                    facts, *_ = self._observe(ref, refs, is_whole=False)
                except NotFound:
                    break
                return replace(leg, ledger_ns=facts.row.ledger_ns)
        return leg

    def _observe(
        self, ref: RequestRef, refs: Iterable[RequestRef], *, is_whole: bool
    ) -> tuple[Facts, FinalRequest | None, tuple[FinalRequest, ...]]:
        """Fold the records up to a request's end, or all; return its facts, itself and its peers.

        Raises:
            NotFound: the fold does not know the request.
        """
        names = {
            other.request_id: other.external_id or other.request_id
            for other in refs
            if other.engine_id == ref.engine_id
        }
        observer, peers = RequestObserver(ref, names), PeerSink(ref.engine_id)
        source = self._open(ref.engine_id, (observer, peers), observer.on_record)
        try:
            _advance(source, None if is_whole else observer)
            facts = observer.facts(source.collector)
        finally:
            source.close()
        self.notes = source.notes()
        if facts is None:
            raise NotFound(
                f"{ref.request_id} is named in {self.name}, but its records are gone: the ring"
                " has been overwritten since. Record longer, or enlarge INFERSCOPE_RING_MB."
            )
        return facts, observer.final, tuple(peers.requests)

    def _open(
        self, engine_id: str, sinks: tuple[Sink, ...], listen: Listener
    ) -> RingSource | RecordingSource:
        if self._refit is not None:
            books = final_books(self._refit)
            return open_replay(self._refit, sinks=sinks, listen=listen, books=books)
        if self._recording is not None:
            return RecordingSource(self._recording, sinks=sinks, listen=listen)
        rings = [
            ring.path
            for engine in self._engines
            if engine.engine_id == engine_id
            for ring in engine.rings
        ]
        return RingSource(lambda: rings, name=engine_id, sinks=sinks, listen=listen)


def _ref_of(request: FinalRequest, refs: Iterable[RequestRef]) -> RequestRef | None:
    """Return the reference of a final request; of several with its ID, the one in its time."""
    own = [
        ref
        for ref in refs
        if ref.request_id == request.request_id and ref.first_ns <= request.delivered_ns
    ]
    return max(own, key=lambda ref: ref.first_ns, default=None)


def _judged(
    facts: Facts,
    final: FinalRequest | None,
    objectives: tuple[LatencyLimit, ...],
    peers: tuple[FinalRequest, ...],
) -> Facts:
    """Add the objectives that were met and the reasons for the others."""
    if final is None:
        return replace(facts, objectives=objectives)
    return replace(
        facts,
        objectives=objectives,
        met=tuple(objective.metric for objective in objectives if is_met(final, objective)),
        breaches=breaches(final, objectives, peers),
    )


def _advance(source: RingSource | RecordingSource, observer: RequestObserver | None) -> None:
    """Fold up to the observed request's end, or to now without an observer or end."""
    began_ns = time.monotonic_ns()
    while not (source.has_ended or (observer is not None and observer.is_complete)):
        is_idle = not source.advance()
        if is_idle and source.collector.now_ns >= began_ns - _BEHIND_NS:
            return
        if is_idle:
            time.sleep(_POLL_S)
