"""Immutable snapshot of a fold: the only input of screens, `--json` and exporters.

A snapshot owns its numbers: nothing in it changes when the fold continues. Unknown is None.
Percentiles come from merged histograms with bins of 1 %; counts, sums and shares are exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

import msgspec

from inferscope.attribution import BlameShare
from inferscope.clock_skew import SkewedClock
from inferscope.fold.final_records import DeviceTime, KvTransfer
from inferscope.fold.join.request_counters import NOT_COUNTED, RequestCounters
from inferscope.fold.miss_ratio import Curve
from inferscope.json_document import Document, json_line
from inferscope.slo import Objective, ObjectiveCount


@dataclass(frozen=True)
class Deployment:
    """Configuration that an engine reports; empty or 1 where it reports none."""

    role: str = "both"
    """Role in disaggregated serving: prefill, decode or both."""
    revision: str = ""
    """Revision of the model."""
    quantization: str = ""
    """Bits of weights and KV cache, as in w4kv16."""
    tensor_ranks: int = 1
    """Number of tensor-parallel ranks."""
    pipeline_ranks: int = 1
    """Number of pipeline-parallel ranks."""
    data_ranks: int = 1
    """Number of data-parallel ranks."""
    expert_ranks: int = 1
    """Number of expert-parallel ranks."""
    options_hash: str = ""
    """Hash of the engine's options."""

    @property
    def team_ranks(self) -> int:
        """Return the number of ranks that execute each step together."""
        return self.tensor_ranks * self.pipeline_ranks


@dataclass(frozen=True)
class Quantiles:
    """Distribution of a duration over the window; None where it has no values."""

    num: int
    """Number of durations."""
    mean_ns: int | None
    """Exact mean."""
    p50_ns: int | None
    """Median."""
    p95_ns: int | None
    """95th percentile."""
    p99_ns: int | None
    """99th percentile."""
    max_ns: int | None
    """Longest duration."""


NO_QUANTILES = Quantiles(0, None, None, None, None, None)


@dataclass(frozen=True)
class RequestRow:
    """Row of one request, alive or finished within `listed_ns` of its engine."""

    request_id: str
    """Engine's own id of the request."""
    external_id: str | None
    """Client's id; None where it gave none."""
    state: str
    """arriving, waiting, prefill, decode, held (preempted) or done."""
    finish: str | None
    """Reason of the end, one of the wire's finishes; None while it is alive."""
    arrived_ns: int
    """Time of arrival on the monotonic clock."""
    age_ns: int
    """Time from arrival to the end of delivery, or to now."""
    prompt_tokens: int | None
    """Tokens of the prompt; None while they are not known."""
    cached_tokens: int | None
    """Prompt tokens that came from the prefix cache; None before admission."""
    output_tokens: int
    """Tokens generated so far."""
    ttft_ns: int | None
    """Time to first token; None before it."""
    tbt_mean_ns: int | None
    """Mean gap between tokens; None with fewer than two tokens."""
    tbt_p99_ns: int | None
    """99th percentile of those gaps."""
    e2e_ns: int | None
    """Time from arrival to the last token; None while the request is alive."""
    prefill_ns: int
    """Attributed compute time of its prefill, summed over ranks; apportioned unless it was alone in
    its steps."""
    decode_ns: int
    """Attributed compute time of its decode, likewise."""
    interference_share: float | None
    """Share of its age spent waiting for the other phase of other requests."""
    num_preemptions: int
    """Number of preemptions."""
    ledger_ns: dict[str, int]
    """Time so far by cause; causes without time are absent."""
    ttft_ledger_ns: dict[str, int]
    """Time up to the first token by cause."""
    joined_late: bool
    """Whether its beginning was not observed."""
    gaps_ns: tuple[int, ...] = ()
    """Longest of every `gaps_per_cell` gaps between tokens; only for the request in focus."""
    gaps_per_cell: int = 1
    """Number of gaps that one entry of `gaps_ns` stands for."""
    gap_ends_ns: tuple[int, ...] = ()
    """End of each of these gaps on the monotonic clock, likewise."""
    trace: str = ""
    """W3C `traceparent`; only for the request in focus."""
    blame: tuple[BlameShare, ...] = ()
    """Requests that it waited for so far, by cause; only for the request in focus."""
    counters: RequestCounters = NOT_COUNTED
    """Counter values apportioned to it after its end."""
    ledger_missing: str = ""
    """Reason why it has no ledger; its causes are then empty and its compute is unknown."""
    reasoning_tokens: int | None = None
    """Output tokens that are reasoning; None before its end, or if the engine does not report
    them."""
    ttfot_ns: int | None = None
    """Time to the first output token after the reasoning; None likewise, or without one."""
    tenant: str = ""
    """Tenant of an allowed header; empty without one."""
    adapter: str = ""
    """Name of its LoRA adapter; empty for the base model."""
    proposed_tokens: int = 0
    """Draft tokens that the target model verified for it."""
    accepted_tokens: int = 0
    """Those of them that it accepted."""
    transfers: tuple[KvTransfer, ...] = ()
    """Transfers of its KV blocks from other workers."""


