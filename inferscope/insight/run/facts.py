"""Facts about one run, by engine: what a report shows, with the exact numbers behind it."""

from __future__ import annotations

from dataclasses import dataclass, field

from inferscope.fold import DeviceTime, EngineView, FinalRequest, FinalStep, RunTotals
from inferscope.insight.cache_tally import CacheReport
from inferscope.insight.facts import Facts
from inferscope.insight.findings import EngineFindings
from inferscope.insight.run.course import CourseBin
from inferscope.insight.run.ledger_bands import LedgerBand
from inferscope.insight.run.roofline import RooflinePoint
from inferscope.insight.run.worst_second import WorstSecond
from inferscope.insight.shares import Shares
from inferscope.log_histogram import LogHistogram
from inferscope.records import EngineInfo, RingOpened


@dataclass(frozen=True)
class EngineFacts:
    """One engine's run."""

    engine_id: str
    """Name of the engine."""
    found: EngineFindings
    """Findings, and counts by objective."""
    view: EngineView
    """State at the end of the records; its windows reach back five minutes at most."""
    info: EngineInfo | None
    """Description of the engine; None before its record."""
    rings: tuple[RingOpened, ...]
    """Observed processes."""
    num_by_finish: dict[str, int]
    """Finished requests by the reason of their end, all of them."""
    first_arrival_ns: int | None
    """First arrival on the monotonic clock; None without a finished request."""
    last_delivery_ns: int | None
    """Last end of delivery."""
    real_offset_ns: int | None
    """Wall time minus monotonic time; None if no record states it."""
    prompt_tokens: int
    """Prompt tokens of the finished requests observed from their beginning."""
    cached_tokens: int
    """Part of them from the prefix cache."""
    output_tokens: int
    """Output tokens of all finished requests."""
    num_preemptions: int
    """Preemptions of the finished requests observed from their beginning."""
    shares: Shares
    """Device time by phase."""
    devices: tuple[DeviceTime, ...]
    """Wall time of its devices by use."""
    ttft: LogHistogram
    """Time to first token; over streamed responses observed from their beginning."""
    tbt: LogHistogram
    """Gap between tokens; over the same."""
    e2e: LogHistogram
    """Time to the last token; over answers observed from their beginning."""
    ttft_bands: tuple[LedgerBand, ...]
    """Ledgers up to the first token, by TTFT."""
    e2e_bands: tuple[LedgerBand, ...]
    """Ledgers up to the last token, by E2E."""
    ledger_ns: dict[str, int]
    """Sums of the ledgers up to the last token, of the same answers as `e2e`."""
    roofline: tuple[RooflinePoint, RooflinePoint]
    """Work and time of prefill and decode."""
    course_ns: int
    """Length of a bin of the course."""
    course: tuple[tuple[int, CourseBin], ...]
    """Starts and amounts of the bins of the run."""
    slowest: tuple[FinalRequest, ...]
    """Longest requests, the longest first."""
    worst_second: WorstSecond | None
    """Second whose tokens came slowest; None without gaps between tokens."""
    worst_steps: tuple[FinalStep, ...] = ()
    """Steps that overlap it, of all ranks; empty before the second pass."""
    num_worst_left_out: int = 0
    """Further steps of that second, which were too many to keep."""
    worst_names: dict[str, str] = field(default_factory=dict)
    """Clients' names of the requests in those steps, by request ID."""
    cache: CacheReport | None = None
    """Use of the prefix cache; None if the records do not hold it."""
    explained: dict[str, Facts] = field(default_factory=dict)
    """Facts of some of the slowest requests, by request ID; empty before the second pass."""


@dataclass(frozen=True)
class RunFacts:
    """A run of one or several engines."""

    engines: tuple[EngineFacts, ...]
    """Engines in the order of their first records."""
    totals: RunTotals
    """Counts of records, and the digest of the fold."""
    has_objectives: bool
    """Whether objectives were given."""
