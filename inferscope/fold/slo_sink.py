"""SLO evaluation over a fold: a sink and listener that passes requests to their engine's judge.

    source = RingSource(…, sinks=(judging,), listen=judging.on_record)
    judging.watch(source.collector)

The fold itself is independent of objectives; its digest is the same with and without them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from msgspec.structs import replace

from inferscope.fold.engine import EngineFold
from inferscope.fold.final_records import FinalRequest, FinalStep, Sink
from inferscope.fold.fold import Collector
from inferscope.fold.rings import current_rings
from inferscope.fold.view import model_of
from inferscope.records import FAILED, OFF, OVER_BUDGET, Record, Tick
from inferscope.slo import ENGINE_LOST, InFlight, Judge

_UNTOLD = (OFF, FAILED, OVER_BUDGET)
_SEEN_FROM_START_NS = 10_000_000_000
"""Delay between an engine's start and the fold's from which the start counts as unobserved."""


class Judging:
    """Sink that judges the requests of a fold's engines and passes them on to another sink."""

    def __init__(self, judge_of: Callable[[str], Judge], sink: Sink | None = None) -> None:
        """Set the factory of judges by engine ID, and the sink that receives judged requests."""
        self._judge_of = judge_of
        self._sink = sink
        self._judges: dict[str, Judge] = {}
        self._collector: Collector | None = None

    def watch(self, collector: Collector) -> None:
        """Set the fold before its first record."""
        self._collector = collector

    def on_record(self, ring: int, record: Record) -> None:
        """Check deadlines at every Tick."""
        if type(record) is not Tick or self._collector is None:
            return
        for engine in self._collector.engines.values():
            if _is_undescribed(engine):
                continue  # without records of its requests no deadline can be evaluated
            self._judge(engine).tick(
                record.t_ns,
                engine.lives.table.by_id,
                has_pending_outcome=engine.has_pending_outcome,
                ledger_ns=partial(_ledger_ns, engine),
            )

    def on_step(self, step: FinalStep) -> None:
        """Pass a step on."""
        if self._sink is not None:
            self._sink.on_step(step)

    def on_request(self, request: FinalRequest) -> None:
        """Judge a request and pass it on with its results."""
        assert self._collector is not None, "watch() comes first"
        engine = self._collector.engines[request.engine_id]
        judge = self._judge(engine)
        now_ns = self._collector.now_ns
        if request.finish == ENGINE_LOST and _is_only_unseen(engine):
            found = judge.forget(request.request_id, now_ns=now_ns)
        else:
            found = judge.request(request, request.request_id, now_ns=now_ns)
        if self._sink is not None:
            self._sink.on_request(replace(request, judged=found))

    def _judge(self, engine: EngineFold) -> Judge:
        judge = self._judges.get(engine.engine_id)
        if judge is None:
            judge = self._judges[engine.engine_id] = self._judge_of(engine.engine_id)
        judge.set_model(model_of(engine), started_ns=_started_ns(engine))
        return judge


def _ledger_ns(engine: EngineFold, request: InFlight) -> dict[str, int]:
    """Return a request's time so far by cause, in nanoseconds."""
    lives = engine.lives
    known = lives.table.by_id[request.request_id]
    return lives.ledger_of(known, engine.now_ns, unfolded=engine.unfolded)


def _is_undescribed(engine: EngineFold) -> bool:
    """Return whether a current probe reports that it does not observe the engine's requests."""
    return any(
        ring.state in _UNTOLD for ring in current_rings(engine.rings.values(), engine.now_ns)
    )


def _is_only_unseen(engine: EngineFold) -> bool:
    """Return whether only probes stopped observing, so that the engine may still run."""
    lost = [ring for ring in engine.rings.values() if ring.is_lost]
    return bool(lost) and all(ring.state in _UNTOLD for ring in lost)


def _started_ns(engine: EngineFold) -> int | None:
    """Return when an engine was started; None if the fold did not observe the start."""
    starts = [ring.opened.start_ns for ring in engine.rings.values() if not ring.is_front_end]
    if not starts or engine.first_ns is None:
        return None
    started_ns = max(starts)
    return started_ns if engine.first_ns - started_ns < _SEEN_FROM_START_NS else None
