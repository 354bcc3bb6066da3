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
from inferscope.probe import split_phases
from inferscope.records import DECODE


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
    request, end = part.request, part.context + part.num_tokens
    for phase, first, stop, flags in split_phases(
        part.context, end, seen=request.ever_computed, num_prompt=request.num_prompt
    ):
        sampled = int(part.is_sampled and stop == end)
        yield request.index, phase, stop - first, first, flags, sampled
