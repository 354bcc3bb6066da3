"""Where a request is looked for: the rings of some engines, or a recording; read twice."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from inferscope.attribution.breach import Objective, breaches, is_met
from inferscope.collector.finals import FinalRequest
from inferscope.collector.source import RecordingSource, RingSource
from inferscope.errors import NotFound
from inferscope.report.facts import Facts
from inferscope.report.peers import PeerSink
from inferscope.report.request_index import RequestRef, requests_in_recording, requests_in_rings
from inferscope.report.request_observer import RequestObserver
from inferscope.ring.discovery import EngineRings
from inferscope.slo.objectives import Objectives
from inferscope.slo.verdicts import latency_limits

_BEHIND_NS = 1_000_000_000
"""A living fold stays up to half a second behind; a second is caught up."""
_POLL_S = 0.01


class RequestSource:
    """A recording, or the rings of engines.

    Attributes:
        name: for messages.
        notes: what must be said of a recording that was read; empty before, and for rings.
    """

    def __init__(
        self, name: str, *, engines: Iterable[EngineRings] = (), recording: Path | None = None
    ) -> None:
        """Take one of the two.

        Args:
            name: what to call the place.
            engines: whose rings to read.
            recording: the file to read instead.
        """
        self.name = name
        self.notes: tuple[str, ...] = ()
        self._engines = list(engines)
        self._recording = recording

    def lives(self, name: str) -> list[RequestRef]:
        """Return requests of the place: all of every engine that knows a request of this name."""
        if self._recording is not None:
            return requests_in_recording(self._recording)
        return requests_in_rings(self._engines, name)

    def facts(
        self,
        life: RequestRef,
        lives: Iterable[RequestRef],
        *,
        objectives: tuple[Objective, ...] = (),
        promised: Objectives | None = None,
    ) -> Facts:
        """Fold what is here until all is known of a request.

        Args:
            life: of the request.
            lives: all that were found, for the names of its companions.
            objectives: what it should have met. To compare it with others, all there is is folded.
            promised: what is promised of its model; where both have a metric, `objectives` hold.

        Raises:
            NotFound: the fold knows nothing of it.
        """
        names = {
            other.request_id: other.external_id or other.request_id
            for other in lives
            if other.engine_id == life.engine_id
        }
        witness, peers = RequestObserver(life, names), PeerSink(life.engine_id)
        source = self._open(life, witness, peers)
        try:
            _advance(source, None if objectives or promised else witness)
            facts = witness.facts(source.collector)
        finally:
            source.close()
        self.notes = source.notes()
        if facts is None:
            raise NotFound(
                f"{life.request_id} is named in {self.name}, but its records are gone: the ring"
                " has been overwritten since. Record longer, or enlarge INFERSCOPE_RING_MB."
            )
        if promised is not None:
            asked = {objective.metric for objective in objectives}
            limits = latency_limits(promised.of_model(facts.model))
            objectives += tuple(limit for limit in limits if limit.metric not in asked)
        return _judged(facts, witness.final, objectives, tuple(peers.requests))

    def _open(
        self, life: RequestRef, witness: RequestObserver, peers: PeerSink
    ) -> RingSource | RecordingSource:
        sinks, listen = (witness, peers), witness.listen
        if self._recording is not None:
            return RecordingSource(self._recording, sinks=sinks, listen=listen)
        rings = [
            ring.path
            for engine in self._engines
            if engine.engine_id == life.engine_id
            for ring in engine.rings
        ]
        return RingSource(lambda: rings, name=life.engine_id, sinks=sinks, listen=listen)


def _judged(
    facts: Facts,
    final: FinalRequest | None,
    objectives: tuple[Objective, ...],
    peers: tuple[FinalRequest, ...],
) -> Facts:
    """Add which objectives were met, and why not."""
    if final is None:
        return replace(facts, objectives=objectives)
    return replace(
        facts,
        objectives=objectives,
        met=tuple(objective.metric for objective in objectives if is_met(final, objective)),
        breaches=breaches(final, objectives, peers),
    )


def _advance(source: RingSource | RecordingSource, witness: RequestObserver | None) -> None:
    """Fold up to a request's end if there is a witness; up to now if not, or it is under way."""
    began_ns = time.monotonic_ns()
    while not (source.has_ended or (witness is not None and witness.is_complete)):
        is_idle = not source.advance()
        if is_idle and source.collector.now_ns >= began_ns - _BEHIND_NS:
            return
        if is_idle:
            time.sleep(_POLL_S)
