"""Prompt parts: cost of one request's prefill by the source of its tokens.

A chunk of a prefill computes the positions [context, context + tokens) of a prompt, and the parts
of the prompt are part_spans of positions. So a chunk's share of its step is divided by position:

    system │ history │ retrieved                    │ user
    ───────┼─────────┼──────────────────────────────┼─────
    cached         │ chunk 1        │ chunk 2             │       own = pairs + everything else

What the model says goes by pairs of query and key is divided by the pairs of the positions of each
part, exactly; all the rest (matrices, launches, logits) equally by token. A later part costs more
per token, for it sees what stands before it. Positions that came from the cache are in no chunk and
cost nothing. Positions beyond the prompt (output computed again after a preemption) are `output`.

Each chunk adds to the parts as it comes; they are rounded once, at the end, so that the parts sum
to what the request was charged. If they did not see all of that, because the
prompt was labelled after its first chunk, there is nothing to report.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import msgspec

from inferscope.cost import FlopRates, pairs
from inferscope.records import OTHER_PART

OUTPUT = "output"
"""Part name of generated tokens that were computed again; not part of the prompt."""
_ENDLESS = 1 << 62
_MOST_SPANS = 256
"""Largest number of spans, beyond what any probe reports."""

PartLengths = Sequence[tuple[str, int]]
"""Names and token counts, in the order of the prompt."""


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


def part_spans(declared: PartLengths, prompt_tokens: int) -> list[tuple[str, int]]:
    """Lay parts out over the positions of a prompt.

    Args:
        declared: declared parts, which may be wrong.
        prompt_tokens: length of the prompt.

    Returns:
        names, and the positions where they end; each begins where the one before it ends. A
        declaration beyond the prompt's end is cut off; the undeclared rest is `other`.
    """
    laid: list[tuple[str, int]] = []
    at = 0
    for name, tokens in declared[:_MOST_SPANS]:
        end = min(at + tokens, prompt_tokens)
        if end > at:
            laid.append((name, end))
            at = end
    if at < prompt_tokens:
        laid.append((OTHER_PART, prompt_tokens))
    return laid


class PromptCost:
    """Cost of the parts of one prompt so far.

    Attributes:
        prompt_tokens: tokens of all parts.
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

    def __init__(self, declared: PartLengths, prompt_tokens: int) -> None:
        """Start before the first chunk."""
        self.prompt_tokens = prompt_tokens
        self.seen_ns = 0
        laid = part_spans(declared, prompt_tokens)
        laid.append((OUTPUT, _ENDLESS))
        numbers: dict[str, int] = {}
        self._part_of = [numbers.setdefault(name, len(numbers)) for name, _ in laid]
        """Part of each span; the last span holds all positions beyond the prompt."""
        self._names = list(numbers)
        self._ends = [end for _, end in laid]
        """End position of each span."""
        num = len(self._names)
        self._compute_ns = [0.0] * num
        self._own_ns = [0.0] * num
        """Delay in nanoseconds that the steps would have taken with this request alone, by part."""
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
            tokens: tokens of the chunk.
            context: position of its first token.
            share_ns: the request's share of the step's cost, on all ranks.
            own_ns: the request's wait for its own work there.
            pair_share: share of its modelled cost that depends on query-key pairs, 0..1.
            is_recomputed: whether all of it was computed before.
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
        """Count the FLOPs of a chunk; its rows of logits belong to its last token."""
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
            prefill_ns: the request's share of prefill cost; the parts sum to it.
            cached_tokens: positions from the start that were found in the cache.
            ttft_own_ns: `prefill_own` of its first token's ledger; the parts sum to it.
            has_flops: whether all chunks were counted.

        Returns:
            no parts if some chunks were not seen.
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
        """Return how many positions of each prompt part precede a position."""
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
