"""Final steps and final requests, which the fold does not revise.

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

from inferscope.attribution import BlameShare, Components, Delay, PromptPart
from inferscope.clock_skew import SkewedClock
from inferscope.fold.cache_use import CacheUse
from inferscope.fold.join.request_counters import NOT_COUNTED, RequestCounters
from inferscope.slo import Judged

Ints = NDArray[np.int64]


CORE_NOT_OBSERVED = "core not observed"
"""Reason for a missing ledger: no core reported the request, and no core is observed."""
NOT_SEEN_BY_CORE = "not seen by the core"
"""Reason for a missing ledger: the observed core never reported the request."""
SEVERAL_CORES = "several cores under one engine id"
"""Reason for a missing ledger: two processes used the same step numbers while it was in flight."""
WORKER_NOT_OBSERVED = "worker not observed"
"""Reason for a missing ledger: no process reports the engine's step times."""

MOST_TRANSFERS = 64
"""Most transfers kept per request; its ledger contains all."""


class RemoteWork(msgspec.Struct, frozen=True, gc=False):
    """Compute of one rank for requests that only another host knows."""

    prefill_tokens: int
    prefill_ns: int
    decode_tokens: int
    decode_ns: int


class FinalStep(msgspec.Struct, frozen=True, gc=False):
    """Split step on one rank. Arrays have one entry per row (a phase of a request)."""

    engine_id: str
    dp_rank: int
    rank: int
    step: int
    start_ns: int
    end_ns: int
    measured_ns: int
    clock: str
    """Clock of the times: device or host."""
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
    """Measured over modelled time, minus one."""
    is_dummy: bool = False
    """Whether the step only kept a data-parallel rank in step, without any request."""
    components: Components | None = None
    """Inputs of the split, for rules other than `fair`; None without requests."""
    delay: Delay | None = None
    """Causes of its requests' waits, over all ranks; None without requests."""
    unnamed: RemoteWork | None = None
    """Phases in place of requests, for a rank whose core is on another host."""
    is_provisional: bool = False
    """Whether fewer than `ENOUGH_STEPS` steps had corrected the model that split it."""
    bounded_ns: int = 0
    """Part of the delay, in nanoseconds, by which measured steps reduced the modelled time of one
    request alone."""

    @property
    def busy_ns(self) -> int:
        """Return the sum of the shares, or of the phases if requests are unknown."""
        return self.measured_ns - self.padding_ns - self.unattributed_ns


class PhaseWork(msgspec.Struct, frozen=True, gc=False):
    """Tokens and modelled bytes of one phase of a request."""

    tokens: int = 0
    hbm_read_bytes: int | None = None
    """Modelled bytes read; None if the model's work is not counted."""
    hbm_write_bytes: int | None = None


class TokenTime(msgspec.Struct, frozen=True, gc=False):
    """Part of a phase's tokens and time."""

    tokens: int = 0
    ns: int = 0


class CacheSavings(msgspec.Struct, frozen=True, gc=False):
    """Modelled cost of a request's cached prompt tokens, had they been computed; None: unknown."""

    flops: int | None = None
    ns: int | None = None
    fit_id: str = ""


class KvTransfer(msgspec.Struct, frozen=True, gc=False):
    """Transfer of KV blocks from another worker. Times are host nanoseconds."""

    start_ns: int
    """Start on the host's monotonic clock."""
    end_ns: int
    """End, likewise."""
    num_bytes: int
    """Bytes of the KV blocks."""
    peer: str
    """Other worker: its engine ID if known, else its address."""
    peer_request_id: str = ""
    """ID of the request in that engine; `peer` is then its engine ID."""