@dataclass(frozen=True)
class Series:
    """Rates by second, oldest first; the last is the last whole second."""

    prefill_tok_s: tuple[float, ...]
    """Prompt tokens computed per second."""
    decode_tok_s: tuple[float, ...]
    """Output tokens computed per second."""
    prefill_share: tuple[float, ...]
    """Prefill's share of the device's wall time."""
    decode_share: tuple[float, ...]
    """Decode's share of the device's wall time."""
    ttft_p95_ns: tuple[int | None, ...]
    """95th percentile of TTFT; None for a second without one."""
    tbt_p99_ns: tuple[int | None, ...]
    """99th percentile of TBT; None for a second without one."""
    running: tuple[int, ...]
    """Requests in the batch, by the last plan of the second."""
    waiting: tuple[int, ...]
    """Requests in the queue, by the last plan of the second."""
    kv_share: tuple[float, ...]
    """Share of the KV blocks in use."""
    blocks_used: tuple[int, ...] = ()
    """KV blocks in use, by the last plan of the second."""
    blocks_cached: tuple[int, ...] = ()
    """KV blocks that only the prefix cache holds, likewise."""
    blocks_total: tuple[int, ...] = ()
    """KV blocks of the engine, likewise."""
    waiting_by: dict[str, tuple[float | None, ...]] = field(default_factory=dict)
    """Mean number of waiting requests over the plans of a second, by the constraint that bound the
    scheduler; None for a second without a plan."""
    preempted: tuple[int, ...] = ()
    """Preemptions."""
    cached_tokens: tuple[int, ...] = ()
    """Prompt tokens of admitted requests that came from the prefix cache."""
    prompt_tokens: tuple[int, ...] = ()
    """Prompt tokens of admitted requests."""
    proposed_tokens: tuple[int, ...] = ()
    """Draft tokens that the target model verified."""
    accepted_tokens: tuple[int, ...] = ()
    """Those of them that it accepted."""


class KindSums(msgspec.Struct, frozen=True, gc=False):
    """Sums over steps of one kind that were not cold; work is that of the observed ranks."""

    steps: int = 0
    """Number of steps."""
    wall_ns: int = 0
    """Their durations, each by its slowest rank."""
    device_ns: int = 0
    """Measured time, summed over ranks."""
    flops: int = 0
    """Modelled FLOPs; 0 where the model's work is not counted."""
    read_bytes: int = 0
    """Modelled bytes read from device memory, likewise."""
    write_bytes: int = 0
    """Modelled bytes written."""
    weight_bytes: int = 0
    """Part of the bytes read that is the model's weights."""
    kv_bytes: int = 0
    """Part of the bytes read that is keys and values."""
    prefill_tokens: int = 0
    """Prompt tokens computed."""
    decode_tokens: int = 0
    """Output tokens computed, rejected drafts included."""
    requests: int = 0
    """Requests, once for each of their steps."""


class RankSplit(msgspec.Struct, frozen=True, gc=False):
    """Division of one rank's time in a step; the four parts sum to `measured_ns`."""

    rank: int
    """Rank within the replica."""
    start_ns: int
    """Start on the host's clock."""
    end_ns: int
    """End on the host's clock."""
    measured_ns: int
    """Measured time."""
    prefill_ns: int
    """Shares of the prefill slices."""
    decode_ns: int
    """Shares of all other slices."""
    padding_ns: int
    """Time computed for padding."""
    unattributed_ns: int
    """Time of no slice."""


