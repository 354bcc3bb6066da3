"""Steps, requests and counters as a Chrome JSON trace for Perfetto's UI.

There is a process for each engine's steps, with a track for each rank and counters of its
scheduler; one for its requests, a track each; and one for each sampled device, with its counters. A
step is drawn as its prefill, decode, padding and unattributed parts, as long as their shares (the
device ran them at once; the order is ours). A request shows its phases, its preemptions, and the KV
blocks that another worker sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO

from inferscope.fold import (
    DeviceTime,
    FinalRequest,
    FinalStep,
    KvTransfer,
    RunTotals,
)
from inferscope.records import (
    AMOUNTS,
    PREFILL,
    CounterSample,
    EngineInfo,
    Missed,
    Record,
    RingOpened,
    StepPlan,
    Tick,
)
from inferscope_perfetto.events import TraceFile

_GROUPS = {
    "busy": ("busy_share", "sm_active_share", "tensor_share", "dram_share"),
    "memory traffic": ("dram_read_bytes", "dram_write_bytes"),
    "power": ("power_w", "power_limit_w"),
    "clocks": ("sm_clock_mhz", "memory_clock_mhz"),
    "memory": ("memory_used_bytes",),
    "temperature": ("temperature_c",),
}
"""Sample fields drawn for a device, by group; amounts are drawn as rates."""

_READERS = (RingOpened, Missed, Tick)
"""Records made by a reader: a ring may have been opened long before its oldest record."""


class PerfettoExporter:
    """Exporter that writes a Chrome JSON trace."""

    def __init__(self, out: IO[bytes]) -> None:
        """Keep the file to write to."""
        self._trace = TraceFile(out)
        self._ring: dict[int, RingOpened] = {}
        self._replica: dict[int, int] = {}
        """Data-parallel rank by ring, once recorded."""
        self._first_rank: dict[tuple[str, int], int] = {}
        self._is_synthetic = False

    def on_step(self, step: FinalStep) -> None:
        """Write a step and its parts, and the batch size as counters."""
        process = _steps_of(step.engine_id)
        replica = _of_replica(step.dp_rank)
        end_ns = step.start_ns + step.measured_ns
        rank = f"{replica}rank {step.rank}"
        track = self._trace.lane(process, rank, step.start_ns, end_ns)
        is_prefill = step.phases == PREFILL
        prefill_ns = int(step.shares_ns[is_prefill].sum())
        decode_ns = int(step.shares_ns.sum()) - prefill_ns
        tokens = {
            "prefill": int(step.tokens[is_prefill].sum()),
            "decode": int(step.tokens[~is_prefill].sum()),
        }
        of = step.unnamed
        if of is not None:
            prefill_ns, decode_ns = of.prefill_ns, of.decode_ns
            tokens = {"prefill": of.prefill_tokens, "decode": of.decode_tokens}
        num_requests = len(set(step.request_ids))
        kind = "mixed" if prefill_ns and decode_ns else "prefill" if prefill_ns else "decode"
        self._trace.slice(
            process,
            track,
            f"{kind if num_requests or of else 'empty'} step {step.step}",
            step.start_ns,
            end_ns,
            {
                "requests": num_requests if of is None else "on another host",
                "prefill_tokens": tokens["prefill"],
                "decode_tokens": tokens["decode"],
                "prefill_ns": prefill_ns,
                "decode_ns": decode_ns,
                "padding_ns": step.padding_ns,
                "unattributed_ns": step.unattributed_ns,
                "mode": step.mode,
                "clock": step.clock,
                "cold": step.is_cold,
                "model_residual": round(step.model_residual, 4),
                "fit": step.fit_id,
            },
        )
        parts = {
            "prefill": prefill_ns,
            "decode": decode_ns,
            "padding": step.padding_ns,
            "unattributed": step.unattributed_ns,
        }
        from_ns = step.start_ns
        for part, spent_ns in parts.items():
            if spent_ns > 0:
                self._trace.slice(process, track, part, from_ns, from_ns + spent_ns, {})
                from_ns += spent_ns
        # All ranks of a replica run the same batch: one is enough.
        if self._first_rank.setdefault((step.engine_id, step.dp_rank), step.rank) == step.rank:
            self._trace.count(process, f"{replica}tokens in step", step.start_ns, tokens)
            if of is None:
                batch = {"requests": num_requests}
                self._trace.count(process, f"{replica}batch", step.start_ns, batch)

    def on_request(self, request: FinalRequest) -> None:
        """Write a request on its own track: queue, prefill, decode, delivery."""
        process = _requests_of(request.engine_id)
        name = request.external_id or request.request_id
        # External IDs may repeat, even at the same time.
        track = self._trace.lane(process, name, request.arrived_ns, request.delivered_ns)
        causes = {
            f"{cause}_ms": round(spent_ns / 1e6, 3)
            for cause, spent_ns in request.ledger_ns.items()
            if spent_ns
        }
        self._trace.slice(
            process,
            track,
            f"{name} ({request.finish})",
            request.arrived_ns,
            request.delivered_ns,
            {
                "request": request.request_id,
                **({"adapter": request.adapter} if request.adapter else {}),
                "prompt_tokens": request.prompt_tokens,
                "cached_tokens": request.cached_tokens,
                "output_tokens": request.output_tokens,
                "preemptions": request.num_preemptions,
                "joined_late": request.joined_late,
                **({"ledger": f"- ({request.ledger_missing})"} if request.ledger_missing else {}),
                "prefill_compute_ms": round(request.prefill_ns / 1e6, 3),
                "decode_compute_ms": round(request.decode_ns / 1e6, 3),
                **causes,
            },
        )
        for phase, start_ns, end_ns in _phases(request):
            self._trace.slice(process, track, phase, start_ns, end_ns, {})
            for out_ns, back_ns in request.preempted_ns:
                from_ns, until_ns = max(out_ns, start_ns), min(back_ns, end_ns)
                if from_ns < until_ns:
                    self._trace.slice(process, track, "preempted", from_ns, until_ns, {})
        for transfer in request.transfers:
            self._transferred(process, name, transfer)

    def _transferred(self, process: str, name: str, transfer: KvTransfer) -> None:
        """Write a KV transfer on a track of the request: several may overlap."""
        times = transfer.start_ns, transfer.end_ns
        track = self._trace.lane(process, f"{name}, KV transfers", *times)
        args = {"bytes": transfer.num_bytes, "peer": transfer.peer}
        if transfer.peer_request_id:
            args["peer_request"] = transfer.peer_request_id
        self._trace.slice(process, track, "KV transfer", *times, args)

    def on_record(self, ring: int, record: Record) -> None:
        """Write a scheduler or device record; the first is the trace's origin."""
        if not isinstance(record, _READERS):
            self._trace.begin(record.t_ns)
        if isinstance(record, RingOpened):
            self._ring[record.ring] = record
            self._is_synthetic |= record.synthetic
        elif isinstance(record, EngineInfo):
            self._replica[ring] = record.ranks[2]
        elif isinstance(record, StepPlan) and ring in self._ring:
            self._plan(ring, record)
        elif isinstance(record, CounterSample) and record.device_uuid:
            self._sample(record)

    def close(self, devices: list[DeviceTime], totals: RunTotals) -> None:
        """Write the document's end."""
        self._trace.end(
            {
                "digest": totals.digest,
                "records": totals.num_records,
                "lost": totals.num_lost,
                "synthetic": self._is_synthetic,
            }
        )

    def _plan(self, ring: int, plan: StepPlan) -> None:
        process = _steps_of(self._ring[ring].engine_id)
        replica = _of_replica(self._replica.get(ring, 0))
        requests = {"running": plan.running, "waiting": plan.waiting}
        self._trace.count(process, f"{replica}requests", plan.start_ns, requests)
        if plan.blocks_total:
            blocks = {"used": plan.blocks_used, "cached": plan.blocks_cached}
            self._trace.count(process, f"{replica}KV blocks", plan.start_ns, blocks)

    def _sample(self, sample: CounterSample) -> None:
        """Write a sample at the start of its window: the values hold until the next."""
        passed_s = (sample.end_ns - sample.start_ns) / 1e9
        process = f"device {sample.device_uuid}"
        for group, words in _GROUPS.items():
            args: dict[str, float] = {}
            for word in words:
                value = sample.values.get(word)
                if value is None:
                    continue
                if word not in AMOUNTS:
                    args[word] = value
                elif passed_s > 0:
                    args[f"{word}_per_s"] = value / passed_s
            if args:
                self._trace.count(process, f"{group} ({sample.source})", sample.start_ns, args)


def _steps_of(engine_id: str) -> str:
    return f"steps of {engine_id}"


def _requests_of(engine_id: str) -> str:
    return f"requests of {engine_id}"


def _of_replica(dp_rank: int) -> str:
    return f"replica {dp_rank} " if dp_rank else ""


def _phases(request: FinalRequest) -> Iterator[tuple[str, int, int]]:
    """Yield the phases that a request reached, in sequence, within its duration."""
    edges = (
        ("queue", request.arrived_ns, request.admitted_ns),
        ("prefill", request.admitted_ns, request.first_token_ns),
        ("decode", request.first_token_ns, request.last_token_ns),
        ("delivery", request.last_token_ns, request.delivered_ns),
    )
    through_ns = request.arrived_ns
    for phase, start_ns, end_ns in edges:
        if start_ns is None or end_ns is None:
            continue
        start_ns, end_ns = max(start_ns, through_ns), min(end_ns, request.delivered_ns)
        if start_ns < end_ns:
            yield phase, start_ns, end_ns
            through_ns = end_ns
