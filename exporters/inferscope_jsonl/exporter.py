"""JSON Lines exporter: the reference form of final steps and requests.

Lines are of four kinds: `step`, `request`, `device`, `run`. In every step the shares, the padding
and the unattributed time sum to `measured_ns`. In every request the ledger sums to `delivered_ns -
arrived_ns`, the TTFT ledger to `first_token_ns - arrived_ns`, and the blame by cause to the
ledger's rows. A request without a ledger has null in both places, and the reason under
`ledger_missing`. Unknown is null. Each number's origin is under `provenance`.
"""

from __future__ import annotations

from typing import IO, Any

import msgspec
from msgspec import structs

from inferscope.clock_skew import SkewedClock
from inferscope.cost import TIME_ONLY
from inferscope.fold import (
    DeviceHealth,
    DeviceTime,
    FinalRequest,
    FinalStep,
    KvTransfer,
    PhaseWork,
    Provenance,
    RequestName,
    RunTotals,
)
from inferscope.records import PHASES, RECOMPUTED, Record, RingOpened


class JsonlExporter:
    """Exporter that writes one JSON object a line."""

    def __init__(self, out: IO[bytes]) -> None:
        """Keep the file to write to."""
        self._out = out
        self._encode = msgspec.json.Encoder().encode
        self._origins: dict[str, bool] = {}
        """Engines and samplers whose records are marked as synthetic."""

    def on_record(self, ring: int, record: Record) -> None:
        """Record which rings are marked as synthetic."""
        if isinstance(record, RingOpened):
            engine_id = record.engine_id
            self._origins[engine_id] = self._origins.get(engine_id, False) or record.synthetic

    def on_step(self, step: FinalStep) -> None:
        """Write a step."""
        self._write(step_row(step) | self._origin(step.engine_id))

    def on_request(self, request: FinalRequest) -> None:
        """Write a request."""
        self._write(request_row(request) | self._origin(request.engine_id))

    def close(self, devices: list[DeviceTime], totals: RunTotals) -> None:
        """Write the devices and the run."""
        for device in devices:
            self._write(device_row(device) | self._origin(device.engine_id))
        self._write(
            {
                "kind": "run",
                "records": totals.num_records,
                "lost": totals.num_lost,
                "late": totals.num_late,
                "unjoined": totals.num_unjoined,
                "probe_cost_ns": totals.probe_cost_ns,
                "digest": totals.digest,
                "skewed_clocks": [_skewed_clock(one) for one in totals.skewed_clocks],
                "synthetic": any(self._origins.values()) if self._origins else None,
            }
        )

    def _origin(self, engine_id: str) -> dict[str, bool | None]:
        return {"synthetic": self._origins.get(engine_id)}

    def _write(self, row: dict[str, Any]) -> None:
        self._out.write(self._encode(row))
        self._out.write(b"\n")


def _skewed_clock(skewed: SkewedClock) -> dict[str, Any]:
    return {
        "engine": skewed.engine_id,
        "role": skewed.role,
        "rank": skewed.rank,
        "pid": skewed.pid,
        "skew_ns": skewed.skew_ns,
        "is_corrected": skewed.is_corrected,
    }


def step_row(step: FinalStep) -> dict[str, Any]:
    """Return a step as its JSON object."""
    columns = zip(
        step.request_ids,
        step.phases.tolist(),
        step.tokens.tolist(),
        step.contexts.tolist(),
        step.flags.tolist(),
        step.shares_ns.tolist(),
        strict=True,
    )
    return {
        "kind": "step",
        "engine": step.engine_id,
        "dp_rank": step.dp_rank,
        "rank": step.rank,
        "step": step.step,
        "start_ns": step.start_ns,
        "end_ns": step.end_ns,
        "measured_ns": step.measured_ns,
        "clock": step.clock,
        "mode": step.mode,
        "cold": step.is_cold,
        "fit": step.fit_id,
        "shares": _unnamed_shares(step)
        or [
            {
                "request": request_id,
                "phase": PHASES[phase] if phase < len(PHASES) else str(phase),
                "tokens": tokens,
                "context": context,
                "recomputed": bool(flags & RECOMPUTED),
                "ns": ns,
            }
            for request_id, phase, tokens, context, flags, ns in columns
        ],
        "padding_ns": step.padding_ns,
        "unattributed_ns": step.unattributed_ns,
        "model_residual": round(step.model_residual, 6),
        "provisional": step.is_provisional,
        "bounded_ns": step.bounded_ns,
    }


