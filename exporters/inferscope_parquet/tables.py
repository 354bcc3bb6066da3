"""Tables: the JSON Lines contract in columns, with the same names and meanings.

An object of a line is a struct, a list or a map here; `shares` of a step are rows of `slices`. The
monotonic nanoseconds add up; each row also has its wall time. A new column is appended and is null
in older files; the version counts changes of meaning.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable
from itertools import accumulate, chain, groupby
from typing import Any

import numpy as np
import pyarrow as pa
from inferscope_jsonl.exporter import cache_facts, request_provenance, transfer_facts
from msgspec.structs import asdict
from numpy.typing import NDArray

from inferscope.fold import FinalRequest, FinalStep, PhaseWork
from inferscope.records import PHASES, RECOMPUTED
from inferscope_parquet.batches import EngineLabels, RowBatch

SCHEMA_VERSION = 1
SCHEMA_KEY = "inferscope.schema"
"""Metadata key of a file's schema version."""
_HOUR_US = 3_600_000_000
_TRACE_ID = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")

_TEXT, _INT, _BOOL, _REAL = pa.string(), pa.int64(), pa.bool_(), pa.float64()
_UTC = pa.timestamp("us", tz="UTC")
_NS_BY_CAUSE = pa.map_(_TEXT, _INT)
_USE = [
    (name, _INT)
    for name in (
        "tokens",
        "flops",
        "hbm_read_bytes",
        "hbm_write_bytes",
        "sm_active_ns",
        "gpu_busy_ns",
        "energy_uj",
    )
]
_PREFILL = pa.struct([*_USE, ("recomputed_tokens", _INT), ("recomputed_ns", _INT)])
_DECODE = pa.struct(
    [
        *_USE,
        ("rejected_tokens", _INT),
        ("rejected_ns", _INT),
        ("draft_tokens", _INT),
        ("draft_ns", _INT),
    ]
)
_PART = pa.struct(
    [
        ("name", _TEXT),
        ("tokens", _INT),
        ("cached_tokens", _INT),
        ("recomputed_tokens", _INT),
        ("compute_ns", _INT),
        ("ttft_ns", _INT),
        ("flops", _INT),
    ]
)
_TRANSFER = pa.struct(
    [
        ("start_ns", _INT),
        ("end_ns", _INT),
        ("bytes", _INT),
        ("peer", _TEXT),
        ("peer_request", _TEXT),
    ]
)
_NAMED = pa.struct([("request", _TEXT), ("external_id", _TEXT), ("tenant", _TEXT)])
_CACHE = pa.struct(
    [
        ("tokens", _NS_BY_CAUSE),
        ("gpu_ns", _NS_BY_CAUSE),
        ("ttft_ns", _NS_BY_CAUSE),
        ("recomputed_ns", _INT),
        ("queue_evicted_ns", _INT),
        ("evictor", _NAMED),
        ("evictors", pa.list_(_NAMED)),
        ("num_evictors", _INT),
        ("evicted_ns", _INT),
        ("inferred", _BOOL),
        ("twin", _NAMED),
        ("off_reason", _TEXT),
        ("block_tokens", _INT),
        ("below_block_tokens", _INT),
        (
            "difference",
            pa.struct(
                [
                    ("earlier", _NAMED),
                    ("diverged_at", _INT),
                    ("equal_again_at", _INT),
                    ("shift", _INT),
                    ("spans", pa.list_(pa.struct([("start", _INT), ("end", _INT)]))),
                    ("differs", pa.list_(_TEXT)),
                    ("part", _TEXT),
                ]
            ),
        ),
        (
            "parts",
            pa.list_(
                pa.struct(
                    [
                        ("part", _TEXT),
                        ("cache", _TEXT),
                        ("tokens", _INT),
                        ("gpu_ns", _INT),
                        ("ttft_ns", _INT),
                    ]
                )
            ),
        ),
    ]
)
_ORIGIN = pa.struct([("method", _TEXT), ("source", _TEXT), ("fit", _TEXT), ("error", _REAL)])