class StepView(msgspec.Struct, frozen=True, gc=False):
    """One executed step. Columns of slices have one entry per slice, in the same order."""

    dp_rank: int
    """Data-parallel rank."""
    step: int
    """Number of the step in its replica."""
    kind: str
    """prefill, decode, mixed, dummy, or unknown."""
    start_ns: int
    """Start on the earliest rank."""
    end_ns: int
    """End on the latest rank."""
    host_gap_ns: int
    """Idle time of the engine before it, as far as a request was waiting or running."""
    clock: str
    """Clock of the times: device or host."""
    mode: str
    """Execution mode, such as eager or graph."""
    is_cold: bool
    """Whether it includes compilation or a capture."""
    num_requests: int
    """Requests in the step."""
    prefill_tokens: int | None
    """Prompt tokens computed; None if its slices are not known."""
    decode_tokens: int | None
    """Output tokens computed, rejected drafts included; None likewise."""
    ranks: tuple[RankSplit, ...]
    """Time by rank."""
    flops: int | None
    """Modelled FLOPs of its ranks; None if the model's work is not counted."""
    read_bytes: int | None
    """Modelled bytes read from device memory, likewise."""
    write_bytes: int | None
    """Modelled bytes written, likewise."""
    residual: float | None
    """Measured over modelled time, less one; None without known slices."""
    binding: str
    """Constraint of the scheduler: none, slots, blocks or budget."""
    plan_start_ns: int | None
    """Start of the scheduler's decision; None without a plan."""
    plan_end_ns: int | None
    """End of that decision."""
    num_waiting: int | None
    """Requests in the queue at that decision."""
    num_running: int | None
    """Requests in the batch at that decision."""
    num_preempted: int
    """Requests that the decision preempted."""
    blocks_used: int | None
    """KV blocks in use at that decision."""
    blocks_total: int | None
    """KV blocks of the engine."""
    blocks_added: int | None
    """Change of the KV blocks in use since the previous step's decision."""
    request_ids: tuple[str, ...]
    """Engine's ids of the slices' requests."""
    phases: tuple[str, ...]
    """Phases of the slices: prefill, decode, verify or draft."""
    tokens: tuple[int, ...]
    """Computed tokens."""
    contexts: tuple[int, ...]
    """Context tokens before them."""
    shares_ns: tuple[tuple[int, ...], ...]
    """Share of each slice in the measured time, by rank."""

    @property
    def measured_ns(self) -> int:
        """Return the measured time of the slowest rank."""
        return max(rank.measured_ns for rank in self.ranks)

    @property
    def device_ns(self) -> int:
        """Return the measured time over all ranks."""
        return sum(rank.measured_ns for rank in self.ranks)


@dataclass(frozen=True)
class RankView:
    """Rank of a group that executes steps together."""

    dp_rank: int
    """Data-parallel rank."""
    rank: int
    """Rank within the replica."""
    overdue_ns: int
    """Time that the other ranks have waited for it; 0 where they do not."""


@dataclass(frozen=True)
class ExpertsView:
    """Load of the experts of a mixture, summed over steps and layers since the fold began."""

    num_experts: int
    """Experts in each layer."""
    mean_tokens: float
    """Tokens routed over the number of experts: the load of each if all had the same."""
    busiest_tokens: int
    """Tokens routed to the busiest expert of each layer and step."""
    even_tokens: float
    """Modelled load of the busiest expert if each token chose its experts at random."""
    layer: int
    """Layer of the expert that was the busiest with most tokens."""
    expert: int
    """Index of that expert in its layer."""
    expert_share: float
    """Share of the load of its layer's busiest experts that it had."""


@dataclass(frozen=True)
class CostModel:
    """Cost model in force for one execution mode."""

    mode: str
    """Execution mode, such as eager or graph."""
    source: str
    """fit, calibration or roofline; tokens if no shape is known and nothing is learned yet."""
    fit_id: str
    """ID of the model's coefficients."""
    residual: float | None
    """Median of measured over modelled time of recent steps, less one; None while these are few."""
    num_steps: int
    """Number of steps in the fit."""
    is_provisional: bool = False
    """Whether few steps have corrected it and no calibration was found."""
    bounded_share: float = 0.0
    """Share of its steps' time that measured steps took off the modelled time of one request
    alone."""


