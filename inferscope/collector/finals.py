"""What the fold has decided and will not revise: final steps, final requests.

Sinks (exporters) receive these, once each, in the order of the fold.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from operator import sub
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from inferscope.attribution.counterfactual import Delay
from inferscope.attribution.culprits import BlameShare
from inferscope.attribution.parts import PromptPart
from inferscope.attribution.rules import Components
from inferscope.clock_skew import SkewedClock
from inferscope.collector.counted import NOT_COUNTED, RequestCounters
from inferscope.slo.verdicts import Judged

Ints = NDArray[np.int64]


CORE_NOT_OBSERVED = "core not observed"
"""Why a request has no ledger: no core reported it, and there is none that would have."""
NOT_SEEN_BY_CORE = "not seen by the core"
"""Why a request has no ledger: it was sent to a core that is observed and never reported it."""
SEVERAL_CORES = "several cores under one engine id"
"""Why a request has no ledger: two processes numbered their steps alike while it was in flight."""
WORKER_NOT_OBSERVED = "worker not observed"
"""Why a request has no ledger: no process reports when its engine computed."""

MOST_TRANSFERS = 64
"""Kept of one request; all are in its ledger."""


class Unnamed(msgspec.Struct, frozen=True, gc=False):
    """What a rank computed for requests that only another host can name."""

    prefill_tokens: int
    prefill_ns: int
    decode_tokens: int
    decode_ns: int


class FinalStep(msgspec.Struct, frozen=True, gc=False):
    """One step on one rank, split. Arrays have one entry per row (a phase of a request)."""

    engine_id: str
    dp_rank: int
    rank: int
    step: int
    start_ns: int
    end_ns: int
    measured_ns: int
    clock: str
    """device or host."""
    mode: str
    is_cold: bool
    fit_id: str
    request_ids: tuple[str, ...]
    phases: NDArray[np.uint8]
    tokens: Ints
    contexts: Ints
    flags: NDArray[np.uint8]
    shares_ns: Ints
    padding_ns: int
    unattributed_ns: int
    model_residual: float
    """Measured over modelled time, less one."""
    is_dummy: bool = False
    """It kept a data-parallel rank in step with the others, and computed nothing for anybody."""
    components: Components | None = None
    """What it was split with, for other rules than `fair`; None where it was of no request."""
    delay: Delay | None = None
    """What its requests waited for, over all ranks; None where it was of no request."""
    unnamed: Unnamed | None = None
    """Of a rank whose core is on another host: its phases, in place of requests."""
    is_provisional: bool = False
    """It was split by a model that fewer than `ENOUGH_STEPS` steps had corrected."""
    bounded_ns: int = 0
    """Part of the delay that measured steps took off what the model says of one request alone."""

    @property
    def busy_ns(self) -> int:
        """Return what the shares sum to, or the phases where requests are not known."""
        return self.measured_ns - self.padding_ns - self.unattributed_ns


class PhaseWork(msgspec.Struct, frozen=True, gc=False):
    """What one phase of a request computed and moved, beside its time and its FLOPs."""

    tokens: int = 0
    hbm_read_bytes: int | None = None
    """Modelled; None where the model's shape is not counted."""
    hbm_write_bytes: int | None = None


class Part(msgspec.Struct, frozen=True, gc=False):
    """A part of a phase's tokens, and of its time."""

    tokens: int = 0
    ns: int = 0


class Saved(msgspec.Struct, frozen=True, gc=False):
    """What a request's cached prompt tokens would have cost; modelled, None where unknown."""

    flops: int | None = None
    ns: int | None = None
    fit_id: str = ""


class KvTransfer(msgspec.Struct, frozen=True, gc=False):
    """KV blocks that came from another worker. Times are host nanoseconds."""

    start_ns: int
    end_ns: int
    num_bytes: int
    peer: str
    """The other worker: its engine's id where that is known, else its address."""
    peer_request_id: str = ""
    """What that engine calls the request; then `peer` is its engine's id."""