def _unnamed_shares(step: FinalStep) -> list[dict[str, Any]]:
    """Return a row for each phase of a step whose requests are known on another host."""
    of = step.unnamed
    if of is None:
        return []
    return [
        {
            "request": None,
            "phase": phase,
            "tokens": tokens,
            "context": None,
            "recomputed": None,
            "ns": ns,
        }
        for phase, tokens, ns in (
            ("prefill", of.prefill_tokens, of.prefill_ns),
            ("decode", of.decode_tokens, of.decode_ns),
        )
        if tokens
    ]


def device_row(device: DeviceTime) -> dict[str, Any]:
    """Return a device as its JSON object."""
    health = device.health or DeviceHealth()
    return {
        "kind": "device",
        "engine": device.engine_id,
        "device": device.device,
        "wall_ns": device.wall_ns,
        "seconds_by": {name: spent_ns / 1e9 for name, spent_ns in device.seconds_by_ns.items()},
        "ns_by": device.seconds_by_ns,
        "throttle_ns": health.throttle_ns,
        "throttle_told_ns": health.told_ns if health.throttle_ns is not None else None,
        "xids": health.xids,
    }


def request_row(request: FinalRequest) -> dict[str, Any]:
    """Return a request as its JSON object."""
    return request_facts(request) | {"provenance": request_provenance(request)}


def request_facts(request: FinalRequest) -> dict[str, Any]:
    """Return a request's object without provenance."""
    return {
        "kind": "request",
        "engine": request.engine_id,
        "request": request.request_id,
        "external_id": request.external_id,
        "adapter": request.adapter or None,
        "prompt_tokens": request.prompt_tokens,
        "cached_tokens": None if request.ledger_missing else request.cached_tokens,
        "output_tokens": request.output_tokens,
        "arrived_ns": request.arrived_ns,
        "first_token_ns": request.first_token_ns,
        "last_token_ns": request.last_token_ns,
        "delivered_ns": request.delivered_ns,
        "arrived_at": request.arrived_at,
        "delivered_at": request.delivered_at,
        "finish": request.finish,
        "joined_late": request.joined_late,
        "partial": request.is_partial,
        "preemptions": request.num_preemptions,
        "transfers": [transfer_facts(each) for each in request.transfers] or None,
        "ledger_ns": None if request.ledger_missing else request.ledger_ns,
        "ttft_ledger_ns": None if request.ledger_missing else request.ttft_ledger_ns,
        "ledger_missing": request.ledger_missing or None,
        "prompt_parts": [structs.asdict(part) for part in request.parts] or None,
        "blame": [
            {"cause": cause, "request": request_id, "ns": ns}
            for cause, request_id, ns in request.blame
        ],
        "tbt_ns": request.tbt_ns,
        "tokens_per_event": list(request.tokens_per_event),
        "conversation": request.conversation or None,
        "cache": cache_facts(request),
        **_computed(request),
    }


def _computed(request: FinalRequest) -> dict[str, Any]:
    """Return the computation of a request; all fields are null without a ledger."""
    computed: dict[str, Any] = {
        "compute_ns": {"prefill": request.prefill_ns, "decode": request.decode_ns},
        "by_phase": {
            "prefill": {
                **_resources(request.prefill_flops, request.prefill_work, request.counters.prefill),
                "recomputed_tokens": request.recomputed.tokens,
                "recomputed_ns": request.recomputed.ns,
            },
            "decode": {
                **_resources(request.decode_flops, request.decode_work, request.counters.decode),
                "rejected_tokens": request.rejected.tokens,
                "rejected_ns": request.rejected.ns,
                "draft_tokens": request.drafted.tokens,
                "draft_ns": request.drafted.ns,
            },
        },
        "saved_by_cache": {
            "tokens": request.cached_tokens,
            "flops": request.saved.flops,
            "ns": request.saved.ns,
        },
    }
    return _all_unknown(computed) if request.ledger_missing else computed


def _all_unknown(facts: dict[str, Any]) -> dict[str, Any]:
    return {
        name: _all_unknown(fact) if isinstance(fact, dict) else None for name, fact in facts.items()
    }