REQUESTS = pa.schema(
    [
        ("host", _TEXT),
        ("engine", _TEXT),
        ("model", _TEXT),
        ("synthetic", _BOOL),
        ("request", _TEXT),
        ("external_id", _TEXT),
        ("trace_id", _TEXT),
        ("tenant", _TEXT),
        ("priority", _TEXT),
        ("endpoint", _TEXT),
        ("arrived_utc", _UTC),
        ("delivered_utc", _UTC),
        ("prompt_tokens", _INT),
        ("cached_tokens", _INT),
        ("output_tokens", _INT),
        ("arrived_ns", _INT),
        ("first_token_ns", _INT),
        ("last_token_ns", _INT),
        ("delivered_ns", _INT),
        ("arrived_at", _TEXT),
        ("delivered_at", _TEXT),
        ("finish", _TEXT),
        ("joined_late", _BOOL),
        ("preemptions", _INT),
        ("ledger_ns", _NS_BY_CAUSE),
        ("ttft_ledger_ns", _NS_BY_CAUSE),
        ("prompt_parts", pa.list_(_PART)),
        ("blame", pa.list_(pa.struct([("cause", _TEXT), ("request", _TEXT), ("ns", _INT)]))),
        ("tbt_ns", pa.list_(_INT)),
        ("tokens_per_event", pa.list_(_INT)),
        ("compute_ns", pa.struct([("prefill", _INT), ("decode", _INT)])),
        ("by_phase", pa.struct([("prefill", _PREFILL), ("decode", _DECODE)])),
        ("saved_by_cache", pa.struct([("tokens", _INT), ("flops", _INT), ("ns", _INT)])),
        ("provenance", pa.map_(_TEXT, _ORIGIN)),
        ("adapter", _TEXT),
        ("transfers", pa.list_(_TRANSFER)),
        ("ledger_missing", _TEXT),
        ("partial", _BOOL),
        ("cache", _CACHE),
        ("conversation", _TEXT),
    ]
)
_OF_STEP = [
    ("host", _TEXT),
    ("engine", _TEXT),
    ("dp_rank", _INT),
    ("rank", _INT),
    ("step", _INT),
    ("started_utc", _UTC),
]
STEPS = pa.schema(
    [
        *_OF_STEP,
        ("model", _TEXT),
        ("synthetic", _BOOL),
        ("start_ns", _INT),
        ("end_ns", _INT),
        ("measured_ns", _INT),
        ("clock", _TEXT),
        ("mode", _TEXT),
        ("cold", _BOOL),
        ("fit", _TEXT),
        ("padding_ns", _INT),
        ("unattributed_ns", _INT),
        ("model_residual", _REAL),
        ("provisional", _BOOL),
        ("bounded_ns", _INT),
    ]
)
SLICES = pa.schema(
    [
        *_OF_STEP,
        ("request", _TEXT),
        ("phase", _TEXT),
        ("tokens", _INT),
        ("context", _INT),
        ("recomputed", _BOOL),
        ("ns", _INT),
        ("synthetic", _BOOL),
    ]
)
SCHEMAS = {"requests": REQUESTS, "steps": STEPS, "slices": SLICES}
_HOUR_OF = {"requests": "delivered_utc", "steps": "started_utc", "slices": "started_utc"}
_ORIGINS = "provenance"
_NONE = np.zeros(0, dtype=np.int64)


def table_of(name: str, batch: RowBatch, *, host: str | None) -> pa.Table:
    """Return a batch as one of the SCHEMAS; it may have no rows.

    Raises:
        ArrowInvalid: a number exceeds 64 bits.
    """
    if name == "requests":
        return _requests(batch, host)
    return _steps(batch, host) if name == "steps" else _slices(batch, host)


def by_hour(name: str, table: pa.Table) -> dict[int, pa.Table]:
    """Split a table by its rows' hours since 1970."""
    hours = table[_HOUR_OF[name]].cast(_INT).to_numpy() // _HOUR_US
    found = np.unique(hours).tolist()
    if len(found) == 1:
        return {found[0]: table}
    return {hour: table.filter(pa.array(hours == hour)) for hour in found}


