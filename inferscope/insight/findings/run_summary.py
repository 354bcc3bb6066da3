"""Summary of a run in bounded memory, built by a sink of the fold."""

from __future__ import annotations

from inferscope.fold import CacheAccounts, ExpertLoads, FinalRequest, FinalStep
from inferscope.insight.cache_tally import CacheGroup, EngineCache
from inferscope.insight.findings.plans import PlanStats
from inferscope.insight.findings.requests import RequestStats
from inferscope.insight.findings.slowness import HOST, Slowness
from inferscope.insight.findings.steps import StepStats
from inferscope.records import (
    SAMPLER_ROLE,
    CacheLookup,
    CacheSample,
    CounterSample,
    EngineInfo,
    ExpertLoad,
    Record,
    RingOpened,
    StepPlan,
    StepSlices,
    plain_uuid,
)

_FRONT_END = "frontend"


class RunSummary:
    """Summary of one engine's run.

    Attributes:
        info: engine information; None before its record.
        is_synthetic: whether its records are marked as synthetic.
        experts: load of the experts of a mixture.
        slowness: steps slower than their model, with evidence.
        devices: plain UUIDs of its ranks' devices.
        cache: use of the prefix cache.
        cache_accounts: miss-ratio curve of the prefix cache.
    """

    def __init__(self, engine_id: str) -> None:
        self.engine_id = engine_id
        self.info: EngineInfo | None = None
        self.is_synthetic = False
        self.requests = RequestStats()
        self.steps = StepStats()
        self.plans = PlanStats()
        self.experts = ExpertLoads()
        self.cache = EngineCache(CacheGroup(""), {})
        self.cache_accounts = CacheAccounts()
        self._lookups: dict[int, CacheLookup] = {}
        """Last lookup by ring."""
        self.slowness = Slowness()
        self.devices: set[str] = set()

    def look_up(self, ring: int, lookup: CacheLookup) -> None:
        """Keep the lookup of the prompt whose blocks are sampled next."""
        self._lookups[ring] = lookup

    def sample(self, ring: int, sample: CacheSample) -> None:
        """Add a prompt's sampled blocks to the curve."""
        lookup = self._lookups.get(ring)
        if lookup is not None and lookup.index == sample.index:
            self.cache_accounts.sampled(ring, sample, lookup, tenant="")


class RunSummarizer:
    """Sink that summarizes the run of each engine, live or from a recording.

    Attributes:
        runs: summaries by engine.
    """

    def __init__(self) -> None:
        self.runs: dict[str, RunSummary] = {}
        self._run_of_ring: dict[int, RunSummary] = {}
        self._front_ends: set[int] = set()
        self._samplers: set[int] = set()

    def on_step(self, step: FinalStep) -> None:
        """Add a step."""
        run = self._run(step.engine_id)
        if run.steps.add(step):
            run.slowness.add(step)

    def on_request(self, request: FinalRequest) -> None:
        """Add a request."""
        run = self._run(request.engine_id)
        run.requests.add(request, run.steps.end(request))
        if not request.joined_late:
            run.cache.add(request)

    def on_record(self, ring: int, record: Record) -> None:
        """Add a record of the fold."""
        if isinstance(record, RingOpened):
            if record.role == SAMPLER_ROLE:
                self._samplers.add(record.ring)
                return
            if record.role == _FRONT_END:
                self._front_ends.add(record.ring)
            run = self._run_of_ring[record.ring] = self._run(record.engine_id)
            run.is_synthetic |= record.synthetic
            return
        known = self._run_of_ring.get(ring)
        if known is None:
            if ring in self._samplers and isinstance(record, CounterSample):
                self._device_sample(record)
            return
        run = known
        if isinstance(record, StepPlan):
            run.plans.add(record)
            run.cache_accounts.plan(record.blocks_used, record.blocks_total)
        elif isinstance(record, StepSlices):
            run.steps.speculation.add_slices(record)
        elif isinstance(record, ExpertLoad):
            run.experts.add(record)
        elif isinstance(record, CacheLookup):
            run.look_up(ring, record)
        elif isinstance(record, CacheSample):
            run.sample(ring, record)
        elif isinstance(record, EngineInfo):
            run.info = record
            run.devices |= {plain_uuid(uuid) for uuid in (record.device_uuid,) if uuid}
        elif isinstance(record, CounterSample) and record.source == HOST:
            run.slowness.host_sample(ring, record, runs_steps=ring not in self._front_ends)

    def _device_sample(self, sample: CounterSample) -> None:
        uuid = plain_uuid(sample.device_uuid)
        for run in self.runs.values():
            if uuid in run.devices:
                run.slowness.device_sample(sample)

    def _run(self, engine_id: str) -> RunSummary:
        run = self.runs.get(engine_id)
        if run is None:
            run = self.runs[engine_id] = RunSummary(engine_id)
        return run