@dataclass(frozen=True)
class PhaseUse:
    """Use of the device by one phase over the window, in that phase's own time."""

    sm_share: float | None
    """Share of SMs with a resident warp, mean over SMs and time."""
    busy_share: float | None
    """Share of the time with a kernel running; the rest is gaps between launches."""
    read_bytes_s: float | None
    """Device memory read."""
    write_bytes_s: float | None
    """Device memory written."""
    power_w: float | None
    """Power."""


@dataclass(frozen=True)
class DeviceCounters:
    """Counters of one of an engine's devices; values without a source are absent."""

    device: str = ""
    """Device's model, by its driver."""
    totals: dict[str, dict[str, int]] = field(default_factory=dict)
    """Totals of this device, in the form of those of `CountersView`."""
    gauges: dict[str, float] = field(default_factory=dict)
    """Latest values of the whole device, by counter."""


@dataclass(frozen=True)
class CountersView:
    """Counters of an engine's devices; values without a source are absent."""

    reason: str = ""
    """Reason why there are none."""
    totals: dict[str, dict[str, int]] = field(default_factory=dict)
    """Totals by counter and phase since the fold began; energy has an `idle` entry as well."""
    methods: dict[str, str] = field(default_factory=dict)
    """measured or apportioned, by counter."""
    sources: dict[str, str] = field(default_factory=dict)
    """Source of each total, by counter."""
    errors: dict[str, float | None] = field(default_factory=dict)
    """Relative error of the regression that apportions a total, by counter."""
    up: tuple[str, ...] = ()
    """Sources that report now."""
    use: dict[str, PhaseUse] = field(default_factory=dict)
    """Use of the device over the window, by phase."""
    devices: dict[str, DeviceCounters] = field(default_factory=dict)
    """Counters by device, under the id that its driver writes. A MIG instance has its own id where
    the engine is on several of one board."""
    host: dict[str, float] = field(default_factory=dict)
    """Host resources of the engine's processes: `cpu_cores` and `rss_bytes`."""
    memory_peaks_bytes_s: dict[str, float] = field(default_factory=dict)
    """Peak rates of device memory: `spec` by the maker, `measured` by calibration."""
    compute_peaks_flops_s: dict[str, float] = field(default_factory=dict)
    """Peak rates in the model's data type: `spec` by the maker, `measured` by calibration."""
    clock_error_ns: int | None = None
    """Error of the device's clock against the host's, by its newest anchor."""
    stamp_error_ns: int | None = None
    """Error of the newest samples stamped by the wall clock (CUPTI), by the anchors around them."""
    num_unplaced: int = 0
    """Number of such samples dropped because no anchor determines their time."""


@dataclass(frozen=True)
class Health:
    """State of the probe and of the fold."""

    probe_state: str
    """One of the wire's probe states, or lost when the engine went silent."""
    probe_share: float | None
    """Probe's time over wall time, in all of the engine's processes together."""
    num_records: int
    """Records read."""
    num_lost: int
    """Records overwritten before they were read, or damaged."""
    num_late: int
    """Records that arrived after the watermark."""
    num_unjoined: int
    """Steps whose records are missing or inconsistent."""
    num_unknown: int
    """Frames of types that this version does not know."""
    message: str
    """Last message of a probe."""
    unsupported: tuple[str, ...] = ()
    """Features of the engine that its probes cannot observe, with the reasons."""
    skewed_clocks: tuple[SkewedClock, ...] = ()
    """Processes in time namespaces of their own, with the corrections of their times."""
    probe_hidden_share: float | None = None
    """Probe's time over wall time while the device computed: no step waited for it."""
    num_refused: int = 0
    """Requests beyond the number in flight that a fold follows, counted once for each process's
    ring."""


@dataclass(frozen=True)
class RunFinding:
    """One finding on the whole run; `inferscope findings` has its numbers."""

    id: str
    """Name of the rule that found it."""
    severity: str
    """high, medium or low."""
    title: str
    """Finding in one sentence."""
    causes: tuple[str, ...]
    """Ledger causes of the finding."""


BIN_EDGES_NS = tuple(
    lead * 10**power for power in range(6, 11) for lead in (1, 2, 5)
)  # fmt: skip
"""Upper edges of the bins of durations in ns, 1 ms to 50 s; a last bin has the rest."""


