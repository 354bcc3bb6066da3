"""What SGLang's scheduler says, in InferScope's words: phases of a batch, ends of requests, limits.

Pure functions of scalars; nothing here knows SGLang. A batch has one forward mode, and a request in
it one stretch of positions, which may hold several kinds of work:

    positions  0 ........... seen ........... num_prompt ........... context + tokens
               recomputed (prefill)   prefill              decode

`seen` is how far the request had ever been computed: beyond its prefix after a retraction.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from inferscope.probe import split_phases
from inferscope.records import (
    DECODE,
    DRAFT,
    PREFILL,
    VERIFY,
    Binding,
    finish_of_status,
)

HEALTH_CHECK = "HEALTH_CHECK"
"""Ids of the server's own probes begin so; they are no requests."""

_PHASES = {
    "EXTEND": PREFILL,
    "SPLIT_PREFILL": PREFILL,
    "DLLM_EXTEND": PREFILL,
    "MIXED": PREFILL,
    "DECODE": DECODE,
    "TARGET_VERIFY": VERIFY,
    "DRAFT_EXTEND_V2": DRAFT,
}
_WITHOUT_ROWS = ("IDLE", "PREBUILT")


class Part(msgspec.Struct, frozen=True, gc=False):
    """One request's part of a batch, as scheduled."""

    index: int
    context: int
    tokens: int
    num_prompt: int
    seen: int = 0
    sampled: int = 1
    is_decoding: bool = False
    """It decodes although the batch extends: `decoding_reqs` names it."""
    accepted: int = 0
    """Draft tokens found right, of `tokens - 1`; of a verified batch only."""
    number: int = 0
    """The number of the request on all ranks."""


class Rows(msgspec.Struct, frozen=True, gc=False):
    """Columns with one entry per row; see `Probe.slices`."""

    requests: list[int]
    phases: list[int]
    tokens: list[int]
    contexts: list[int]
    flags: list[int]
    sampled: list[int]
    proposed: list[int]
    accepted: list[int]
    numbers: list[int]
    """The numbers of the requests on all ranks."""

    @property
    def prefill_tokens(self) -> int:
        """Return how many of the tokens are prefills'."""
        of = zip(self.phases, self.tokens, strict=True)
        return sum(tokens for phase, tokens in of if phase == PREFILL)


def has_forward(mode: str) -> bool:
    """Return whether a batch of this forward mode runs the model; a prebuilt one has its KV."""
    return mode != "PREBUILT"


def phase_of(mode: str, *, is_decoding: bool = False, is_verified: bool = False) -> int:
    """Return the phase of a request in a batch.

    Args:
        mode: the batch's forward mode, by name.
        is_decoding: `decoding_reqs` of this very batch names the request. Believed in batches that
            extend; the field is stale in a batch that decodes, where it changes nothing.
        is_verified: with speculation a batch says DECODE until the worker makes it verify.

    Raises:
        ValueError: for a mode without rows, or one this adapter has not met.
    """
    phase = _PHASES.get(mode)
    if phase is None:
        raise ValueError(f"forward mode {mode} has no phase")
    if phase == DECODE:
        return VERIFY if is_verified else DECODE
    return DECODE if phase == PREFILL and is_decoding else phase


def rows_of(mode: str, parts: Iterable[Part], *, is_verified: bool = False) -> Rows:
    """Split a batch into rows, each one kind of work of one request."""
    rows: list[tuple[int, ...]] = []
    if mode not in _WITHOUT_ROWS:
        for part in parts:
            phase = phase_of(mode, is_decoding=part.is_decoding, is_verified=is_verified)
            if phase == PREFILL:
                rows += _prefill_rows(part)
            elif part.tokens > 0:
                drafts = (part.tokens - 1, part.accepted) if phase == VERIFY else (0, 0)
                row = part.index, phase, part.tokens, part.context, 0, part.sampled, *drafts
                rows.append((*row, part.number))
    columns = list(zip(*rows, strict=True)) or [()] * 9
    return Rows(*(list(column) for column in columns))


def _prefill_rows(part: Part) -> Iterator[tuple[int, ...]]:
    end = part.context + part.tokens
    for phase, first, stop, flags in split_phases(
        part.context, end, seen=part.seen, num_prompt=part.num_prompt
    ):
        sampled = part.sampled if stop == end else 0
        yield part.index, phase, stop - first, first, flags, sampled, 0, 0, part.number


def finish_of_json(reason: Mapping[str, Any] | None, *, has_run: bool) -> str:
    """Return how a request ended, one of `FINISHES`.

    Args:
        reason: SGLang's finish reason as a dictionary; None is a client's abort.
        has_run: it had been admitted.
    """
    kind = "abort" if reason is None else str(reason.get("type"))
    if reason is None or kind in ("stop", "length"):
        return "client_cancel" if reason is None else kind
    if "timeout" in str(reason.get("message")).lower():
        return "timeout"
    status = reason.get("status_code")
    if status is None:
        return "client_cancel"
    finish = finish_of_status(int(status))
    return "server_abort" if finish == "shed" and has_run else finish


def binding(
    *, waiting: int, running: int, max_running: int, is_full: bool, has_chunk: bool
) -> Binding:
    """Return the limit that kept the scheduler from admitting one more waiting request.

    Args:
        waiting: number of requests in the queue, after scheduling.
        running: number of requests that hold a slot.
        max_running: number of slots.
        is_full: whether the scheduler reports that no more can be admitted.
        has_chunk: whether a prompt was cut: the step's token budget is spent.
    """
    if not waiting:
        return "none"
    if running >= max_running:
        return "slots"
    if has_chunk:
        return "budget"
    return "blocks" if is_full else "none"
