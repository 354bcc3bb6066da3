"""Projection of the fold's state to a snapshot: only copies, no decisions."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from inferscope.attribution import ARRIVING, HELD, LEAVING, RUNNING, WAITING, BlameShare
from inferscope.cost import CostBook, Rates, residual_of
from inferscope.fold import windows
from inferscope.fold.admissible import num_admissible
from inferscope.fold.devices import with_foreign
from inferscope.fold.engine import EngineFold
from inferscope.fold.expert_load import ExpertLoads
from inferscope.fold.final_records import (
    CORE_NOT_OBSERVED,
    SEVERAL_CORES,
    WORKER_NOT_OBSERVED,
    FinalRequest,
)
from inferscope.fold.fold import Collector
from inferscope.fold.join.view import counters_view
from inferscope.fold.overdue import overdue
from inferscope.fold.request_lifecycle import by_cause
from inferscope.fold.requests import Request
from inferscope.fold.rings import (
    RingState,
    current_rings,
    is_core_observed,
    liveness_rings,
    probe_state,
    unsupported_by,
)
from inferscope.fold.snapshots import (
    CostModel,
    Deployment,
    EngineView,
    ExpertsView,
    Health,
    KindSums,
    Quantiles,
    RequestRow,
    Series,
    Snapshot,
)
from inferscope.fold.step_kinds import KINDS
from inferscope.fold.windows import SECOND_NS, WAITING_BY, Bucket
from inferscope.fold.work_totals import COMPUTE_NS, PROPOSED_TOKENS, WASTED_TOKENS
from inferscope.records import EngineInfo

Ints = NDArray[np.int64]

_UNKNOWN_INFO = EngineInfo(0, "unknown")
_STATES = {
    ARRIVING: "arriving",
    WAITING: "waiting",
    HELD: "held",
    LEAVING: "done",
}
_INTERFERENCE = ("prefill_interference", "decode_interference")
_MOST_CELLS = 240
"""Maximum number of cells in the chart of a request's gaps: wider than a wide screen."""
_IDLE = ("idle_no_work", "idle_host_gap")


def snapshot(
    collector: Collector,
    *,
    window_ns: int,
    mode: str,
    max_requests: int = 2000,
    source: str = "",
    notes: tuple[str, ...] = (),
    focus: str | None = None,
    has_steps: bool = False,
) -> Snapshot:
    """Return a snapshot of the fold.

    Args:
        collector: fold to copy.
        window_ns: window of distributions and rates.
        mode: live, paused, replay or ended.
        max_requests: maximum number of rows, those alive first; 0 for readers without a table.
        source: name of the source.
        notes: warnings about the source.
        focus: ID of the request whose token times are included.
        has_steps: whether recent steps are included, if the fold keeps any.
    """
    offset_ns = collector.real_offset_ns
    return Snapshot(
        mono_ns=collector.now_ns,
        real_ns=0 if offset_ns is None else collector.now_ns + offset_ns,
        mode=mode,
        engines=tuple(
            _engine(
                collector,
                engine,
                window_ns=window_ns,
                max_requests=max_requests,
                focus=focus,
                has_steps=has_steps,
            )
            for engine in collector.engines.values()
        ),
        digest=collector.digest(),
        source=source,
        notes=notes,
    )


