"""Sink of the fold that collects the facts of a run, in memory that does not grow with it."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace

from inferscope.attribution import breakdown
from inferscope.fold import Collector, EngineView, FinalRequest, FinalStep, Judging, snapshot
from inferscope.insight.cache_tally import CacheTally, cache_reports
from inferscope.insight.findings import EngineFindings, RunSummarizer, SloFindings, findings
from inferscope.insight.run.course import Course
from inferscope.insight.run.facts import EngineFacts, RunFacts
from inferscope.insight.run.ledger_bands import LedgerBands
from inferscope.insight.run.roofline import PhaseTotals
from inferscope.insight.run.slowest import SlowestRequests
from inferscope.insight.run.worst_second import TokenWaits
from inferscope.insight.shares import SharesSink
from inferscope.records import Record, RingOpened, StepPlan
from inferscope.slo import Objectives

_WINDOW_NS = 300_000_000_000
_RULE = "fair"
_ANSWERS = ("stop", "length")


class _EngineRun:
    """What one engine's records add up to, beyond its summary."""

    def __init__(self) -> None:
        self.rings: list[RingOpened] = []
        self.num_by_finish: Counter[str] = Counter()
        self.first_ns: int | None = None
        self.last_ns: int | None = None
        self.output_tokens = 0
        self.shares = SharesSink(_RULE)
        self.ttft_bands, self.e2e_bands = LedgerBands(), LedgerBands()
        self.totals, self.course = PhaseTotals(), Course()
        self.slowest, self.waits = SlowestRequests(), TokenWaits()

    def add(self, request: FinalRequest) -> None:
        """Add a finished request."""
        self.num_by_finish[request.finish] += 1
        self.output_tokens += request.output_tokens
        arrived_ns, delivered_ns = request.arrived_ns, request.delivered_ns
        self.first_ns = arrived_ns if self.first_ns is None else min(self.first_ns, arrived_ns)
        self.last_ns = delivered_ns if self.last_ns is None else max(self.last_ns, delivered_ns)
        self.shares.on_request(request)
        for each in (self.totals, self.slowest, self.waits):
            each.add(request)
        self.course.add_request(request)
        if request.joined_late or request.ledger_missing:
            return
        ttft = breakdown(request, "ttft") if request.first_token_ns is not None else None
        if ttft is not None:
            self.ttft_bands.add(ttft.whole_ns, ttft.by_cause)
        e2e = breakdown(request, "e2e") if request.finish in _ANSWERS else None
        if e2e is not None:
            self.e2e_bands.add(e2e.whole_ns, e2e.by_cause)


class RunSink:
    """Sink and listener that collects the facts of each engine's run.

    sink = RunSink(objectives)
    source = open_source(path, sinks=(sink,), listen=sink.on_record)
    sink.watch(source.collector)
    catch_up(source)
    facts = sink.facts(source.collector)
    """

    def __init__(self, objectives: Objectives | None = None) -> None:
        """Start empty; with objectives, also judge the requests."""
        self._watch = RunSummarizer()
        self._cache = CacheTally()
        self._runs: defaultdict[str, _EngineRun] = defaultdict(_EngineRun)
        self._run_of_ring: dict[int, _EngineRun] = {}
        self._promised: SloFindings | None = None
        self._judging: Judging | None = None
        if objectives is not None:
            self._promised = SloFindings(objectives, self._watch)
            self._judging = Judging(self._promised.judge_of, self._promised)

    def watch(self, collector: Collector) -> None:
        """Set the fold before its first record."""
        if self._judging is not None:
            self._judging.watch(collector)

    def on_record(self, ring: int, record: Record) -> None:
        """Take a record of the fold."""
        if self._judging is not None:
            self._judging.on_record(ring, record)
        self._watch.on_record(ring, record)
        if isinstance(record, RingOpened):
            if record.engine_id in self._watch.runs and record.ring not in self._run_of_ring:
                run = self._run_of_ring[record.ring] = self._runs[record.engine_id]
                run.rings.append(record)
        elif isinstance(record, StepPlan) and ring in self._run_of_ring:
            self._run_of_ring[ring].course.add_plan(record)

    def on_step(self, step: FinalStep) -> None:
        """Add a step."""
        (self._judging or self._watch).on_step(step)
        run = self._runs[step.engine_id]
        run.shares.on_step(step)
        run.course.add_step(step)

    def on_request(self, request: FinalRequest) -> None:
        """Add a request."""
        (self._judging or self._watch).on_request(request)
        self._runs[request.engine_id].add(request)
        self._cache.on_request(request)

    def facts(self, collector: Collector, *, mode: str = "ended") -> RunFacts:
        """Return the facts of all engines of the fold.

        Args:
            collector: the fold.
            mode: mode of the snapshot: ended, or live for a running engine.
        """
        views = {
            view.engine_id: view
            for view in snapshot(collector, window_ns=_WINDOW_NS, mode=mode, max_requests=0).engines
        }
        caches = {each.engine_id: each for each in cache_reports(self._cache, collector)}
        return RunFacts(
            tuple(
                replace(
                    self._engine(found.engine_id, views[found.engine_id], collector, found),
                    cache=caches.get(found.engine_id),
                )
                for found in findings(self._watch, self._promised)
                if found.engine_id in views
            ),
            collector.totals(),
            self._promised is not None,
        )

    def _engine(
        self, engine_id: str, view: EngineView, collector: Collector, found: EngineFindings
    ) -> EngineFacts:
        run, summary = self._runs[engine_id], self._watch.runs[engine_id]
        requests = summary.requests
        return EngineFacts(
            engine_id=engine_id,
            found=found,
            view=view,
            info=summary.info,
            rings=tuple(run.rings),
            num_by_finish=dict(run.num_by_finish),
            first_arrival_ns=run.first_ns,
            last_delivery_ns=run.last_ns,
            real_offset_ns=collector.real_offset_ns,
            prompt_tokens=requests.prompt_tokens,
            cached_tokens=requests.cached_tokens,
            output_tokens=run.output_tokens,
            num_preemptions=requests.num_preemptions,
            shares=run.shares.table("phase", collector),
            devices=tuple(each for each in collector.devices() if each.engine_id == engine_id),
            ttft=requests.ttft,
            tbt=requests.tbt,
            e2e=requests.e2e,
            ttft_bands=run.ttft_bands.bands(),
            e2e_bands=run.e2e_bands.bands(),
            ledger_ns=dict(requests.life_ns),
            roofline=run.totals.points(),
            course_ns=run.course.bin_ns,
            course=tuple(run.course.bins()),
            slowest=run.slowest.requests(),
            worst_second=run.waits.worst(),
        )
