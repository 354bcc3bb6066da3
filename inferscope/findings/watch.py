"""Watching a run in bounded memory: a sink of the fold that listens to its records as well."""

from __future__ import annotations

from inferscope.collector.finals import FinalRequest, FinalStep
from inferscope.findings.plans import Plans, Prefixes
from inferscope.findings.requests import Requests
from inferscope.findings.steps import Steps
from inferscope.records import EngineInfo, Record, RequestEvent, RingOpened, StepPlan, StepSlices


class Run:
    """What is summed up of one engine.

    Attributes:
        info: what it said of itself, None before it has.
        is_synthetic: its records say that they are made up.
    """

    def __init__(self, engine_id: str) -> None:
        self.engine_id = engine_id
        self.info: EngineInfo | None = None
        self.is_synthetic = False
        self.requests = Requests()
        self.steps = Steps()
        self.plans = Plans()
        self.prefixes = Prefixes()


class Watch:
    """Sums up the run of each engine, live or from a recording alike.

    Attributes:
        runs: by engine.
    """

    def __init__(self) -> None:
        self.runs: dict[str, Run] = {}
        self._run_of_ring: dict[int, Run] = {}

    def step(self, step: FinalStep) -> None:
        """Take a step."""
        self._run(step.engine_id).steps.add(step)

    def request(self, request: FinalRequest) -> None:
        """Take a request."""
        run = self._run(request.engine_id)
        run.requests.add(request, run.steps.end(request))

    def listen(self, ring: int, record: Record) -> None:
        """Take a record of the fold."""
        if isinstance(record, RingOpened):
            run = self._run_of_ring[record.ring] = self._run(record.engine_id)
            run.is_synthetic |= record.synthetic
            return
        known = self._run_of_ring.get(ring)
        if known is None:
            return
        run = known
        if isinstance(record, StepPlan):
            run.plans.add(record)
        elif isinstance(record, StepSlices):
            run.steps.speculation.listen(record)
        elif isinstance(record, RequestEvent):
            run.prefixes.add(record)
        elif isinstance(record, EngineInfo):
            run.info = record

    def _run(self, engine_id: str) -> Run:
        run = self.runs.get(engine_id)
        if run is None:
            run = self.runs[engine_id] = Run(engine_id)
        return run