@dataclass(frozen=True)
class LevelWindow:
    """Verdicts of one objective over a window up to now."""

    window_ns: int
    """Length of the window; its start is exact to ten seconds."""
    num_good: int
    """Good requests."""
    num_bad: int
    """Bad requests."""


@dataclass(frozen=True)
class ObjectiveLevels:
    """Verdicts of one objective, since its reader began or its threshold changed."""

    objective: Objective
    """The objective."""
    num_good: int
    """Good requests."""
    num_bad: int
    """Bad requests."""
    num_warm_up: int
    """Requests before the engine's first answer, neither good nor bad."""
    windows: tuple[LevelWindow, ...]
    """The same over the last 5 minutes and the last hour."""
    causes: dict[str, int]
    """Bad requests by main cause, the most frequent first."""


@dataclass(frozen=True)
class LevelTrial:
    """Verdicts on the kept requests under an objective that is only tried."""

    objective: Objective
    """Objective on trial."""
    num_good: int
    """Requests that would have been good."""
    num_bad: int
    """Requests that would have been bad."""
    present_good: int | None
    """Good requests among the same under the objective in force; None without one."""
    present_bad: int | None
    """Bad requests likewise."""


@dataclass(frozen=True)
class WorstRequest:
    """Finished request that missed an objective by much."""

    row: RequestRow
    """The request."""
    slo: str
    """Name of the objective that it missed by most."""
    value_ns: int | None
    """Its value; None for an objective without a threshold."""
    limit_ns: int | None
    """Threshold of the objective; None likewise."""
    cause: str | None
    """Main cause; None if it is unknown."""