def _engine(
    collector: Collector,
    engine: EngineFold,
    *,
    window_ns: int,
    max_requests: int,
    focus: str | None,
    has_steps: bool,
) -> EngineView:
    engine.joins.settle()
    buckets = engine.lives.windows.last(window_ns)
    since_ns = buckets[0].second * SECOND_NS if buckets else 0
    amounts = windows.amounts(buckets)
    info = engine.info or _UNKNOWN_INFO
    window_s = len(buckets) or 1
    device_ns = {
        name: amounts[f"{name}_ns"] for name in ("prefill", "decode", "padding", "unattributed")
    }
    device_ns |= {name: amounts[f"{name}_ns"] for name in _IDLE}
    foreign_ns = engine.lives.counters.recent_foreign_ns(engine.now_ns - window_ns)
    if foreign_ns is not None:
        device_ns = with_foreign(device_ns, foreign_ns)
    times = engine.device_times()
    spent = Counter[str]()
    for time in times:
        spent.update(time.seconds_by_ns)
    num_seen, num_ranks = engine.ranks()
    cost_models = _cost_models(engine.book)
    plan = engine.last_plan
    alive = engine.lives.table.alive()
    states_now = _states(engine, alive)
    rings = current_rings(engine.rings.values(), engine.now_ns)
    gone = [ring for ring in liveness_rings(engine.rings.values()) if ring not in rings]
    pids = tuple(sorted({ring.opened.pid for ring in rings}))
    return EngineView(
        engine_id=engine.engine_id,
        engine=info.engine,
        version=info.version,
        model=model_of(engine),
        device=info.device,
        pids=pids,
        is_alive=not all(ring.is_gone(engine.now_ns) for ring in rings),
        is_synthetic=engine.is_synthetic,
        clock=engine.lives.clock,
        window_ns=len(buckets) * SECOND_NS,
        device_ns=device_ns,
        device_total_ns=dict(spent),
        wall_total_ns=sum(time.wall_ns for time in times),
        ttft=windows.quantiles("ttft", buckets),
        tbt=windows.quantiles("tbt", buckets),
        e2e=windows.quantiles("e2e", buckets),
        queue=windows.quantiles("queue", buckets),
        step=windows.quantiles("step", buckets),
        host_gap=windows.quantiles("host_gap", buckets),
        ledger_ns=by_cause(windows.causes(buckets)),
        prefill_tok_s=amounts["prefill_tokens"] / window_s if buckets else None,
        decode_tok_s=amounts["decode_tokens"] / window_s if buckets else None,
        prefill_busy_tok_s=_rate(amounts["prefill_tokens"], amounts["prefill_ns"]),
        decode_busy_tok_s=_rate(amounts["decode_tokens"], amounts["decode_ns"]),
        num_running=states_now.count(RUNNING),
        num_waiting=states_now.count(WAITING) + states_now.count(ARRIVING),
        num_held=states_now.count(HELD),
        num_finished=engine.lives.num_finished,
        finished_s=amounts["finished"] / window_s if buckets else None,
        num_preemptions=engine.lives.num_preemptions,
        blocks_used=plan.blocks_used if plan else 0,
        blocks_cached=plan.blocks_cached if plan else 0,
        blocks_total=plan.blocks_total if plan else 0,
        block_tokens=info.block_tokens,
        max_running=info.max_running,
        token_budget=info.token_budget,
        cached_share=_share(amounts["cached_tokens"], amounts["prompt_tokens"]),
        mixed_share=_share(amounts["mixed_steps"], amounts["steps"]),
        binding=plan.binding if plan else "none",
        model_residual=residual_of(engine.lives.residuals),
        model_source=cost_models[0].source if cost_models else "",
        series=_series(buckets),
        requests=_requests(engine, alive, max_requests, focus, since_ns=since_ns),
        num_requests=len(alive),
        health=_health(collector, engine, rings, amounts, window_s),
        num_ranks_seen=num_seen,
        num_ranks=num_ranks,
        num_partial=engine.num_partial,
        num_replaced=engine.dropped.num_replaced + sum(not ring.has_shut_down for ring in gone),
        deployment=_deployment(info),
        devices=tuple(times) if not all(ring.is_front_end for ring in rings) else (),
        through_ns=(engine.first_ns or 0) + max(time.wall_ns for time in times),
        folded_ns=engine.now_ns,
        cost_models=cost_models,
        is_counted=engine.lives.rates is not None,
        counters=counters_view(engine, window_ns),
        has_scheduler=not all(ring.is_worker for ring in rings),
        prefill_flops_s=_rate(amounts["prefill_flops"], amounts["prefill_flops_ns"]),
        ranks=overdue(
            engine.rings.values(),
            engine.joins.pending(),
            engine.now_ns,
            is_at_work=engine.paused_ns is None
            and (RUNNING in states_now or any(engine.joins.pending())),
        ),
        is_paused=engine.paused_ns is not None,
        queued_prompt_tokens=_queued_tokens(alive, states_now),
        cache=engine.lives.table.cache.view(),
        num_admissions=(
            engine.lives.num_admissions if any(ring.is_core for ring in rings) else None
        ),
        num_admissible=num_admissible(
            zip(alive, states_now, strict=True),
            rings,
            role=info.role,
            max_running=info.max_running,
            has_admitted=engine.lives.num_admissions > 0,
        ),
        ledger_missing=_ledger_missing(engine, rings, engine.now_ns - window_ns),
        listed_ns=len(buckets) * SECOND_NS,
        num_finished_since=amounts["finished"],
        steps=engine.recent.views() if has_steps and engine.recent is not None else (),
        kinds=_kinds(buckets) if has_steps and engine.recent is not None else {},
        weight_bytes=_weight_bytes(engine.lives.rates),
        experts=_experts(engine.experts),
    )