def first_s(name: str, table: pa.Table) -> int:
    """Return the wall time of a table's first row, in s since 1970."""
    return int(table[_HOUR_OF[name]].cast(_INT)[0].as_py() // 1_000_000)


def _requests(batch: RowBatch, host: str | None) -> pa.Table:
    """Return the requests with the fields of JSON Lines' `request_facts`, built by column.

    Building rows first and splitting them takes twice as long.
    """
    requests, num, offset_ns = batch.requests, len(batch.requests), batch.offset_ns
    assert offset_ns is not None
    engines = [batch.engines.get(each.engine_id, EngineLabels()) for each in requests]
    given = [each.attributes for each in requests]
    is_missing = [bool(each.ledger_missing) for each in requests]
    traces = [_TRACE_ID.fullmatch(each.trace) if each.trace else None for each in requests]
    made = {
        "host": [host] * num,
        "engine": [each.engine_id for each in requests],
        "model": [engine.model for engine in engines],
        "synthetic": [engine.is_synthetic for engine in engines],
        "request": [each.request_id for each in requests],
        "trace_id": [trace[1] if trace else None for trace in traces],
        "adapter": [each.adapter or None for each in requests],
        "transfers": [[transfer_facts(one) for one in each.transfers] or None for each in requests],
        "tenant": [each.get("tenant") for each in given],
        "priority": [each.get("priority") for each in given],
        "endpoint": [each.get("endpoint") for each in given],
        "arrived_utc": [(each.arrived_ns + offset_ns) // 1000 for each in requests],
        "delivered_utc": [(each.delivered_ns + offset_ns) // 1000 for each in requests],
        "preemptions": [each.num_preemptions for each in requests],
        "cached_tokens": [None if each.ledger_missing else each.cached_tokens for each in requests],
        "ledger_missing": [each.ledger_missing or None for each in requests],
        "partial": [each.is_partial for each in requests],
        "cache": _caches(requests),
        "conversation": [each.conversation or None for each in requests],
        "ledger_ns": _by_cause([each.ledger_ns for each in requests], is_missing),
        "ttft_ledger_ns": _by_cause([each.ttft_ledger_ns for each in requests], is_missing),
        "prompt_parts": [[asdict(part) for part in each.parts] or None for each in requests],
        "blame": _blame(requests),
        "tbt_ns": _whole_lists([_gaps_ns(each) for each in requests]),
        "tokens_per_event": _whole_lists([_counts(each.tokens_per_event) for each in requests]),
        "compute_ns": _struct(
            REQUESTS.field("compute_ns").type,
            [each.prefill_ns for each in requests],
            [each.decode_ns for each in requests],
            is_missing=is_missing,
        ),
        "by_phase": _struct(
            REQUESTS.field("by_phase").type,
            _prefills(requests),
            _decodes(requests),
            is_missing=is_missing,
        ),
        "saved_by_cache": _struct(
            REQUESTS.field("saved_by_cache").type,
            [each.cached_tokens for each in requests],
            [each.saved.flops for each in requests],
            [each.saved.ns for each in requests],
            is_missing=is_missing,
        ),
        _ORIGINS: _origins(requests),
    }
    columns = []
    for field in REQUESTS:
        column = made.get(field.name)
        if column is None:
            column = [getattr(each, field.name) for each in requests]
        columns.append(column if isinstance(column, pa.Array) else pa.array(column, field.type))
    return pa.Table.from_arrays(columns, schema=REQUESTS)


def _struct(
    kind: pa.StructType,
    *columns: pa.Array | list[int | None],
    is_missing: list[bool] | None = None,
) -> pa.Array:
    fields = [kind.field(at) for at in range(kind.num_fields)]
    arrays = [
        column if isinstance(column, pa.Array) else pa.array(column, field.type)
        for field, column in zip(fields, columns, strict=True)
    ]
    mask = pa.array(is_missing, _BOOL) if is_missing and any(is_missing) else None
    return pa.StructArray.from_arrays(arrays, fields=fields, mask=mask)


def _offsets(lengths: Iterable[int]) -> pa.Array:
    return pa.array([0, *accumulate(lengths)], pa.int32())


def _by_cause(rows: list[dict[str, int]], is_missing: list[bool]) -> pa.Array:
    rows = [{} if missing else row for row, missing in zip(rows, is_missing, strict=True)]
    offsets = _offsets(map(len, rows))
    if any(is_missing):  # a null offset begins a null map
        starts = [
            None if missing else at
            for at, missing in zip(offsets.to_pylist()[:-1], is_missing, strict=True)
        ]
        offsets = pa.array([*starts, offsets[-1].as_py()], pa.int32())
    return pa.MapArray.from_arrays(
        offsets,
        pa.array(list(chain.from_iterable(rows)), _TEXT),
        pa.array(list(chain.from_iterable(row.values() for row in rows)), _INT),
    )


def _blame(requests: list[FinalRequest]) -> pa.Array:
    sampled = [culprit for each in requests for culprit in each.blame]
    kind = REQUESTS.field("blame").type.value_type
    columns = ([one[at] for one in sampled] for at in range(kind.num_fields))
    return pa.ListArray.from_arrays(
        _offsets(len(each.blame) for each in requests), _struct(kind, *columns)
    )


def _whole_lists(rows: list[NDArray[np.int64]]) -> pa.Array:
    values = np.concatenate(rows) if rows else _NONE
    return pa.ListArray.from_arrays(_offsets(map(len, rows)), pa.array(values, _INT))


def _gaps_ns(request: FinalRequest) -> NDArray[np.int64]:
    if len(request.token_times_ns) < 2:
        return _NONE
    times_ns = np.frombuffer(request.token_times_ns, dtype=np.int64)
    return times_ns[1:] - times_ns[:-1]


def _counts(counts: tuple[int, ...]) -> NDArray[np.int64]:
    if counts.count(1) == len(counts):  # the common case of streams
        return np.ones(len(counts), dtype=np.int64)
    return np.array(counts, dtype=np.int64)


def _prefills(requests: list[FinalRequest]) -> pa.Array:
    return _struct(
        _PREFILL,
        *_use(
            [each.prefill_flops for each in requests],
            [each.prefill_work for each in requests],
            [each.counters.prefill for each in requests],
        ),
        [each.recomputed.tokens for each in requests],
        [each.recomputed.ns for each in requests],
    )


def _decodes(requests: list[FinalRequest]) -> pa.Array:
    return _struct(
        _DECODE,
        *_use(
            [each.decode_flops for each in requests],
            [each.decode_work for each in requests],
            [each.counters.decode for each in requests],
        ),
        [each.rejected.tokens for each in requests],
        [each.rejected.ns for each in requests],
        [each.drafted.tokens for each in requests],
        [each.drafted.ns for each in requests],
    )


def _use(
    flops: list[int | None], work: list[PhaseWork], counters: list[dict[str, int]]
) -> list[list[int | None]]:
    """Return the columns of _USE; sampled values take precedence over modelled ones."""
    none: list[int | None] = [None] * len(work)
    columns: dict[str, list[int | None]] = {
        "tokens": [each.tokens for each in work],
        "flops": flops,
        "hbm_read_bytes": [each.hbm_read_bytes for each in work],
        "hbm_write_bytes": [each.hbm_write_bytes for each in work],
    }
    found = [columns.get(name, none) for name, _ in _USE]
    if any(counters):
        found = [
            [
                sampled.get(name, modelled)
                for sampled, modelled in zip(counters, column, strict=True)
            ]
            for (name, _), column in zip(_USE, found, strict=True)
        ]
    return found


def _caches(requests: list[FinalRequest]) -> pa.Array:
    """Return the use of the prefix cache; maps are lists of pairs, which pyarrow takes."""
    rows = []
    for facts in map(cache_facts, requests):
        if facts is not None:
            for name in ("tokens", "gpu_ns", "ttft_ns"):
                facts[name] = None if facts[name] is None else list(facts[name].items())
        rows.append(facts)
    return pa.array(rows, _CACHE)


def _origins(requests: list[FinalRequest]) -> pa.Array:
    """Return the provenance of requests, a third of a row, converted once for each kind."""
    at_of: dict[Hashable, int] = {}
    kinds: list[list[tuple[str, Any]]] = []
    places = []
    for request in requests:
        key = (
            request.is_alone,
            request.clock,
            request.fit_id,
            request.prefill_flops is None,
            request.saved.ns is None,
            request.saved.fit_id,
            *request.counters.provenance.items(),
        )
        if key not in at_of:
            at_of[key] = len(kinds)
            kinds.append(list(request_provenance(request).items()))
        places.append(at_of[key])
    return pa.array(kinds, REQUESTS.field(_ORIGINS).type).take(pa.array(places, _INT))


def _of_step(steps: list[FinalStep], batch: RowBatch, host: str | None) -> list[pa.Array]:
    assert batch.offset_ns is not None
    started_us = [(step.start_ns + batch.offset_ns) // 1000 for step in steps]
    return [
        pa.array([host] * len(steps), _TEXT),
        pa.array([step.engine_id for step in steps], _TEXT),
        pa.array([step.dp_rank for step in steps], _INT),
        pa.array([step.rank for step in steps], _INT),
        pa.array([step.step for step in steps], _INT),
        pa.array(started_us, _INT).cast(_UTC),
    ]


def _steps(batch: RowBatch, host: str | None) -> pa.Table:
    steps = batch.steps
    engines = [batch.engines.get(step.engine_id, EngineLabels()) for step in steps]
    columns = [
        *_of_step(steps, batch, host),
        pa.array([engine.model for engine in engines], _TEXT),
        pa.array([engine.is_synthetic for engine in engines], _BOOL),
        pa.array([step.start_ns for step in steps], _INT),
        pa.array([step.end_ns for step in steps], _INT),
        pa.array([step.measured_ns for step in steps], _INT),
        pa.array([step.clock for step in steps], _TEXT),
        pa.array([step.mode for step in steps], _TEXT),
        pa.array([step.is_cold for step in steps], _BOOL),
        pa.array([step.fit_id for step in steps], _TEXT),
        pa.array([step.padding_ns for step in steps], _INT),
        pa.array([step.unattributed_ns for step in steps], _INT),
        pa.array([round(step.model_residual, 6) for step in steps], _REAL),
        pa.array([step.is_provisional for step in steps], _BOOL),
        pa.array([step.bounded_ns for step in steps], _INT),
    ]
    return pa.Table.from_arrays(columns, schema=STEPS)


def _slices(batch: RowBatch, host: str | None) -> pa.Table:
    steps = [step for step in batch.steps if step.request_ids]
    if not steps:
        return SLICES.empty_table()
    step_of_row = np.repeat(np.arange(len(steps)), [len(step.request_ids) for step in steps])
    phases = _joined([step.phases for step in steps])
    words = [*PHASES, *map(str, range(len(PHASES), 1 + int(phases.max())))]
    made_up = [batch.engines.get(step.engine_id, EngineLabels()).is_synthetic for step in steps]
    recomputed = (_joined([step.flags for step in steps]) & RECOMPUTED) > 0
    columns = [
        *(column.take(pa.array(step_of_row)) for column in _of_step(steps, batch, host)),
        _names(steps),
        pa.array(words, _TEXT).take(pa.array(phases)),
        pa.array(_joined([step.tokens for step in steps]), _INT),
        pa.array(_joined([step.contexts for step in steps]), _INT),
        pa.array(recomputed, _BOOL),
        pa.array(_joined([step.shares_ns for step in steps]), _INT),
        pa.array(made_up, _BOOL).take(pa.array(step_of_row)),
    ]
    return pa.Table.from_arrays(columns, schema=SLICES)


def _names(steps: list[FinalStep]) -> pa.Array:
    """Return the request of each slice; consecutive steps of the same requests share the result."""
    same = [(ids, len(list(group))) for ids, group in groupby(step.request_ids for step in steps)]
    made = [(pa.array(ids, _TEXT), num) for ids, num in same]
    return pa.concat_arrays([each for each, num in made for _ in range(num)])


def _joined(columns: list[NDArray[Any]]) -> NDArray[Any]:
    return np.concatenate(columns)
