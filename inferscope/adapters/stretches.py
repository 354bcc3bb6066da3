"""The rows of a step's slices, for engines that say where a request stands and how far it goes.

    tokens     0 ....... seen ....... num_prompt ....... num_known ....... end
               recomputed  (prefill)  prefill      decode           verify

`seen` is how far the request has ever been computed: what it computes again is repeated work.
"""

from __future__ import annotations

from collections.abc import Sequence

from inferscope.probe import Probe
from inferscope.records import DECODE, DRAFT, LAST_CHUNK, PREFILL, RECOMPUTED, VERIFY


class Stretches:
    """A step's columns while they are being made; see `Probe.slices`."""

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
        """Add what one request computes: the tokens from `start` up to `end`.

        Args:
            index: of the request.
            start: tokens in the cache before.
            end: tokens in the cache after.
            num_prompt: tokens of the prompt.
            seen: tokens that were ever computed before.
            num_known: beyond these, tokens are proposals to be verified; None where all are known.
            is_sampled: the last known token's logits choose a token.
        """
        known = end if num_known is None else min(end, num_known)
        # Prefill ends where both the prompt and what was lost are restored.
        prefill_end = max(seen, num_prompt)
        for phase, flag, limit in (
            (PREFILL, RECOMPUTED, seen),
            (PREFILL, 0, num_prompt),
            (DECODE, 0, known),
        ):
            stop = min(known, limit)
            if stop > start:
                flags = flag | LAST_CHUNK if phase == PREFILL and stop == prefill_end else flag
                sampled = int(is_sampled and stop == known)
                self._row(index, phase, stop - start, start, flags, sampled)
                start = stop
        if end > known:
            self._row(index, VERIFY, end - known, known, 0, end - known)
            self.proposed[-1] = end - known

    def add_decodes(self, indices: Sequence[int], contexts: Sequence[int]) -> None:
        """Add one generated token of each request: `add`, for those past their prompts."""
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
        """Add what a draft model computes for a request."""
        self._row(index, DRAFT, end - start, start, 0, 1)

    def accept(self, num_accepted: int) -> None:
        """Say how many of the proposals of the only request were accepted."""
        if self.phases and self.phases[-1] == VERIFY:
            self.accepted[-1] = num_accepted

    def tell(self, probe: Probe, step: int) -> None:
        """Hand the rows to the probe."""
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
