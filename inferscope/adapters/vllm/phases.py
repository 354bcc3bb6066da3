"""Phases: which part of a scheduled request is prefill, which decode, which was computed before.

vLLM's scheduler knows no phases: it lets `num_computed_tokens` catch up with the tokens there are.
The position of a request distinguishes them:

    positions   0 ....... ever ....... num_prompt ....... num_tokens ....... + drafts
                recomputed  (prefill)    prefill           decode             verify

`ever` is how far it had come before it was preempted; a resumed request computes up to there
again, whether its tokens came from the prompt or were generated. Each stretch becomes a row.

With asynchronous scheduling a step is planned before the draft tokens of the one before it are
judged, and its context counts them all as accepted. Rows are therefore made when a step is planned
and set right (`Row.context` minus what was rejected since) when its outputs are known.
"""

from __future__ import annotations

from typing import NamedTuple

from inferscope.probe import split_phases
from inferscope.records import DECODE, VERIFY, RequestIndex


class Progress:
    """Progress of one request.

    Attributes:
        index: the probe's.
        num_prompt: tokens of its prompt.
        ever: positions computed so far, preemptions notwithstanding.
        rejected: draft tokens that were computed in vain, all steps together.
        has_run: it was scheduled before.
        is_preempted: it was, and has not been scheduled since.
        coming: KV blocks from another engine, not there yet: since when, bytes, from where.
    """

    __slots__ = ("coming", "ever", "has_run", "index", "is_preempted", "num_prompt", "rejected")

    def __init__(self, index: RequestIndex, num_prompt: int) -> None:
        self.index = index
        self.num_prompt = num_prompt
        self.ever = 0
        self.rejected = 0
        self.has_run = False
        self.is_preempted = False
        self.coming: tuple[int, int, str] | None = None

    def again(self, num_prompt: int, *, ever: int) -> Progress:
        """Return the progress of the same request from where it is scheduled anew.

        Args:
            num_prompt: tokens of its prompt by now.
            ever: positions computed so far that hold the same tokens still.
        """
        progress = Progress(self.index, num_prompt)
        progress.ever, progress.has_run, progress.coming = ever, True, self.coming
        return progress


class Row(NamedTuple):
    """One phase of one request in one step."""

    phase: int
    tokens: int
    context: int
    flags: int
    sampled: int
    """Rows of logits."""


class Part(NamedTuple):
    """One request's part of a planned step."""

    progress: Progress
    context: int
    tokens: int
    drafts: int
    rejected_before: int
    """What was known to be rejected when this was planned."""
    rows: tuple[Row, ...]

    @property
    def true_context(self) -> int:
        """Return the context with the drafts that were judged since it was planned."""
        return max(0, self.context - (self.progress.rejected - self.rejected_before))

    def computed(self, *, accepted: int) -> None:
        """Note that the step was executed, and how many of its draft tokens were accepted."""
        progress, rejected = self.progress, max(0, self.drafts - accepted)
        progress.ever = max(progress.ever, self.true_context + self.tokens - rejected)
        progress.rejected += rejected


def part_of(progress: Progress, *, context: int, tokens: int, drafts: int) -> Part:
    """Split what is scheduled of a request into rows.

    Args:
        progress: the request's.
        context: its tokens in the KV cache before, `num_computed_tokens`.
        tokens: scheduled, at least one.
        drafts: of these, the last ones that are speculative.
    """
    decode_from = max(progress.ever, progress.num_prompt)
    end = context + tokens
    if context >= decode_from and not drafts:
        rows: tuple[Row, ...] = (Row(DECODE, tokens, context, 0, 1),)
    else:
        rows = _rows(progress, context, end, end - min(drafts, tokens))
    return Part(progress, context, tokens, drafts, progress.rejected, rows)


def _rows(progress: Progress, start: int, end: int, first_draft: int) -> tuple[Row, ...]:
    rows = [
        # vLLM computes logits for the last token of each request, also of one that has only part
        # of its prompt, and for every draft token.
        Row(phase, stop - first, first, flags, int(stop == first_draft))
        for phase, first, stop, flags in split_phases(
            start, first_draft, seen=progress.ever, num_prompt=progress.num_prompt
        )
    ]
    if end > first_draft:
        num_drafts = end - first_draft
        rows.append(Row(VERIFY, num_drafts, first_draft, 0, num_drafts))
    return tuple(rows)