@dataclass(frozen=True)
class ServiceLevels:
    """Objectives of one engine, and the requests that a reader keeps to judge."""

    origin: str = ""
    """Source of the objectives."""
    objectives: tuple[ObjectiveLevels, ...] = ()
    """Objectives in force for the engine's model."""
    observed_ns: int = 0
    """Time since the first counted request arrived."""
    num_requests: int = 0
    """Requests that finished in the window, of those kept."""
    num_good: int = 0
    """Those of them that missed no objective."""
    num_tokens: int = 0
    """Output tokens of the finished requests."""
    num_good_tokens: int = 0
    """Output tokens of those that missed no objective."""
    bins: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Durations (ttft, tbt, e2e) of the window by bin: up to 1 ms, 2 ms, 5 ms, 10 ms and so on up
    to 50 s, and the rest."""
    worst: tuple[WorstRequest, ...] = ()
    """Kept requests furthest beyond an objective; failed ones first."""
    trial: tuple[LevelTrial, ...] = ()
    """Kept requests under the objectives on trial; empty without a trial."""


@dataclass(frozen=True)
class CacheView:
    """Use of the prefix cache by finished requests since the fold began."""

    tokens: dict[str, int]
    """Prompt tokens by class; absent classes have none."""
    gpu_ns: dict[str, int]
    """Device time spent on them by class, as far as it is known."""
    curve: Curve | None
    """Hit share by size of the KV cache; None without samples."""


@dataclass(frozen=True)
class EngineView:
    """State of one engine, now and over the window."""

    engine_id: str
    """Name of the engine."""
    engine: str
    """Inference engine: vllm, sglang, transformers."""
    version: str
    """Version of the inference engine."""
    model: str
    """Served name of the model."""
    device: str
    """Kind of device."""
    pids: tuple[int, ...]
    """Observed processes."""
    is_alive: bool
    """Whether a process has a fresh heartbeat."""
    is_synthetic: bool
    """Whether the records are marked as synthetic."""
    clock: str
    """device or host: the clock that timed the steps."""
    window_ns: int
    """Length of the window, at most the one asked for."""
    device_ns: dict[str, int]
    """Device wall time over the window by use (prefill, decode, padding, idle); uses without a
    source are absent."""
    device_total_ns: dict[str, int]
    """Device wall time since the fold began, by use."""
    wall_total_ns: int
    """Device wall time since the fold began."""
    ttft: Quantiles
    """Time to first token."""
    tbt: Quantiles
    """Gap between tokens."""
    e2e: Quantiles
    """Time to the last token."""
    queue: Quantiles
    """Queue time."""
    step: Quantiles
    """Step duration."""
    host_gap: Quantiles
    """Gap between steps in which the device idled for the host."""
    ledger_ns: dict[str, int]
    """Time of all requests finished in the window, by cause."""
    prefill_tok_s: float | None
    """Prompt tokens over wall time."""
    decode_tok_s: float | None
    """Output tokens over wall time."""
    prefill_busy_tok_s: float | None
    """Prompt tokens over attributed prefill time."""
    decode_busy_tok_s: float | None
    """Output tokens over attributed decode time."""
    num_running: int
    """Requests in the batch."""
    num_waiting: int
    """Requests in the queue or on their way to it."""
    num_held: int
    """Preempted requests."""
    num_finished: int
    """Requests finished since the fold began."""
    finished_s: float | None
    """Finished requests per second."""
    num_preemptions: int
    """Preemptions since the fold began."""
    blocks_used: int
    """KV blocks in use."""
    blocks_cached: int
    """KV blocks kept for the prefix cache."""
    blocks_total: int
    """KV blocks of the engine."""
    block_tokens: int
    """Tokens that fit in a block."""
    max_running: int
    """Limit on requests in a batch; 0 where it is not known."""
    token_budget: int
    """Limit on tokens in a step; 0 where it is not known."""
    cached_share: float | None
    """Share of the window's prompt tokens that came from the prefix cache."""
    mixed_share: float | None
    """Share of the window's steps that held both phases."""
    binding: str
    """Constraint of the scheduler in the last step: none, slots, blocks or budget."""
    model_residual: float | None
    """Median of measured over modelled time of the last 256 warm steps, less one."""
    model_source: str
    """Source of the cost model with the most steps."""
    series: Series
    """Rates by second."""
    requests: tuple[RequestRow, ...]
    """Requests: alive ones first, then those that finished within `listed_ns`, newest first."""
    num_requests: int
    """Requests alive; `requests` may hold fewer."""
    health: Health
    """State of the probe and of the fold."""
    num_ranks_seen: int = 1
    """Ranks whose steps are observed; the others' time is missing."""
    num_ranks: int = 1
    """Ranks of the engine."""
    num_partial: int = 0
    """Steps divided without the record of a rank that is observed otherwise."""
    num_replaced: int = 0
    """Processes that were lost and started again, not stopped; only cores, where the engine has
    one."""
    deployment: Deployment = Deployment()
    """Configuration of the engine."""
    devices: tuple[DeviceTime, ...] = ()
    """Wall time of each device since the fold began, or since it is counted."""
    through_ns: int = 0
    """Time up to which that wall time is complete."""
    folded_ns: int = 0
    """Time up to which the records are folded."""
    cost_models: tuple[CostModel, ...] = ()
    """Cost models by execution mode, those with the most steps first."""
    counters: CountersView = CountersView()
    """Counters of the devices."""
    is_counted: bool = True
    """Whether FLOPs and bytes are known from the model's shape; if not, steps have time only."""
    objectives: tuple[ObjectiveCount, ...] = ()
    """Good and bad requests by objective, since a collector counts them; empty elsewhere."""
    has_scheduler: bool = True
    """Whether the scheduler is on this host; if not, queues and requests are not known."""
    queued_prompt_tokens: int | None = 0
    """Prompt tokens of waiting and preempted requests; None where the length of one is not
    known."""

    prefill_flops_s: float | None = None
    """Model FLOPs of prefill over prefill's device time; None where they are not known."""
    ranks: tuple[RankView, ...] = ()
    """Ranks of stages with several observed ranks."""
    is_paused: bool = False
    """Whether the engine is paused: requests wait, and no step is due."""
    cache: CacheView | None = None
    """Use of the prefix cache; None if the engine does not report it."""
    num_admissions: int | None = None
    """Admissions since the fold began, repeated ones included; None where no core is observed."""
    num_admissible: int | None = None
    """Queued requests that the engine could admit and does not; None where that is not known."""
    ledger_missing: str = ""
    """Reason why its requests have no ledger; empty where they have one."""
    findings: tuple[RunFinding, ...] = ()
    """Findings on the run so far, costliest first; empty if the reader does not evaluate any."""
    listed_ns: int = 0
    """Time for which `requests` keeps finished requests: the window, or longer."""
    num_finished_since: int = 0
    """Requests that finished within `listed_ns`; `requests` may hold fewer."""
    steps: tuple[StepView, ...] = ()
    """Recent steps, oldest first; only for a reader that asks for them."""
    kinds: dict[str, tuple[KindSums, ...]] = field(default_factory=dict)
    """Sums of the steps of each kind by second of the window, likewise; the last is the current
    second."""
    weight_bytes: int | None = None
    """Bytes of the model's weights on all ranks; None if its work is not counted."""
    experts: ExpertsView | None = None
    """Load of the experts; None for a dense model, or where no engine reports it."""
    levels: ServiceLevels | None = None
    """Objectives of the reader; None if it judges none."""

    @property
    def has_ended(self) -> bool:
        """Return whether the engine shut down, or was stopped by its front end."""
        return self.health.probe_state == "closed"


