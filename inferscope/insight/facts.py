"""Facts about one request beyond its ledger: other requests in its steps, and scarce resources."""

from __future__ import annotations

from dataclasses import dataclass, field

from inferscope.attribution import BlameShare, Breach, LatencyLimit, Metric, PromptPart
from inferscope.fold import CacheUse, RequestRow


@dataclass(frozen=True)
class Overlap:
    """Another request that shared steps with this one."""

    name: str
    """Name of the request: the client's, else the engine's."""
    num_steps: int
    """Steps that concerned both."""
    overlap_ns: int
    """Time of those steps."""
    num_tokens: int
    """Tokens computed for it in them."""
    compute_ns: int
    """Compute time attributed to it in them."""


@dataclass(frozen=True)
class Waiting:
    """Time in the queue."""

    since_ns: int
    """Start of the wait, on the monotonic clock."""
    until_ns: int
    """Admission, on the monotonic clock."""
    num_running: float
    """Mean number of running requests over the scheduler's plans meanwhile; 0 without a plan."""
    num_waiting: float
    """Mean number of waiting requests over those plans."""
    bindings: dict[str, float]
    """Share of those plans by their constraint."""
    prefill_ns: int
    """Prefill's part of the steps meanwhile."""
    decode_ns: int
    """Decode's part of the steps meanwhile."""
    behind: tuple[Overlap, ...]
    """Requests that were computed meanwhile."""


@dataclass(frozen=True)
class Computing:
    """Steps in which one phase of this request was computed.

    `same` holds the requests of the same phase in these steps, `other` those of the other phase.
    """

    num_steps: int = 0
    """Steps in which the phase was computed."""
    num_tokens: int = 0
    """Tokens computed in them."""
    num_recomputed: int = 0
    """Tokens computed again after preemptions."""
    num_mixed: int = 0
    """Steps that also held requests of the other phase."""
    mean_same: float = 0.0
    """Mean number of requests of the same phase in a step, itself included."""
    most_same: int = 0
    """Maximum number of requests of the same phase in a step."""
    mean_other: float = 0.0
    """Mean number of requests of the other phase over the mixed steps."""
    same: tuple[Overlap, ...] = ()
    """Requests of the same phase."""
    other: tuple[Overlap, ...] = ()
    """Requests of the other phase."""


@dataclass(frozen=True)
class Preemption:
    """One eviction."""

    into_life_ns: int
    """Time from arrival to the eviction."""
    held_ns: int | None
    """Time to the next admission; None before it."""
    reason: str
    """Reason of the eviction."""
    kv_share: float | None
    """Share of the KV cache in use then."""


@dataclass(frozen=True)
class OddStep:
    """A step that stands out."""

    step: int
    """Number of the step."""
    into_life_ns: int
    """Time from arrival to the step."""
    duration_ns: int
    """Duration of the step."""
    ratio: float
    """Measured over modelled time."""
    healthy_ns: int
    """Duration at the ratio of healthy steps; 0 where it was not computed."""


@dataclass(frozen=True)
class RankSteps:
    """Steps of one rank in which the request was computed."""

    rank: int
    """Rank within the replica."""
    num_steps: int
    """Number of its steps."""
    busy_ns: int
    """Time of those steps, without waits for other ranks where the engine reports these."""


@dataclass(frozen=True)
class LongestGap:
    """Longest gap between two tokens."""

    gap_ns: int
    """Length of the gap."""
    before_token: int
    """Index of the token after the gap."""
    into_life_ns: int
    """Time from arrival to the start of the gap."""
    prefills: tuple[Overlap, ...]
    """Requests whose prompts were computed meanwhile."""
    was_preempted: bool
    """Whether the request was preempted meanwhile."""


@dataclass(frozen=True)
class PrefillLeg:
    """Part of a request that another engine computed, which then sent its KV blocks."""

    engine_id: str
    """Name of the other engine, or its address."""
    num_bytes: int
    """Bytes of the KV blocks."""
    ledger_ns: dict[str, int] = field(default_factory=dict)
    """Where its time went there, by cause; empty where its records are not in the source."""


@dataclass(frozen=True)
class Facts:
    """One request, its steps and the requests that shared them."""

    row: RequestRow
    """The request."""
    engine_id: str
    """Name of the engine."""
    model: str
    """Served name of the model."""
    arrived_real_ns: int
    """Wall time of arrival, since the Unix epoch."""
    is_over: bool
    """Whether the request has ended."""
    arrived_at: str
    """http or engine: the edge at which its time begins."""
    delivered_at: str
    """http or engine: the edge at which its time ends."""
    clock: str
    """device or host: the clock that timed its steps."""
    fit_ids: tuple[str, ...]
    """Cost models that divided its steps."""
    residual: float | None
    """Median of measured over modelled time of its own warm steps, less one."""
    num_lost: int
    """Lost records of its engine."""
    waiting: Waiting | None = None
    """Time in the queue; None where it was not observed."""
    prefill: Computing = field(default_factory=Computing)
    """Steps of its prefill."""
    decode: Computing = field(default_factory=Computing)
    """Steps of its decode."""
    preemptions: tuple[Preemption, ...] = ()
    """Evictions, in their order."""
    num_left_out: int = 0
    """Steps of other requests while it was admitted and in none."""
    cold: tuple[OddStep, ...] = ()
    """Cold steps: the first of their shape."""
    slowest: OddStep | None = None
    """Step that exceeded a healthy one by the most."""
    num_slow: int = 0
    """Steps slower than healthy ones of their layout."""
    longest_gap: LongestGap | None = None
    """Longest gap between two tokens; None with fewer than two."""
    parts: tuple[PromptPart, ...] = ()
    """Parts of its prompt, where client or server labelled them."""
    blame: tuple[BlameShare, ...] = ()
    """Requests that it waited for, by cause, with the client's names."""
    objectives: tuple[LatencyLimit, ...] = ()
    """Latency limits that were given; they are decided at its end."""
    met: tuple[Metric, ...] = ()
    """Metrics within their limits."""
    breaches: tuple[Breach, ...] = ()
    """Limits that it exceeded."""
    num_modelled: int = 0
    """Steps that `residual` covers."""
    saved_ns: int | None = None
    """Modelled compute time of its cached prompt tokens; None where it is not known."""
    rejected_tokens: int = 0
    """Draft tokens that were verified for it and rejected."""
    rejected_ns: int = 0
    """Part of its decode spent on them."""
    is_synthetic: bool = False
    """Whether the records are marked as synthetic."""
    is_counted: bool = True
    """Whether its FLOPs and bytes are known from the model's shape."""
    cache: CacheUse | None = None
    """Its use of the prefix cache; None before its end, or if the core does not report it."""
    prefill_legs: tuple[PrefillLeg, ...] = ()
    """Parts that other engines computed, in the order of their transfers."""
    ranks: tuple[RankSteps, ...] = ()
    """Ranks that computed it, the busiest first; empty with one rank."""
