"""Division of a prompt by what the prefix cache did for its tokens, and the price of each class.

The classes are spans of positions. The engine's core knows those of its cache, which follow the
hit; the front end compares the text with earlier prompts and refines what the core cannot explain:

    hit │ off │ cleared │ evicted │ pending │             unmatched             │ rule │ rounding
    ────┼─────┼─────────┼─────────┼─────────┼───────────────────────────────────┼──────┼─────────
        │     │         │         │         │ namespace │ new │ changed │  new  │      │
                                                        ▲     ▲
                                              diverged_at     seen before, behind text that differs

Chunks of the prefill are cut at the borders of these spans and of the prompt's declared parts, by
the rule of `prompt_parts`. Tokens computed again after a preemption have a price of their own: the
cache did not cause it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from inferscope.attribution.prompt_parts import OUTPUT, PartLengths, PromptCost, part_spans
from inferscope.records import CACHE_CLASSES

_BEFORE = ("hit", "off", "cleared", "evicted", "pending")
"""Classes of the core that begin a prompt, in this order."""
_AFTER = ("rule", "rounding")
"""Classes of the core that end a prompt, in this order."""
Span = tuple[str, int]
"""Class and end position; each span begins at the end of the one before it."""


class Chunk(NamedTuple):
    """One chunk of a prefill, and its part of the step's time."""

    tokens: int
    context: int
    """Position of its first token."""
    share_ns: int
    own_ns: int
    """Wait of the request for its own work in the step."""
    pair_share: float
    """Share of the modelled cost that depends on query-key pairs, 0..1."""


class Likeness(NamedTuple):
    """Comparison of a prompt with earlier ones; positions in tokens."""

    diverged_at: int = 0
    """Tokens equal to those of the most similar earlier prompt; 0 without one."""
    seen: tuple[tuple[int, int], ...] = ()
    """Start and end of spans behind it that earlier prompts held."""
    is_other_namespace: bool = False
    """Whether that prompt has another salt, adapter or multimodal input."""


class CacheSegment(msgspec.Struct, frozen=True, gc=False):
    """Tokens of one class in one part of a prompt, and their price."""

    name: str
    """Class of the tokens."""
    part: str
    """Declared part of the prompt; empty without parts."""
    tokens: int
    """Number of tokens."""
    gpu_ns: int | None
    """Part of the request's attributed prefill; None if unknown."""
    ttft_ns: int | None
    """Part of the `prefill_own` row before the first token; None if unknown."""


def cache_spans(
    prompt_tokens: int,
    by_core: Mapping[str, int],
    likeness: Likeness | None,
    *,
    block_tokens: int,
) -> list[Span]:
    """Return the spans of a prompt by class; the last one ends at `prompt_tokens`.

    Args:
        prompt_tokens: length of the prompt.
        by_core: tokens by class that the core reports; excess tokens are cut off.
        likeness: the front end's comparison; None if the prompt is like no earlier one.
        block_tokens: tokens of a KV block; at least that many must be equal to be shared.
    """
    at, spans = 0, []
    for name in _BEFORE:
        at = min(prompt_tokens, at + max(0, by_core.get(name, 0)))
        spans.append((name, at))
    end, behind = prompt_tokens, []
    for name in reversed(_AFTER):
        behind.append((name, end))
        end = max(at, end - max(0, by_core.get(name, 0)))
    spans += _compared(at, end, likeness or Likeness(), block_tokens)
    spans += reversed(behind)
    return _merged(spans)


def _compared(at: int, end: int, likeness: Likeness, block_tokens: int) -> list[Span]:
    """Return the spans of the positions that the core cannot explain."""
    spans: list[Span] = []
    equal = min(likeness.diverged_at, end)
    width = max(1, block_tokens)
    blocks = equal // width * width
    if blocks > at:
        # Whole blocks are equal and were not found: another namespace has them, or nothing in the
        # records says where they went.
        spans.append(("namespace" if likeness.is_other_namespace else "unknown", blocks))
        at = blocks
    if equal > at:
        spans.append(("rounding", equal))
        at = equal
    for start, until in sorted(likeness.seen):
        start, until = min(max(start, at), end), min(until, end)
        if until > start:
            spans += [("new", start), ("changed", until)]
            at = until
    spans.append(("new", end))
    return spans


def _merged(spans: Iterable[Span]) -> list[Span]:
    """Return the spans without empty ones, and neighbours of one class as one."""
    merged: list[Span] = []
    at = 0
    for name, end in spans:
        if end <= at:
            continue
        if merged and merged[-1][0] == name:
            merged.pop()
        merged.append((name, end))
        at = end
    return merged


def tokens_by_class(spans: Sequence[Span]) -> dict[str, int]:
    """Return the tokens of each class of a prompt, without absent classes, in a fixed order."""
    found: dict[str, int] = {}
    at = 0
    for name, end in spans:
        found[name] = found.get(name, 0) + end - at
        at = end
    return {name: found[name] for name in CACHE_CLASSES if name in found}


def cache_segments(
    spans: Sequence[Span],
    chunks: Iterable[Chunk],
    *,
    declared: PartLengths,
    prefill_ns: int,
    ttft_own_ns: int | None,
) -> tuple[CacheSegment, ...]:
    """Return the prompt's tokens and their prices by class and declared part.

    Args:
        spans: the result of `cache_spans`, not empty.
        chunks: chunks of its prefill without recomputed ones.
        declared: declared parts; empty without them.
        prefill_ns: the request's share of prefill without recomputed tokens; the prices sum to it.
            They are unknown if the chunks do not.
        ttft_own_ns: `prefill_own` of the ledger up to its first token; prices sum to it.
    """
    prompt_tokens = spans[-1][1]
    parts = part_spans(declared, prompt_tokens) if declared else [("", prompt_tokens)]
    cuts = sorted({end for _, end in spans} | {end for _, end in parts})
    pieces, start, of_span, of_part = [], 0, 0, 0
    for end in cuts:
        while spans[of_span][1] <= start:
            of_span += 1
        while parts[of_part][1] <= start:
            of_part += 1
        pieces.append((spans[of_span][0], parts[of_part][0], end - start))
        start = end
    names = {f"{name} {part}": (name, part) for name, part, _ in pieces}
    cost = PromptCost([(f"{name} {part}", tokens) for name, part, tokens in pieces], prompt_tokens)
    for chunk in chunks:
        cost.add(
            chunk.tokens,
            chunk.context,
            share_ns=chunk.share_ns,
            own_ns=chunk.own_ns,
            pair_share=chunk.pair_share,
            is_recomputed=False,
        )
    priced = cost.parts(prefill_ns, cached_tokens=0, ttft_own_ns=ttft_own_ns, has_flops=False)
    if not priced or priced[-1].name == OUTPUT:  # some chunks were not seen, or are not of it
        tokens: dict[tuple[str, str], int] = {}
        for name, part, num in pieces:
            tokens[name, part] = tokens.get((name, part), 0) + num
        return tuple(CacheSegment(*of, num, None, None) for of, num in tokens.items())
    return tuple(
        CacheSegment(*names[each.name], each.tokens, each.compute_ns, each.ttft_ns)
        for each in priced
    )
