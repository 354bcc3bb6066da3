"""The frozen view of a fold: what screens, `--json` and exporters read, and all they read.

A snapshot owns its numbers: nothing in it changes when the fold goes on. Unknown is None.
Percentiles come from merged histograms with bins of 1 %; counts, sums and shares are exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from inferscope.attribution.culprits import Culprit
from inferscope.clock_skew import SkewedClock
from inferscope.collector.counted import NOT_COUNTED, RequestCounters
from inferscope.collector.finals import DeviceTime
from inferscope.slo.objectives import Objective
from inferscope.slo.tally import Count


@dataclass(frozen=True)
class Deployment:
    """How an engine says that it was started; empty or 1 where it does not say."""

    role: str = "both"
    """In disaggregated serving: prefill, decode or both."""
    revision: str = ""
    quantization: str = ""
    """Bits of weights and KV, as in w4kv16."""
    tensor_ranks: int = 1
    pipeline_ranks: int = 1
    data_ranks: int = 1
    expert_ranks: int = 1
    options_hash: str = ""

    @property
    def team_ranks(self) -> int:
        """Return how many ranks execute each step together."""
        return self.tensor_ranks * self.pipeline_ranks


@dataclass(frozen=True)
class Quantiles:
    """A distribution over the window, in nanoseconds."""

    num: int
    mean_ns: int | None
    p50_ns: int | None
    p95_ns: int | None
    p99_ns: int | None
    max_ns: int | None


NO_QUANTILES = Quantiles(0, None, None, None, None, None)


@dataclass(frozen=True)
class RequestRow:
    """One request as the table shows it, alive or lately finished."""

    request_id: str
    external_id: str | None
    state: str
    """arriving, waiting, prefill, decode, held, done."""
    finish: str | None
    """One of FINISHES once it is done."""
    arrived_ns: int
    age_ns: int
    prompt_tokens: int | None
    cached_tokens: int | None
    output_tokens: int
    ttft_ns: int | None
    tbt_mean_ns: int | None
    tbt_p99_ns: int | None
    e2e_ns: int | None
    prefill_ns: int
    """Attributed compute, summed over ranks (apportioned, unless it was alone in its steps)."""
    decode_ns: int
    interference_share: float | None
    """Part of its life so far spent waiting for the other phase of other requests."""
    num_preemptions: int
    ledger_ns: dict[str, int]
    """Its life so far by cause; causes that took no time are left out."""
    ttft_ledger_ns: dict[str, int]
    joined_late: bool
    gaps_ns: tuple[int, ...] = ()
    """Between its tokens, the longest of every `gaps_per_cell`: of the request in focus only."""
    gaps_per_cell: int = 1
    trace: str = ""
    """W3C `traceparent`, of the request in focus only."""
    blame: tuple[Culprit, ...] = ()
    """Whom it has waited for so far, by cause: of the request in focus only."""
    counters: RequestCounters = NOT_COUNTED
    """What samples of its devices say, once it has ended."""
    ledger_missing: str = ""
    """Why it has no ledger; then the causes above are empty and its compute is unknown."""


@dataclass(frozen=True)
class Series:
    """Rates by second, oldest first; the last is the last whole second."""

    prefill_tok_s: tuple[float, ...]
    decode_tok_s: tuple[float, ...]
    prefill_share: tuple[float, ...]
    """Of the device's wall time; the same for decode."""
    decode_share: tuple[float, ...]
    ttft_p95_ns: tuple[int | None, ...]
    tbt_p99_ns: tuple[int | None, ...]
    running: tuple[int, ...]
    waiting: tuple[int, ...]
    kv_share: tuple[float, ...]


@dataclass(frozen=True)
class RankView:
    """One of the ranks that execute steps together."""

    dp_rank: int
    rank: int
    overdue_ns: int
    """For how long the others have waited for it, 0 where they do not."""


@dataclass(frozen=True)
class CostModel:
    """The cost model in force for one execution mode."""

    mode: str
    source: str
    """fit, calibration or roofline; tokens where no shape is known and nothing is learned yet."""
    fit_id: str
    residual: float | None
    """Median of measured over modelled time of recent steps, less one; None while these are few."""
    num_steps: int
    """That it was told of."""
    is_provisional: bool = False
    """Fewer than `ENOUGH_STEPS` steps have corrected it, and no calibration."""
    bounded_share: float = 0.0
    """Share of its steps' time that measured steps took off what it said of one member alone."""


@dataclass(frozen=True)
class PhaseUse:
    """How one phase used its device over the window, as far as samples say; of its own time."""

    sm_share: float | None
    """SMs with a warp resident, mean over SMs and time."""
    busy_share: float | None
    """With any kernel running: the rest is gaps between launches."""
    read_bytes_s: float | None
    write_bytes_s: float | None
    power_w: float | None


