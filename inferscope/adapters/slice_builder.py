"""Builder of a step's slices from the token ranges that each request computes.

    tokens     0 ....... seen ....... num_prompt ....... num_known ....... end
               recomputed  (prefill)  prefill      decode           verify

`seen` is the number of tokens computed before: computing them again is recomputation.
"""

from __future__ import annotations

from collections.abc import Sequence

from inferscope.probe import Probe, split_phases
from inferscope.records import DECODE, DRAFT, VERIFY


class SliceBuilder:
    """Columns of a step's slices while they are built; see `Probe.slices`."""

    def __init__(self) -> None:
        self.requests: list[int] = []
        self.phases: list[int] = []
        self.tokens: list[int] = []
        self.contexts: list[int] = []
        self.flags: list[int] = []
        self.sampled: list[int] = []
        self.proposed: list[int] = []
        self.accepted: list[int] = []
        self.num_tokens = 0

    def add(
        self,
        index: int,
        start: int,
        end: int,
        *,
        num_prompt: int,
        seen: int,
        num_known: int | None = None,
        is_sampled: bool = True,
    ) -> None:
        """Add one request's slices: the tokens from `start` up to `end`.

        Args:
            index: index of the request.
            start: number of cached tokens before the step.
            end: number of cached tokens after it.
            num_prompt: number of tokens of the prompt.
            seen: number of tokens computed before.
            num_known: number of known tokens; those beyond are drafts to be verified. None if all
                are known.
            is_sampled: whether the last known token's logits choose a token.
        """
        known = end if num_known is None else min(end, num_known)
        for phase, first, stop, flags in split_phases(
            start, known, seen=seen, num_prompt=num_prompt
        ):
            sampled = int(is_sampled and stop == known)
            self._row(index, phase, stop - first, first, flags, sampled)
        if end > known:
            self._row(index, VERIFY, end - known, known, 0, end - known)
            self.proposed[-1] = end - known

    def add_decodes(self, indices: Sequence[int], contexts: Sequence[int]) -> None:
        """Add one generated token of each request: a shorter `add` for requests that decode."""
        num = len(indices)
        self.requests += indices
        self.phases += [DECODE] * num
        self.tokens += [1] * num
        self.contexts += contexts
        self.flags += [0] * num
        self.sampled += [1] * num
        self.proposed += [0] * num
        self.accepted += [0] * num
        self.num_tokens += num

    def add_draft(self, index: int, start: int, end: int) -> None:
        """Add the tokens that a draft model computes for a request."""
        self._row(index, DRAFT, end - start, start, 0, 1)

    def accept(self, num_accepted: int) -> None:
        """Set the number of accepted drafts of the only request."""
        if self.phases and self.phases[-1] == VERIFY:
            self.accepted[-1] = num_accepted

    def write_to(self, probe: Probe, step: int) -> None:
        """Record the slices with a probe."""
        has_proposals = VERIFY in self.phases
        probe.slices(
            step,
            requests=self.requests,
            phases=self.phases,
            tokens=self.tokens,
            contexts=self.contexts,
            flags=self.flags,
            sampled=self.sampled,
            proposed=self.proposed if has_proposals else (),
            accepted=self.accepted if has_proposals else (),
        )

    def _row(
        self, index: int, phase: int, num_tokens: int, context: int, flags: int, sampled: int
    ) -> None:
        self.requests.append(index)
        self.phases.append(phase)
        self.tokens.append(num_tokens)
        self.contexts.append(context)
        self.flags.append(flags)
        self.sampled.append(sampled)
        self.proposed.append(0)
        self.accepted.append(0)
        self.num_tokens += num_tokens