def _experts(loads: ExpertLoads) -> ExpertsView | None:
    hottest = loads.hottest
    if hottest is None:
        return None
    return ExpertsView(
        loads.num_experts, loads.mean_tokens, loads.busiest_tokens, loads.even_tokens, *hottest
    )


def _kinds(buckets: list[Bucket]) -> dict[str, tuple[KindSums, ...]]:
    """Return the sums of steps by kind and second."""
    none = KindSums()
    by_second = [None if bucket.kinds is None else bucket.kinds.tolist() for bucket in buckets]
    return {
        name: tuple(none if sums is None else KindSums(*sums[kind]) for sums in by_second)
        for kind, name in enumerate(KINDS)
    }


def _weight_bytes(rates: Rates | None) -> int | None:
    if rates is None:
        return None
    weights = rates.hbm.weights
    return weights.layers + weights.experts + weights.head


def _ledger_missing(engine: EngineFold, rings: list[RingState], since_ns: int) -> str:
    """Return why the requests of an engine have no ledger; empty if they have one."""
    has_front_end = any(ring.is_front_end for ring in rings)
    if has_front_end and not is_core_observed(engine.rings.values(), engine.now_ns):
        return CORE_NOT_OBSERVED
    if engine.lives.several_cores_until_ns >= since_ns:
        return SEVERAL_CORES
    return "" if engine.lives.is_compute_observed else WORKER_NOT_OBSERVED


def model_of(engine: EngineFold) -> str:
    """Return the model's served name; empty if the engine has not reported it."""
    info = engine.info or _UNKNOWN_INFO
    return info.served_name or info.model


def _cost_models(book: CostBook) -> tuple[CostModel, ...]:
    return tuple(
        CostModel(
            name,
            mode.model.source,
            mode.model.fit_id,
            mode.residual,
            mode.num_steps,
            mode.model.is_provisional,
            mode.bounded_share,
        )
        for name, mode in book.modes.items()
    )


def _deployment(info: EngineInfo) -> Deployment:
    shape = info.shape
    return Deployment(
        info.role,
        info.revision,
        f"w{shape.weight_bits}kv{shape.kv_bits}" if shape is not None else "",
        *info.sizes,
        info.options_hash,
    )


def _states(engine: EngineFold, alive: list[Request]) -> list[int]:
    """Return the requests' states by all records: the ledger alone waits for open steps."""
    state, known = engine.lives.table.ledger.state, engine.states()
    return [known.get(request.slot, int(state[request.slot])) for request in alive]


def _queued_tokens(alive: list[Request], states_now: list[int]) -> int | None:
    """Return the prompt tokens that wait to be computed; None if a queued length is unknown.

    A preempted request computes its prompt again. The length of a request that is not queued yet
    may still be reported; the length of a queued one is known by then or never.
    """
    num_tokens = 0
    for request, now in zip(alive, states_now, strict=True):
        if now not in (ARRIVING, WAITING, HELD):
            continue
        if request.prompt_tokens is not None:
            num_tokens += request.prompt_tokens
        elif now != ARRIVING:
            return None
    return num_tokens


def _rate(tokens: int, spent_ns: int) -> float | None:
    return tokens * 1e9 / spent_ns if spent_ns else None


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _series(buckets: list[Bucket]) -> Series:
    def amount(name: str, scale: float = 1.0) -> tuple[float, ...]:
        return tuple(bucket.amounts[name] * scale for bucket in buckets)

    def whole(name: str) -> tuple[int, ...]:
        return tuple(bucket.amounts[name] for bucket in buckets)

    def gauge(name: str) -> tuple[int, ...]:
        return tuple(bucket.gauges[name] for bucket in buckets)

    def quantile(name: str, share: float) -> tuple[int | None, ...]:
        return tuple(bucket.durations[name].quantile_ns(share) for bucket in buckets)

    return Series(
        prefill_tok_s=amount("prefill_tokens"),
        decode_tok_s=amount("decode_tokens"),
        prefill_share=amount("prefill_ns", 1 / SECOND_NS),
        decode_share=amount("decode_ns", 1 / SECOND_NS),
        ttft_p95_ns=quantile("ttft", 0.95),
        tbt_p99_ns=quantile("tbt", 0.99),
        running=gauge("running"),
        waiting=gauge("waiting"),
        kv_share=tuple(
            used / total if total else 0.0
            for used, total in zip(gauge("blocks_used"), gauge("blocks_total"), strict=True)
        ),
        blocks_used=gauge("blocks_used"),
        blocks_cached=gauge("blocks_cached"),
        blocks_total=gauge("blocks_total"),
        waiting_by={
            binding: tuple(
                _share(bucket.amounts[name], bucket.amounts["plans"]) for bucket in buckets
            )
            for binding, name in WAITING_BY.items()
        },
        preempted=whole("preempted"),
        cached_tokens=whole("cached_tokens"),
        prompt_tokens=whole("prompt_tokens"),
        proposed_tokens=whole("proposed_tokens"),
        accepted_tokens=whole("accepted_tokens"),
    )