@dataclass(frozen=True)
class DeviceCounters:
    """What samples of one of an engine's devices say; what they do not say is not there."""

    device: str = ""
    """What kind it is of, as its driver calls it."""
    totals: dict[str, dict[str, int]] = field(default_factory=dict)
    """As those of `CountersView`, of which they are a part."""
    gauges: dict[str, float] = field(default_factory=dict)
    """Of the whole device, by the words of COUNTERS, as told last."""


@dataclass(frozen=True)
class CountersView:
    """What samples of an engine's devices say; what they do not say is not there."""

    reason: str = ""
    """Why they say nothing."""
    totals: dict[str, dict[str, int]] = field(default_factory=dict)
    """By what is counted and phase, since the fold began; energy also of `idle` time."""
    methods: dict[str, str] = field(default_factory=dict)
    """measured or apportioned, by what is counted."""
    sources: dict[str, str] = field(default_factory=dict)
    errors: dict[str, float | None] = field(default_factory=dict)
    """Of the regressions, relative."""
    up: tuple[str, ...] = ()
    """Sources that are there now."""
    use: dict[str, PhaseUse] = field(default_factory=dict)
    """By phase, over the window."""
    devices: dict[str, DeviceCounters] = field(default_factory=dict)
    """By the device's id as its driver writes it; a MIG instance has its own where the engine is on
    several of one board."""
    host: dict[str, float] = field(default_factory=dict)
    """What the engine's processes take of it: `cpu_cores` and `rss_bytes`."""
    memory_peaks_bytes_s: dict[str, float] = field(default_factory=dict)
    """Bytes per second: `spec` by the device's maker, `measured` by its calibration."""
    compute_peaks_flops_s: dict[str, float] = field(default_factory=dict)
    """FLOPs per second in what the model computes in, likewise."""
    clock_error_ns: int | None = None
    """Of the device's clock against the host's, by its newest anchor."""
    stamp_error_ns: int | None = None
    """Of the newest samples stamped by the wall clock (CUPTI's), by the anchors around them."""
    num_unplaced: int = 0
    """Of such windows, those dropped because nobody can tell what the wall clock showed then."""


@dataclass(frozen=True)
class Health:
    """InferScope on itself."""

    probe_state: str
    """One of PROBE_STATES, or lost when the engine went silent."""
    probe_share: float | None
    """The probe's own time over wall time, in all of the engine's processes together."""
    num_records: int
    num_lost: int
    num_late: int
    num_unjoined: int
    num_unknown: int
    """Frames of types this version does not know."""
    message: str
    unsupported: tuple[str, ...] = ()
    """Features of the engine that its probes cannot observe, with the reasons."""
    skewed_clocks: tuple[SkewedClock, ...] = ()
    """Processes in time namespaces of their own, with what their times were corrected by."""
    probe_hidden_share: float | None = None
    """Its part that no step waited for: the device computed meanwhile."""
    num_refused: int = 0
    """Requests beyond the number in flight that a fold follows; once for each process's ring."""


@dataclass(frozen=True)
class RunFinding:
    """A finding on a whole run; `inferscope findings` has its numbers."""

    id: str
    severity: str
    title: str
    causes: tuple[str, ...]
    """Ledger rows that it names."""


