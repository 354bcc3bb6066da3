"""Slices of a step as rows for its records, one row per phase of a slice.

A slice can hold, in this order, tokens that were computed before a preemption, new tokens of the
prompt, a generated token, and drafts. Each range becomes a row, so that recompute, prefill, decode
and verification are accounted separately:

    tokens     0 ....... ever_computed ....... num_prompt ....... len(tokens) ....... + len(draft)
               recomputed  (prefill)   prefill             decode             verify
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from inferscope.engine.scheduler import Slice
from inferscope.engine.speculative import draft_start
from inferscope.probe import column, digest64, split_phases
from inferscope.records import DECODE, DRAFT, VERIFY


class StepColumns(msgspec.Struct, frozen=True, gc=False):
    """Columns of a step with one entry per row, and its digest; see `Probe.slices`."""

    requests: tuple[int, ...]
    phases: tuple[int, ...]
    tokens: tuple[int, ...]
    contexts: tuple[int, ...]
    flags: tuple[int, ...]
    sampled: tuple[int, ...]
    proposed: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()
    digest: int | None = None
    """Digest of the slices, which a worker knows; None if each of them is one row."""


def step_columns(slices: Sequence[Slice]) -> StepColumns:
    """Split a step's slices, at least one, into rows; call it before `Scheduler.advance`.

    With drafts, call it with the tokens of the step appended.
    """
    rows: list[tuple[int, ...]] = []
    for part in slices:
        request, context, num_tokens = part.request, part.context, part.num_tokens
        if part.num_drafts or context < max(request.ever_computed, request.num_prompt):
            rows += _rows(part)
        else:
            num_rows = int(part.is_sampled)
            rows.append((request.index, DECODE, num_tokens, context, 0, num_rows, 0, 0))
    requests, phases, tokens, contexts, flags, sampled, proposed, accepted = zip(*rows, strict=True)
    if not any(proposed):
        proposed = accepted = ()
    digest = None if len(rows) == len(slices) else _digest(slices)
    return StepColumns(
        requests, phases, tokens, contexts, flags, sampled, proposed, accepted, digest
    )


def draft_columns(slices: Sequence[Slice]) -> StepColumns:
    """Return the rows of the draft model's step before a step with these slices."""
    nums, starts = [], []
    for part in slices:
        start, end = draft_start(part), part.context + part.num_tokens - part.num_drafts
        starts.append(start)
        # The last proposed token is not read.
        nums.append(end - start + max(0, part.num_drafts - 1))
    return StepColumns(
        requests=tuple(part.request.index for part in slices),
        phases=(DRAFT,) * len(slices),
        tokens=tuple(nums),
        contexts=tuple(starts),
        flags=(0,) * len(slices),
        sampled=tuple(part.num_drafts for part in slices),
    )


def _rows(part: Slice) -> Iterator[tuple[int, ...]]:
    request, known = part.request, part.context + part.num_tokens - part.num_drafts
    for phase, first, stop, flags in split_phases(
        part.context, known, seen=request.ever_computed, num_prompt=request.num_prompt
    ):
        sampled = int(part.is_sampled and stop == known)
        yield request.index, phase, stop - first, first, flags, sampled, 0, 0
    if part.num_drafts:
        # The tokens of the step are the accepted drafts and one more.
        accepted = len(request.tokens) - known - 1
        num = part.num_drafts
        yield request.index, VERIFY, num, known, 0, num, num, accepted


def _digest(slices: Sequence[Slice]) -> int:
    return digest64(
        column("I", [part.request.index for part in slices]),
        column("I", [part.num_tokens for part in slices]),
    )