def _health(
    collector: Collector,
    engine: EngineFold,
    rings: list[RingState],
    amounts: Mapping[str, int],
    window_s: int,
) -> Health:
    reports = [ring.health for ring in rings if ring.health is not None]
    wall_ns = window_s * SECOND_NS
    return Health(
        probe_state=probe_state(rings),
        probe_share=amounts["probe_ns"] / wall_ns if reports else None,
        probe_hidden_share=amounts["probe_hidden_ns"] / wall_ns if reports else None,
        num_records=collector.num_records,
        num_lost=collector.num_lost,
        num_late=collector.num_late,
        num_unjoined=engine.num_unjoined,
        num_unknown=collector.num_unknown,
        num_refused=engine.lives.table.num_refused,
        message=next((report.message for report in reports if report.message), ""),
        unsupported=unsupported_by(rings),
        skewed_clocks=engine.skewed_clocks,
    )


def _requests(
    engine: EngineFold,
    alive: list[Request],
    max_requests: int,
    focus: str | None,
    *,
    since_ns: int,
) -> tuple[RequestRow, ...]:
    """Return the rows of alive requests, and of those that finished in the window's buckets."""
    rows = []
    is_observed = is_core_observed(engine.rings.values(), engine.now_ns)
    for request in alive[::-1][:max_requests]:
        row = alive_row(engine, request, is_observed=is_observed)
        if request.request_id == focus:
            times_ns = engine.lives.table.token_times_ns[request.slot]
            row = _in_focus(
                row,
                times_ns,
                request.trace,
                engine.lives.blame_of(request, engine.now_ns, unfolded=engine.unfolded),
            )
        rows.append(row)
    room = max_requests - len(rows)
    in_window = [each for each in engine.lives.finished if each.delivered_ns >= since_ns]
    for final in in_window[::-1][:room]:
        row = finished_row(final)
        if final.request_id == focus:
            row = _in_focus(row, final.token_times_ns, final.trace, final.blame)
        rows.append(row)
    return tuple(rows)


