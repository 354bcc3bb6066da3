"""Slices of a step as rows for its records, one row per phase of a slice.

A slice can hold, in this order, tokens that were computed before a preemption, new tokens of the
prompt, and a generated token. Each range becomes a row, so that recompute, prefill and decode are
accounted separately:

    tokens     0 ....... ever_computed ....... num_prompt ....... len(tokens)
               recomputed  (prefill)   prefill             decode
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from inferscope.engine.scheduler import Slice
from inferscope.records import DECODE, LAST_CHUNK, PREFILL, RECOMPUTED


class StepColumns(msgspec.Struct, frozen=True, gc=False):
    """Columns of a step with one entry per row; see `Probe.slices`."""

    requests: tuple[int, ...]
    phases: tuple[int, ...]
    tokens: tuple[int, ...]
    contexts: tuple[int, ...]
    flags: tuple[int, ...]
    sampled: tuple[int, ...]


def step_columns(slices: Iterable[Slice]) -> StepColumns:
    """Split a step's slices, at least one, into rows; call it before `Scheduler.advance`."""
    rows: list[tuple[int, ...]] = []
    for part in slices:
        request, context, num_tokens = part.request, part.context, part.num_tokens
        if context >= max(request.ever_computed, request.num_prompt):
            rows.append((request.index, DECODE, num_tokens, context, 0, int(part.is_sampled)))
        else:
            rows += _prefill_rows(part)
    return StepColumns(*zip(*rows, strict=True))


def _prefill_rows(part: Slice) -> Iterator[tuple[int, ...]]:
    request, start = part.request, part.context
    end = start + part.num_tokens
    seen, num_prompt = request.ever_computed, request.num_prompt
    # Prefill ends when the prompt and all tokens lost to a preemption are computed.
    prefill_end = max(seen, num_prompt)
    for phase, flag, limit in (
        (PREFILL, RECOMPUTED, seen),
        (PREFILL, 0, num_prompt),
        (DECODE, 0, end),
    ):
        stop = min(end, limit)
        if stop > start:
            is_complete = phase == PREFILL and stop == prefill_end
            flags = flag | LAST_CHUNK if is_complete else flag
            sampled = int(part.is_sampled and stop == end)
            yield request.index, phase, stop - start, start, flags, sampled
            start = stop
