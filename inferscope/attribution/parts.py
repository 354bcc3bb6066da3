"""Prompt parts: what the prefill of one request cost, by whose tokens they were.

A chunk of a prefill computes the positions [context, context + tokens) of a prompt, and the parts
of the prompt are stretches of positions. So a chunk's share of its step is divided by position:

    system │ history │ retrieved                    │ user
    ───────┼─────────┼──────────────────────────────┼─────
    cached         │ chunk 1        │ chunk 2             │       own = pairs + everything else

What the model says goes by pairs of query and key is divided by the pairs of the positions of each
part, exactly; all the rest (matrices, launches, logits) equally by token. A later part costs more
per token, for it sees what stands before it. Positions that came from the cache are in no chunk and
cost nothing. Positions beyond the prompt (output computed again after a preemption) are `output`.

Each chunk adds to the parts as it comes; they are rounded once, at the end, by largest remainder,
so that the parts sum to what the request was charged. If they did not see all of that, because the
prompt was labelled after its first chunk, there is nothing to tell.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Protocol

import msgspec
import numpy as np

from inferscope.attribution.split import to_whole_ns
from inferscope.cost.shape import pairs
from inferscope.records import OTHER_PART

OUTPUT = "output"
"""Not of the prompt: generated tokens that were computed again."""
_ENDLESS = 1 << 62
_MOST_STRETCHES = 256
"""More than any probe tells."""

Told = Sequence[tuple[str, int]]
"""Names and tokens, in the order of the prompt."""


class PromptPart(msgspec.Struct, frozen=True, gc=False):
    """What one part of a prompt took."""

    name: str
    tokens: int
    cached_tokens: int
    """Found in the prefix cache when it was admitted."""
    recomputed_tokens: int
    """Computed again after preemptions; not counted in `tokens`."""
    compute_ns: int
    """Of the request's attributed prefill, recomputed tokens included."""
    ttft_ns: int | None
    """Of the `prefill_own` of its first token's ledger; None where that is not known."""
    flops: int | None
    """Modelled; None where the model's shape is not known."""


class Flops(Protocol):
    """Counts what slices compute (see `cost.shape`); additive over neighbouring slices."""

    def of_slices(self, tokens: int, context: int, sampled: int) -> int:
        """Return the FLOPs of a slice."""


class Stretch(msgspec.Struct, gc=False):
    """Neighbouring positions of one part, and what they cost so far."""

    name: str
    start: int
    end: int
    compute_ns: float = 0.0
    own_ns: float = 0.0
    """Of the delay of its steps: what they would have taken with this request alone."""
    recomputed_tokens: int = 0
    flops: int = 0

    def within(self, end: int) -> int:
        """Return how many of its positions come before one."""
        return max(0, min(end, self.end) - self.start)


def stretches(told: Told, prompt_tokens: int) -> list[Stretch]:
    """Lay parts out over the positions of a prompt, and over all that comes behind it.

    Args:
        told: what was said of it; it may be wrong.
        prompt_tokens: of the prompt.

    Returns:
        stretches that cover every position once. What is told beyond the prompt's end is cut off,
        what is missing of it is `other`; the last one is endless.
    """
    counts = [(name, max(0, tokens)) for name, tokens in told[:_MOST_STRETCHES]]
    laid, at = [], 0
    for name, tokens in [*counts, (OTHER_PART, prompt_tokens)]:
        end = min(at + tokens, prompt_tokens)
        if end > at:
            laid.append(Stretch(name, at, end))
            at = end
    return [*laid, Stretch(OUTPUT, at, _ENDLESS)]