@dataclass(frozen=True)
class EngineView:
    """One engine now and over the window that was asked for."""

    engine_id: str
    engine: str
    version: str
    model: str
    device: str
    pids: tuple[int, ...]
    is_alive: bool
    is_synthetic: bool
    clock: str
    """device or host: whose clock timed the steps."""
    window_ns: int
    """What the window really covers, at most what was asked for."""
    device_ns: dict[str, int]
    """Wall time over the window by DEVICE_SECONDS; sources that are absent are left out."""
    device_total_ns: dict[str, int]
    """The same since the fold began."""
    wall_total_ns: int
    ttft: Quantiles
    tbt: Quantiles
    e2e: Quantiles
    queue: Quantiles
    step: Quantiles
    host_gap: Quantiles
    ledger_ns: dict[str, int]
    """The ledgers of all requests finished in the window, summed."""
    prefill_tok_s: float | None
    decode_tok_s: float | None
    prefill_busy_tok_s: float | None
    """Tokens over attributed prefill seconds; likewise decode. Never averaged together."""
    decode_busy_tok_s: float | None
    num_running: int
    num_waiting: int
    num_held: int
    num_finished: int
    """Since the fold began."""
    finished_s: float | None
    num_preemptions: int
    blocks_used: int
    blocks_cached: int
    blocks_total: int
    block_tokens: int
    max_running: int
    token_budget: int
    cached_share: float | None
    """Prompt tokens of the window that came from the prefix cache."""
    mixed_share: float | None
    """Steps of the window that held both phases."""
    binding: str
    """The scheduler's constraint in the last step."""
    model_residual: float | None
    """Residual of its last 256 steps that were not cold; see `cost.verdict`."""
    model_source: str
    series: Series
    requests: tuple[RequestRow, ...]
    """Alive first, then those that finished within `listed_ns`, newest first."""
    num_requests: int
    """Of those alive; `requests` may hold fewer."""
    health: Health
    num_ranks_seen: int = 1
    """Of the engine's ranks, those whose steps are seen; the others' time is missing."""
    num_ranks: int = 1
    num_partial: int = 0
    """Steps that were split although a rank that is seen said nothing of them."""
    num_replaced: int = 0
    """Of its cores (of all processes, where it has none), those that went without a goodbye and
    have been started again."""
    deployment: Deployment = Deployment()
    devices: tuple[DeviceTime, ...] = ()
    """Each device's wall time since the fold began, or since it is counted."""
    through_ns: int = 0
    """Up to when that wall time reaches."""
    folded_ns: int = 0
    """Up to when all that is told of it is folded: behind the present, or far behind it."""
    cost_models: tuple[CostModel, ...] = ()
    """By execution mode, the ones with the most steps first."""
    counters: CountersView = CountersView()
    is_counted: bool = True
    """FLOPs and bytes follow from the model's shape; if not, its steps are attributed time only."""
    objectives: tuple[Count, ...] = ()
    """What of its requests was good and bad since a collector counts; none where it has none."""
    has_scheduler: bool = True
    """Whoever schedules its steps is on this host; else its queues and requests are not known."""
    queued_prompt_tokens: int | None = 0
    """Of requests that wait, held ones included; None where the length of one is not known."""

    prefill_flops_s: float | None = None
    """Of the model's own FLOPs, by prefill's share of device time; None where they are unknown."""
    ranks: tuple[RankView, ...] = ()
    """Those beside which another of the same stage is seen."""
    is_paused: bool = False
    """Somebody has paused it: requests wait, and no step is due."""
    num_admissions: int | None = None
    """Since the fold began, those after a preemption included; None where no core is observed."""
    num_admissible: int | None = None
    """Queued requests that it could admit and does not; None where that is unknown."""
    ledger_missing: str = ""
    """Why its requests have no ledger; empty where they have one."""
    findings: tuple[RunFinding, ...] = ()
    """On the run so far, in their order; none where the reader does not judge runs."""
    listed_ns: int = 0
    """How far back `requests` holds finished ones: the window of all numbers, or a longer past."""
    num_finished_since: int = 0
    """Requests that finished within `listed_ns`; `requests` may hold fewer."""

    @property
    def has_ended(self) -> bool:
        """Tell whether the engine said goodbye, by its core: then its silence is no loss."""
        return self.health.probe_state == "closed"


@dataclass(frozen=True)
class BudgetView:
    """One objective over the requests of one model, on this host, over its window up to now."""

    model: str
    objective: Objective
    num_good: int
    num_bad: int
    remaining: float
    """Of the error budget: 1 is all of it, below 0 it is overspent."""


@dataclass(frozen=True)
class Promised:
    """What a collector's objectives have come to."""

    budgets: tuple[BudgetView, ...]
    uncounted_ns: int
    """Before this collector began, the time for which nobody has decided anything."""


@dataclass(frozen=True)
class Running:
    """How a collector runs."""

    version: str
    config_hash: str
    """Of all that it is told, by its file, its objectives and its environment."""
    num_reloads: int = 0
    """That took effect."""
    num_reloads_refused: int = 0
    """That did not, for something could not be used."""
    shard: str = "1/1"
    """Which part of the host's engines it has."""
    num_refused: Mapping[str, int] = field(default_factory=dict)
    """Rings that were left out, by reason."""


@dataclass(frozen=True)
class Snapshot:
    """Everything a reader shows, at one time."""

    mono_ns: int
    real_ns: int
    """Wall time by the recorded clocks, 0 where none was seen."""
    mode: str
    """live, paused, replay or ended."""
    engines: tuple[EngineView, ...]
    digest: str
    source: str = ""
    """What is being read, for the header."""
    notes: tuple[str, ...] = field(default=())
    """What the reader must say: damage, lapping, a newer format."""
    promised: Promised | None = None
    """None where the reader has no objectives."""
    dropped: dict[str, dict[str, int]] = field(default_factory=dict)
    """What a collector's exporters gave up, by exporter and reason."""
    running: Running | None = None
    """None where the reader is no collector."""
    guests: Mapping[str, int] = field(default_factory=dict)
    """User ids of engines of other users than the collector's and root, by engine id."""


def to_json(snapshot: Snapshot) -> bytes:
    """Encode a snapshot for `--json`."""
    return msgspec.json.encode(snapshot)