def _in_focus(
    row: RequestRow, times_ns: array[int], trace: str, blame: tuple[BlameShare, ...]
) -> RequestRow:
    """Add the fields of the request in focus: trace, blame, and the longest gap of each cell."""
    row = replace(row, trace=trace, blame=blame)
    if len(times_ns) < 2:
        return row
    times = np.frombuffer(times_ns, dtype=np.int64)
    gaps_ns = np.diff(times)
    per_cell = -(-len(gaps_ns) // _MOST_CELLS)
    longest = [
        at + int(gaps_ns[at : at + per_cell].argmax()) for at in range(0, len(gaps_ns), per_cell)
    ]
    return replace(
        row,
        gaps_ns=tuple(gaps_ns[longest].tolist()),
        gaps_per_cell=per_cell,
        gap_ends_ns=tuple(times[1:][longest].tolist()),
    )


def alive_row(engine: EngineFold, request: Request, *, is_observed: bool = False) -> RequestRow:
    """Return the table row of a request that is not final.

    Args:
        engine: engine of the request.
        request: request to show.
        is_observed: whether the caller knows that the core of the engine is observed.
    """
    table = engine.lives.table
    slot = request.slot
    state = int(table.ledger.state[slot])
    age_ns = max(0, engine.now_ns - request.arrived_ns)
    first_ns = request.first_edge_ns
    times = table.token_times_ns[slot]
    num_gaps = len(times) - 1
    prefill, decode = table.work.of(slot)
    missing = ""
    if not is_observed:
        missing = engine.lives.ledger_missing(request, engine.now_ns)
    ledger_ns = (
        {} if missing else engine.lives.ledger_of(request, engine.now_ns, unfolded=engine.unfolded)
    )
    waited_ns = sum(ledger_ns.get(cause, 0) for cause in _INTERFERENCE)
    return RequestRow(
        request_id=request.request_id,
        external_id=request.external_id,
        state=_STATES.get(state) or ("prefill" if table.in_prefill[slot] else "decode"),
        finish=request.finish,
        arrived_ns=request.arrived_ns,
        age_ns=age_ns,
        prompt_tokens=request.prompt_tokens,
        cached_tokens=request.cached_tokens if request.admitted_ns else None,
        output_tokens=int(table.output_tokens[slot]),
        ttft_ns=None if first_ns is None else first_ns - request.arrived_ns,
        tbt_mean_ns=round((times[-1] - times[0]) / num_gaps) if num_gaps > 0 else None,
        tbt_p99_ns=_tbt_p99(request, times),
        e2e_ns=None,
        prefill_ns=prefill[COMPUTE_NS],
        decode_ns=decode[COMPUTE_NS],
        interference_share=waited_ns / age_ns if age_ns and not missing else None,
        num_preemptions=request.num_preemptions,
        ledger_ns=ledger_ns,
        ttft_ledger_ns={} if missing else by_cause(engine.lives.ttft_row(request)),
        joined_late=request.joined_late,
        ledger_missing=missing,
        tenant=request.attributes.get("tenant", ""),
        adapter=request.adapter or request.attributes.get("adapter", ""),
        proposed_tokens=decode[PROPOSED_TOKENS],
        accepted_tokens=max(decode[PROPOSED_TOKENS] - decode[WASTED_TOKENS], 0),
        transfers=tuple(request.transfers),
    )


def _tbt_p99(request: Request, times: array[int]) -> int | None:
    """Return the request's TBT p99, recomputed only after its tokens have grown by 10 %."""
    num = len(times)
    if num < 2:
        return None
    if request.tbt_p99 is None or num > 1.1 * request.tbt_p99[0]:
        gaps = np.diff(np.frombuffer(times, dtype=np.int64))
        request.tbt_p99 = (num, round(float(np.percentile(gaps, 99))))
    return request.tbt_p99[1]


def finished_row(final: FinalRequest) -> RequestRow:
    """Return the table row of a final request."""
    first_ns, last_ns = final.first_token_ns, final.last_token_ns
    gaps = final.tbt_ns
    life_ns = final.delivered_ns - final.arrived_ns
    waited_ns = sum(final.ledger_ns.get(cause, 0) for cause in _INTERFERENCE)
    return RequestRow(
        request_id=final.request_id,
        external_id=final.external_id,
        state="done",
        finish=final.finish,
        arrived_ns=final.arrived_ns,
        age_ns=life_ns,
        prompt_tokens=final.prompt_tokens,
        cached_tokens=None if final.ledger_missing else final.cached_tokens,
        output_tokens=final.output_tokens,
        ttft_ns=None if first_ns is None else first_ns - final.arrived_ns,
        tbt_mean_ns=round(sum(gaps) / len(gaps)) if gaps else None,
        tbt_p99_ns=round(float(np.percentile(gaps, 99))) if gaps else None,
        e2e_ns=None if last_ns is None else last_ns - final.arrived_ns,
        prefill_ns=final.prefill_ns,
        decode_ns=final.decode_ns,
        interference_share=waited_ns / life_ns if life_ns and not final.ledger_missing else None,
        num_preemptions=final.num_preemptions,
        ledger_ns=final.ledger_ns,
        ttft_ledger_ns=final.ttft_ledger_ns,
        joined_late=final.joined_late,
        counters=final.counters,
        ledger_missing=final.ledger_missing,
        reasoning_tokens=final.reasoning_tokens,
        ttfot_ns=final.ttfot_ns,
        tenant=final.attributes.get("tenant", ""),
        adapter=final.adapter,
        proposed_tokens=final.proposed_tokens,
        accepted_tokens=max(final.proposed_tokens - final.rejected.tokens, 0),
        transfers=final.transfers,
    )


__all__ = ["Quantiles", "alive_row", "finished_row", "snapshot"]
