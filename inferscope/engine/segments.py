"""How a step's slices are told to the probe: one row per stretch of one kind of work.

A slice may hold, in this order, tokens that were computed before a preemption, tokens of the prompt
that are new, and a token that was generated. Each stretch becomes a row, so that repeated work and
prefill and decode can be charged apart:

    tokens     0 ....... ever_computed ....... num_prompt ....... len(tokens)
               recomputed  (prefill)   prefill             decode
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from inferscope.engine.scheduler import Slice
from inferscope.records import DECODE, LAST_CHUNK, PREFILL, RECOMPUTED


class Rows(msgspec.Struct, frozen=True, gc=False):
    """Columns with one entry per row; see `Probe.slices`."""

    requests: tuple[int, ...]
    phases: tuple[int, ...]
    tokens: tuple[int, ...]
    contexts: tuple[int, ...]
    flags: tuple[int, ...]
    sampled: tuple[int, ...]


def rows_of(slices: Iterable[Slice]) -> Rows:
    """Split a step's slices, at least one, into rows, before they are accounted as computed."""
    rows: list[tuple[int, ...]] = []
    for part in slices:
        request, context, num_tokens = part.request, part.context, part.num_tokens
        if context >= max(request.ever_computed, request.num_prompt):
            rows.append((request.index, DECODE, num_tokens, context, 0, int(part.is_sampled)))
        else:
            rows += _prefill_rows(part)
    return Rows(*zip(*rows, strict=True))


def _prefill_rows(part: Slice) -> Iterator[tuple[int, ...]]:
    request, start = part.request, part.context
    end = start + part.num_tokens
    seen, num_prompt = request.ever_computed, request.num_prompt
    # Prefill ends where both the prompt and what was lost to a preemption are restored.
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