@dataclass(frozen=True)
class BudgetView:
    """Error budget of one objective for one model on this host, over its window up to now."""

    model: str
    """Served name of the model."""
    objective: Objective
    """Objective of the budget."""
    num_good: int
    """Good requests in the window."""
    num_bad: int
    """Bad requests in the window."""
    remaining: float
    """Remaining part of the budget: 1 is all of it, below 0 it is overspent."""


@dataclass(frozen=True)
class SloState:
    """Error budgets of a collector."""

    budgets: tuple[BudgetView, ...]
    """Budgets by objective and model."""
    uncounted_ns: int
    """Time before this collector's start in which no collector counted requests."""


@dataclass(frozen=True)
class CollectorInfo:
    """State of a collector."""

    version: str
    """Version of InferScope."""
    config_hash: str
    """Hash of its configuration: file, objectives and environment."""
    num_reloads: int = 0
    """Reloads of the configuration that took effect."""
    num_reloads_refused: int = 0
    """Reloads refused because the configuration was not valid."""
    shard: str = "1/1"
    """Part of the host's engines that it follows."""
    num_refused: Mapping[str, int] = field(default_factory=dict)
    """Rings left out, by reason."""


@dataclass(frozen=True)
class Snapshot:
    """State that a reader displays, at one time."""

    mono_ns: int
    real_ns: int
    """Wall time by the recorded clocks; 0 if none was recorded."""
    mode: str
    """live, paused, replay or ended."""
    engines: tuple[EngineView, ...]
    digest: str
    source: str = ""
    """Name of the source, for the header."""
    notes: tuple[str, ...] = field(default=())
    """Warnings about the source: damage, lost records, a newer format."""
    promised: SloState | None = None
    """Error budgets; None if the reader has no objectives."""
    dropped: dict[str, dict[str, int]] = field(default_factory=dict)
    """Number of records that a collector's exporters dropped, by exporter and reason."""
    running: CollectorInfo | None = None
    """State of the collector; None for other readers."""
    guests: Mapping[str, int] = field(default_factory=dict)
    """User IDs of the owners of other users' engines, by engine ID."""


class SnapshotDocument(Document, frozen=True, kw_only=True):
    """Snapshot of one or several engines (`attach`, `demo`, and the screen's saved snapshots)."""

    mono_ns: int
    """Time of the snapshot on the monotonic clock of the records."""
    real_ns: int
    """Time of the snapshot since the Unix epoch, by the recorded clocks; 0 where none was seen."""
    mode: str
    """live, paused, replay or ended."""
    engines: tuple[EngineView, ...]
    """Engines of the source."""
    digest: str
    """Digest of the fold: equal records give equal digests."""
    source: str
    """Name of the source."""
    notes: tuple[str, ...]
    """Warnings about the source: damage, lost records, a newer format."""
    promised: SloState | None
    """Error budgets; null outside of a collector with objectives."""
    dropped: dict[str, dict[str, int]]
    """Records that a collector's exporters dropped, by exporter and reason."""
    running: CollectorInfo | None
    """State of the collector; null elsewhere."""
    guests: dict[str, int]
    """User ids of the owners of other users' engines, by engine id."""


def json_of(snapshot: Snapshot) -> str:
    """Return a snapshot as the line that `--json` prints."""
    values = {field.name: getattr(snapshot, field.name) for field in fields(snapshot)}
    return json_line(SnapshotDocument(**values))
