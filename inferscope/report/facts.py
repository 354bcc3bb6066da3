"""What is known of one request's life beyond its ledger: who was there, and what was scarce."""

from __future__ import annotations

from dataclasses import dataclass, field

from inferscope.attribution.breach import Breach, Objective
from inferscope.attribution.culprits import Culprit
from inferscope.attribution.parts import PromptPart
from inferscope.attribution.spent import Metric
from inferscope.collector.snapshot import RequestRow


@dataclass(frozen=True)
class Companion:
    """Another request, and how much of this one's life it was there for."""

    name: str
    num_steps: int
    overlap_ns: int
    """Of the steps that both were concerned with."""
    num_tokens: int
    """Computed in them."""
    compute_ns: int
    """Attributed to it there."""


@dataclass(frozen=True)
class Waiting:
    """The time from the queue's end to admission."""

    since_ns: int
    until_ns: int
    num_running: float
    """Mean over the scheduler's plans meanwhile; 0 where none was made."""
    num_waiting: float
    bindings: dict[str, float]
    """Share of those plans by what bound them."""
    prefill_ns: int
    """Of the steps meanwhile, attributed to prefill; likewise decode."""
    decode_ns: int
    behind: tuple[Companion, ...]


@dataclass(frozen=True)
class Computing:
    """The steps in which one phase of this request was computed.

    `same` computed the same phase beside it, `other` the other one.
    """

    num_steps: int = 0
    num_tokens: int = 0
    num_recomputed: int = 0
    num_mixed: int = 0
    """Steps in which requests of the other phase were, too."""
    mean_same: float = 0.0
    """Requests of the same phase in a step, itself included."""
    most_same: int = 0
    mean_other: float = 0.0
    """Requests of the other phase, over the mixed steps."""
    same: tuple[Companion, ...] = ()
    other: tuple[Companion, ...] = ()


@dataclass(frozen=True)
class Preemption:
    """One eviction."""

    into_life_ns: int
    held_ns: int | None
    """None while it is not resumed."""
    reason: str
    kv_share: float | None


@dataclass(frozen=True)
class OddStep:
    """A step that stands out."""

    step: int
    into_life_ns: int
    duration_ns: int
    ratio: float
    """Measured over modelled time."""
    healthy_ns: int
    """What it would have taken at the ratio of healthy steps; 0 where that is not asked."""


@dataclass(frozen=True)
class LongestGap:
    """The longest wait between two tokens."""

    gap_ns: int
    before_token: int
    into_life_ns: int
    prefills: tuple[Companion, ...]
    """Requests whose prompts were computed meanwhile."""
    was_preempted: bool


@dataclass(frozen=True)
class Facts:
    """One request, its steps and its companions."""

    row: RequestRow
    engine_id: str
    model: str
    arrived_real_ns: int
    is_over: bool
    arrived_at: str
    """http or engine: the edge where its time begins; likewise where it ends."""
    delivered_at: str
    clock: str
    fit_ids: tuple[str, ...]
    residual: float | None
    """Residual of its own steps that were not cold; see `cost.verdict`."""
    num_lost: int
    """Records of its engine that were lost."""
    waiting: Waiting | None = None
    prefill: Computing = field(default_factory=Computing)
    decode: Computing = field(default_factory=Computing)
    preemptions: tuple[Preemption, ...] = ()
    num_left_out: int = 0
    """Steps that others had while it was admitted and in none."""
    cold: tuple[OddStep, ...] = ()
    slowest: OddStep | None = None
    """The one that took longest beyond a healthy one."""
    num_slow: int = 0
    """Steps that took longer than healthy ones of their make-up."""
    longest_gap: LongestGap | None = None
    parts: tuple[PromptPart, ...] = ()
    """Of its prompt, where client or server said whose tokens are whose."""
    blame: tuple[Culprit, ...] = ()
    """Whom it waited for, by cause; the names are the clients'."""
    objectives: tuple[Objective, ...] = ()
    """That were asked about; which were met, and why not, is judged at its end."""
    met: tuple[Metric, ...] = ()
    breaches: tuple[Breach, ...] = ()
    num_modelled: int = 0
    """Steps that `residual` is of."""
    saved_ns: int | None = None
    """What its cached prompt tokens would have taken, by the cost model; None where unknown."""
    is_synthetic: bool = False
    """The records say that they are made up."""
    is_counted: bool = True
    """Its FLOPs and bytes follow from the model's shape."""