class FinalRequest(msgspec.Struct, frozen=True, gc=False):
    """One request, explained. Times are host nanoseconds."""

    engine_id: str
    request_id: str
    external_id: str | None
    trace: str
    attributes: dict[str, str]
    prompt_tokens: int | None
    cached_tokens: int
    output_tokens: int
    arrived_ns: int
    queued_ns: int | None
    admitted_ns: int | None
    first_token_ns: int | None
    last_token_ns: int | None
    delivered_ns: int
    arrived_at: str
    """http or engine: the edge where the time was taken."""
    delivered_at: str
    finish: str
    joined_late: bool
    num_preemptions: int
    ledger_ns: dict[str, int]
    ttft_ledger_ns: dict[str, int]
    token_times_ns: array[int]
    tokens_per_event: tuple[int, ...]
    prefill_ns: int
    decode_ns: int
    prefill_flops: int | None
    decode_flops: int | None
    is_alone: bool
    """It shared no step: its compute is measured, not apportioned."""
    fit_id: str
    clock: str
    preempted_ns: tuple[tuple[int, int], ...] = ()
    """From when until when it was out of the running batch; as many as `num_preemptions`."""
    parts: tuple[PromptPart, ...] = ()
    """Of its prompt, where client or server said whose tokens are whose."""
    reasoning_tokens: int | None = None
    """Of its output; None where the engine does not tell."""
    blame: tuple[BlameShare, ...] = ()
    """Of the causes that lie with other requests, with whom; each cause's sum to its row. Empty
    where the fold has no sink that could take it."""
    prefill_work: PhaseWork = PhaseWork()
    decode_work: PhaseWork = PhaseWork()
    recomputed: Part = Part()
    """Of prefill: computed before, and lost to a preemption."""
    rejected: Part = Part()
    """Of decode: drafts that the model did not take, by tokens of their slices."""
    drafted: Part = Part()
    """Of decode's time, the drafting. Its FLOPs and bytes are another model's, and unknown."""
    saved: Saved = Saved()
    """By the prefix cache."""
    counters: RequestCounters = NOT_COUNTED
    """What samples of its devices say."""
    judged: Judged | None = None
    """By a reader's objectives; None where it has none."""
    transfers: tuple[KvTransfer, ...] = ()
    """Of its KV blocks from another worker; the first MOST_TRANSFERS."""
    ledger_missing: str = ""
    """Why the request has no ledger; then both ledgers, what it computed and its blame are unknown,
    whatever the fields hold. Empty where it has one."""
    is_partial: bool = False
    """It was in a step of which no rank reported the execution: its ledger books that time as
    `cpu_gap`, and nothing is known of what it computed."""
    adapter: str = ""
    """LoRA, as the engine says, else an allowed header; empty for the base model."""

    @property
    def is_in_one_piece(self) -> bool:
        """Tell whether its answer is known to have gone out whole: all tokens came with the body.

        Its first token is then its last, and says nothing of how long anybody waits for one.
        """
        return self.attributes.get("stream", "").lower() == "false"

    @property
    def tbt_ns(self) -> list[int]:
        """Gaps between emission events."""
        times = self.token_times_ns
        return list(map(sub, times[1:], times))

    @property
    def num_gaps(self) -> int:
        """Return how many of them there are."""
        return max(0, len(self.token_times_ns) - 1)

    @property
    def longest_gap_ns(self) -> int:
        """Return the longest of them, 0 where there are none."""
        if len(self.token_times_ns) < 2:
            return 0
        times_ns = np.frombuffer(self.token_times_ns, dtype=np.int64)
        return int((times_ns[1:] - times_ns[:-1]).max())


@dataclass(frozen=True)
class DeviceHealth:
    """Limits that a device's driver reported since the fold began; unknown is None."""

    throttle_ns: dict[str, int] | None = None
    """Time for which its clocks were held down, by reason. A sample counts for all reasons present
    at its end; `idle` is not one of them."""
    told_ns: int = 0
    """Part of the time that the driver reported on."""
    xids: dict[str, int] | None = None
    """Errors of the device by Xid, in the order of their first occurrence."""
    throttled_now: tuple[str, ...] = ()
    """Reasons present in the newest sample."""


@dataclass(frozen=True)
class DeviceTime:
    """Wall time of one device since the fold began."""

    engine_id: str
    """Name of the engine."""
    device: str
    """Id of the device."""
    wall_ns: int
    """Wall time."""
    seconds_by_ns: dict[str, int]
    """Wall time by use; the uses sum to it."""
    health: DeviceHealth | None = None
    """Limits that its driver reported; None without a sampler."""


@dataclass(frozen=True)
class RunTotals:
    """What the fold knows of itself at its end."""

    num_records: int
    num_lost: int
    num_late: int
    num_unjoined: int
    probe_cost_ns: int
    digest: str
    skewed_clocks: tuple[SkewedClock, ...] = ()


class Sink(Protocol):
    """Receives what is final."""

    def step(self, step: FinalStep) -> None:
        """Take a step."""

    def request(self, request: FinalRequest) -> None:
        """Take a request."""