class PromptCost:
    """What the parts of one prompt cost so far.

    Attributes:
        prompt_tokens: of all parts.
        seen_ns: attributed time of all chunks.
    """

    __slots__ = ("_ends", "_stretches", "prompt_tokens", "seen_ns")

    def __init__(self, told: Told, prompt_tokens: int) -> None:
        """Start before the first chunk."""
        self.prompt_tokens = prompt_tokens
        self._stretches = stretches(told, prompt_tokens)
        self._ends = [stretch.end for stretch in self._stretches]
        self.seen_ns = 0

    def add(
        self,
        tokens: int,
        context: int,
        *,
        share_ns: int,
        own_ns: int,
        pair_share: float,
        is_recomputed: bool,
    ) -> None:
        """Divide a chunk.

        Args:
            tokens: of it.
            context: position of the first.
            share_ns: what the request was charged for it, on all ranks.
            own_ns: what it waited for itself there.
            pair_share: how much of its modelled cost goes by pairs of query and key, 0..1.
            is_recomputed: all of it was computed before.
        """
        self.seen_ns += share_ns
        tokens = max(1, tokens)
        end = context + tokens
        per_token = (1.0 - pair_share) / tokens
        per_pair = pair_share / pairs(tokens, context)
        start = context
        for at in range(bisect_right(self._ends, context), len(self._ends)):
            stretch = self._stretches[at]
            num = min(end, stretch.end) - start
            weight = per_token * num + per_pair * pairs(num, start)
            stretch.compute_ns += weight * share_ns
            if is_recomputed:
                stretch.recomputed_tokens += num
            else:
                stretch.own_ns += weight * own_ns
            start += num
            if start == end:
                return

    def count(self, tokens: int, context: int, sampled: int, flops: Flops) -> None:
        """Count a chunk's FLOPs; its rows of logits are its last token's."""
        start, end = context, context + tokens
        for at in range(bisect_right(self._ends, context), len(self._ends)):
            stretch = self._stretches[at]
            num = min(end, stretch.end) - start
            is_last = start + num == end
            stretch.flops += flops.of_slices(num, start, sampled if is_last else 0)
            start += num
            if is_last:
                return

    def parts(
        self,
        prefill_ns: int,
        *,
        cached_tokens: int,
        ttft_own_ns: int | None,
        has_flops: bool,
    ) -> tuple[PromptPart, ...]:
        """Return the parts, each name once, in the order of the prompt.

        Args:
            prefill_ns: what the request was charged for prefill; the parts sum to it.
            cached_tokens: positions from the start that were found in the cache.
            ttft_own_ns: `prefill_own` of its first token's ledger; the parts sum to it.
            has_flops: all chunks were counted.

        Returns:
            none where chunks were not seen.
        """
        if self.seen_ns != prefill_ns:
            return ()
        by_name: dict[str, list[Stretch]] = {}
        for stretch in self._stretches:
            if stretch.end < _ENDLESS or stretch.recomputed_tokens or stretch.compute_ns:
                by_name.setdefault(stretch.name, []).append(stretch)
        groups = list(by_name.values())
        compute_ns = _whole([sum(one.compute_ns for one in group) for group in groups], prefill_ns)
        own_ns = [sum(one.own_ns for one in group) for group in groups]
        ttft_ns: list[int] | None = None
        if ttft_own_ns is not None and (sum(own_ns) > 0 or not ttft_own_ns):
            ttft_ns = _whole(own_ns, ttft_own_ns)
        prompt_tokens = self.prompt_tokens
        return tuple(
            PromptPart(
                name=group[0].name,
                tokens=sum(one.within(prompt_tokens) for one in group),
                cached_tokens=sum(one.within(min(cached_tokens, prompt_tokens)) for one in group),
                recomputed_tokens=sum(one.recomputed_tokens for one in group),
                compute_ns=compute_ns[at],
                ttft_ns=None if ttft_ns is None else ttft_ns[at],
                flops=sum(one.flops for one in group) if has_flops else None,
            )
            for at, group in enumerate(groups)
        )


def _whole(exact: list[float], total_ns: int) -> list[int]:
    if not exact:
        return []
    whole: list[int] = to_whole_ns(np.array(exact), total_ns).tolist()
    return whole