def request_provenance(request: FinalRequest) -> dict[str, Any]:
    """Return the provenance of a request's fields, mostly shared by many requests."""
    clock = "device events" if request.clock == "device" else "host clock"
    compute = {
        "method": "measured" if request.is_alone else "apportioned",
        "source": clock if request.is_alone else f"{clock}, fair split",
        "fit": request.fit_id,
        "error": None,
    }

    by_tokens = compute | {"method": "apportioned", "source": "share, by tokens"}

    def counted(source: str) -> dict[str, Any]:
        is_counted = request.prefill_flops is not None
        method, source = ("modelled", source) if is_counted else (None, TIME_ONLY)
        return {"method": method, "source": source, "fit": "", "error": None}

    times = {"method": "measured", "source": "probe clock", "fit": "", "error": None}
    ledger = {
        "method": "apportioned",
        "source": f"{clock}, counterfactuals within steps",
        "fit": request.fit_id,
        "error": None,
    }
    parts = {
        "method": "modelled",
        "source": "compute_ns and prefill_own, by the modelled cost of each position",
        "fit": request.fit_id,
        "error": None,
    }
    cache = {
        "method": "modelled",
        "source": "records of the cache; prices as prompt_parts, by class of position",
        "fit": request.fit_id,
        "error": None,
    }
    blame = ledger | {"source": "the scheduler's constraints, and counterfactuals within steps"}
    return {
        "compute_ns": compute,
        "flops": counted("shape"),
        "hbm_bytes": counted("shape: weights once per step, own KV, activations"),
        **_provenance(request.counters.provenance),
        "recomputed_ns": compute,
        "rejected_ns": by_tokens,
        "draft_ns": by_tokens,
        "saved_by_cache": {
            "method": None if request.saved.ns is None else "modelled",
            "source": "cost model, alone in one step; FLOPs by shape",
            "fit": request.saved.fit_id,
            "error": None,
        },
        "ledger_ns": ledger,
        "ttft_ledger_ns": ledger,
        "prompt_parts": parts,
        "cache": cache,
        "blame": blame,
        "tbt_ns": times,
    }


def transfer_facts(transfer: KvTransfer) -> dict[str, Any]:
    """Return KV blocks sent by another worker, as far as they are recorded."""
    return {
        "start_ns": transfer.start_ns,
        "end_ns": transfer.end_ns,
        "bytes": transfer.num_bytes,
        "peer": transfer.peer or None,
        "peer_request": transfer.peer_request_id or None,
    }


def cache_facts(request: FinalRequest) -> dict[str, Any] | None:
    """Return what the prefix cache did for a prompt; prices are null without a ledger."""
    use = request.cache
    if use is None:
        return None
    is_priced = not request.ledger_missing
    difference = use.difference
    return {
        "tokens": use.tokens,
        "gpu_ns": use.gpu_ns if is_priced else None,
        "ttft_ns": use.ttft_ns if is_priced else None,
        "recomputed_ns": use.recomputed_ns if is_priced else None,
        "queue_evicted_ns": use.queue_evicted_ns,
        "evictor": _named(use.evictor),
        "evictors": [_named(each) for each in use.evictors] or None,
        "num_evictors": use.num_evictors,
        "evicted_ns": use.evicted_ns,
        "inferred": use.is_inferred,
        "twin": _named(use.twin),
        "off_reason": use.off_reason or None,
        "block_tokens": use.block_tokens or None,
        "below_block_tokens": use.below_block_tokens,
        "difference": None
        if difference is None
        else {
            "earlier": _named(difference.earlier),
            "diverged_at": difference.diverged_at,
            "equal_again_at": difference.equal_again_at,
            "shift": difference.shift,
            "spans": [{"start": start, "end": end} for start, end in difference.spans],
            "differs": list(difference.differs),
            "part": difference.part or None,
        },
        "parts": [
            {
                "part": each.part,
                "cache": each.name,
                "tokens": each.tokens,
                "gpu_ns": each.gpu_ns if is_priced else None,
                "ttft_ns": each.ttft_ns if is_priced else None,
            }
            for each in use.segments
            if each.part
        ]
        or None,
    }


def _named(name: RequestName | None) -> dict[str, str | None] | None:
    """Return the names of another request."""
    if name is None:
        return None
    return {
        "request": name.request_id,
        "external_id": name.external_id,
        "tenant": name.tenant or None,
    }


def _resources(
    flops: int | None, work: PhaseWork, counters: dict[str, int]
) -> dict[str, int | None]:
    """Return the resources of a phase; bytes are sampled if available, else modelled."""
    return {
        "tokens": work.tokens,
        "flops": flops,
        "hbm_read_bytes": work.hbm_read_bytes,
        "hbm_write_bytes": work.hbm_write_bytes,
        "sm_active_ns": None,
        "gpu_busy_ns": None,
        "energy_uj": None,
    } | counters


def _provenance(counters: dict[str, Provenance]) -> dict[str, Any]:
    """Return the provenance of sampled counters; bytes read count for both directions."""
    provenance = {
        name: {"method": each.method, "source": each.source, "fit": "", "error": each.error}
        for name, each in counters.items()
    }
    return provenance | (
        {"hbm_bytes": provenance["hbm_read_bytes"]} if "hbm_read_bytes" in provenance else {}
    )