class FinalRequest(msgspec.Struct, frozen=True, gc=False):
    """Final request with its ledgers. Times are host nanoseconds."""

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
    """Edge at which the arrival was timed: http or engine."""
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
    """Whether it shared no step, so its compute is measured, not apportioned."""
    fit_id: str
    clock: str
    preempted_ns: tuple[tuple[int, int], ...] = ()
    """Start and end of each interval outside the running batch, one per preemption."""
    parts: tuple[PromptPart, ...] = ()
    """Parts of its prompt, if client or server labelled the tokens."""
    reasoning_tokens: int | None = None
    """Reasoning tokens in its output; None if the engine does not report them."""
    blame: tuple[BlameShare, ...] = ()
    """Shares of other requests in its waits; those of a cause sum to its ledger row. Empty if no
    sink of the fold reads them."""
    prefill_work: PhaseWork = PhaseWork()
    decode_work: PhaseWork = PhaseWork()
    recomputed: TokenTime = TokenTime()
    """Part of prefill that repeats compute lost to a preemption."""
    rejected: TokenTime = TokenTime()
    """Part of decode spent on rejected drafts, by tokens of their slices."""
    drafted: TokenTime = TokenTime()
    """Part of decode's time spent on drafting; the draft model's FLOPs and bytes are unknown."""
    saved: CacheSavings = CacheSavings()
    """Cost that the prefix cache saved."""
    counters: RequestCounters = NOT_COUNTED
    """Counter values from samples of its devices."""
    judged: Judged | None = None
    """Verdict by the reader's objectives; None without objectives."""
    transfers: tuple[KvTransfer, ...] = ()
    """First MOST_TRANSFERS transfers of its KV blocks from another worker."""
    ledger_missing: str = ""
    """Reason for a missing ledger, empty if there is one. With a reason, the ledgers, compute and
    blame are unknown, whatever their fields hold."""
    is_partial: bool = False
    """Whether it was in a step whose execution no rank reported: its ledger books that time as
    `cpu_gap`, and its compute in that step is unknown."""
    adapter: str = ""
    """Name of its LoRA adapter, from the engine or an allowed header; empty for the base model."""
    proposed_tokens: int = 0
    """Draft tokens that the target model verified for it, `rejected` ones included."""
    cache: CacheUse | None = None
    """Use of the prefix cache and the price of its misses; None if the core does not report it."""

    @property
    def conversation(self) -> str:
        """Return the ID of its conversation, empty without one."""
        given = self.attributes
        return given.get("conversation") or given.get("gen_ai.conversation.id", "")

    @property
    def is_in_one_piece(self) -> bool:
        """Return whether its response is known not to stream: all tokens came with the body.

        The first token then coincides with the last, so TTFT and TBT have no meaning.
        """
        return self.attributes.get("stream", "").lower() == "false"

    @property
    def ttfot_ns(self) -> int | None:
        """Return the time to the first output token after the reasoning.

        None if the engine does not report reasoning tokens, if no token came after them, or if the
        response does not stream.
        """
        if self.reasoning_tokens is None or self.is_in_one_piece:
            return None
        num_tokens = 0
        for at_ns, num in zip(self.token_times_ns, self.tokens_per_event, strict=False):
            num_tokens += num
            if num_tokens > self.reasoning_tokens:
                return at_ns - self.arrived_ns
        return None

    @property
    def tbt_ns(self) -> list[int]:
        """Return the gaps between emission events, in nanoseconds."""
        times = self.token_times_ns
        return list(map(sub, times[1:], times))

    @property
    def num_gaps(self) -> int:
        """Return the number of gaps between emission events."""
        return max(0, len(self.token_times_ns) - 1)

    @property
    def longest_gap_ns(self) -> int:
        """Return the longest gap between emission events, 0 without gaps."""
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
    """Record counts, cost and digest of a fold."""

    num_records: int
    num_lost: int
    num_late: int
    num_unjoined: int
    probe_cost_ns: int
    digest: str
    skewed_clocks: tuple[SkewedClock, ...] = ()


class Sink(Protocol):
    """Receiver of final steps and requests."""

    def on_step(self, step: FinalStep) -> None:
        """Receive a final step."""

    def on_request(self, request: FinalRequest) -> None:
        """Receive a final request."""
