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

Each chunk adds to the parts as it comes; they are rounded once, at the end, so that the parts sum
to what the request was charged. If they did not see all of that, because the
prompt was labelled after its first chunk, there is nothing to tell.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import msgspec

from inferscope.cost.flops import FlopRates
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
    """Cost of one part of a prompt."""

    name: str
    """Label of the part."""
    tokens: int
    """Tokens of the part."""
    cached_tokens: int
    """Tokens found in the prefix cache at admission."""
    recomputed_tokens: int
    """Tokens computed again after preemptions; not counted in `tokens`."""
    compute_ns: int
    """Part of the request's attributed prefill, recomputed tokens included."""
    ttft_ns: int | None
    """Part of the `prefill_own` row of its first token's ledger; None where that is not known."""
    flops: int | None
    """Modelled FLOPs; None where the model's shape is not known."""


def stretches(told: Told, prompt_tokens: int) -> list[tuple[str, int]]:
    """Lay parts out over the positions of a prompt.

    Args:
        told: what was said of it; it may be wrong.
        prompt_tokens: of the prompt.

    Returns:
        names, and the positions where they end; each begins where the one before it ends. What is
        told beyond the prompt's end is cut off, what is missing of it is `other`.
    """
    laid: list[tuple[str, int]] = []
    at = 0
    for name, tokens in told[:_MOST_STRETCHES]:
        end = min(at + tokens, prompt_tokens)
        if end > at:
            laid.append((name, end))
            at = end
    if at < prompt_tokens:
        laid.append((OTHER_PART, prompt_tokens))
    return laid


class PromptCost:
    """What the parts of one prompt cost so far.

    Attributes:
        prompt_tokens: of all parts.
        seen_ns: attributed time of all chunks.
    """

    __slots__ = (
        "_compute_ns",
        "_ends",
        "_flops",
        "_names",
        "_own_ns",
        "_part_of",
        "_recomputed",
        "prompt_tokens",
        "seen_ns",
    )

    def __init__(self, told: Told, prompt_tokens: int) -> None:
        """Start before the first chunk."""
        self.prompt_tokens = prompt_tokens
        self.seen_ns = 0
        laid = stretches(told, prompt_tokens)
        laid.append((OUTPUT, _ENDLESS))
        numbers: dict[str, int] = {}
        self._part_of = [numbers.setdefault(name, len(numbers)) for name, _ in laid]
        """By stretch; the last one is all that is not of the prompt."""
        self._names = list(numbers)
        self._ends = [end for _, end in laid]
        """By stretch."""
        num = len(self._names)
        self._compute_ns = [0.0] * num
        self._own_ns = [0.0] * num
        """Of the delay of its steps: what they would have taken with this request alone."""
        self._recomputed = [0] * num
        self._flops = [0] * num

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
        start, at = context, bisect_right(self._ends, context)
        while start < end:
            part = self._part_of[at]
            num = min(end, self._ends[at]) - start
            weight = per_token * num + per_pair * pairs(num, start)
            self._compute_ns[part] += weight * share_ns
            if is_recomputed:
                self._recomputed[part] += num
            else:
                self._own_ns[part] += weight * own_ns
            start += num
            at += 1

    def count(self, tokens: int, context: int, sampled: int, flops: FlopRates) -> None:
        """Count a chunk's FLOPs; its rows of logits are its last token's."""
        start, end, at = context, context + tokens, bisect_right(self._ends, context)
        while start < end:
            num = min(end, self._ends[at]) - start
            rows = sampled if start + num == end else 0
            self._flops[self._part_of[at]] += flops.of_slices(num, start, rows)
            start += num
            at += 1

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
        tokens, cached = self._tokens_before(self.prompt_tokens), self._tokens_before(cached_tokens)
        num = len(self._names)
        if not (tokens[-1] or self._recomputed[-1] or self._compute_ns[-1]):
            num -= 1  # nothing but the prompt was computed
        compute_ns = _whole(self._compute_ns[:num], prefill_ns)
        ttft_ns: list[int] | None = None
        if ttft_own_ns is not None and (not ttft_own_ns or sum(self._own_ns[:num]) > 0):
            ttft_ns = _whole(self._own_ns[:num], ttft_own_ns)
        return tuple(
            PromptPart(
                self._names[part],
                tokens[part],
                cached[part],
                self._recomputed[part],
                compute_ns[part],
                None if ttft_ns is None else ttft_ns[part],
                self._flops[part] if has_flops else None,
            )
            for part in range(num)
        )

    def _tokens_before(self, position: int) -> list[int]:
        """Return how many positions of each part of the prompt come before one."""
        found, start = [0] * len(self._names), 0
        for part, end in zip(self._part_of[:-1], self._ends, strict=False):
            if start >= position:
                break
            found[part] += min(end, position) - start
            start = end
        return found


def _whole(exact: list[float], total_ns: int) -> list[int]:
    """Scale parts to a total, rounded where one ends and the next begins: they sum to it exactly.

    Not by largest remainder, which costs ten times as much for so few, and may give a nanosecond to
    a part of nothing.
    """
    ends = list(accumulate(exact))
    if not ends or ends[-1] <= 0:
        return [0] * len(exact)
    whole, before_ns = [], 0
    for end in ends:
        share = end / ends[-1]
        until_ns = round(total_ns * share) if share < 1 else total_ns
        whole.append(until_ns - before_ns)
        before_ns = until_ns
    return whole
