"""Speculative decoding: tokens are proposed cheaply, and one forward pass verifies them.

    tokens   0 ......... computed ......... len(tokens) ......... + len(draft)
             in the KV cache      known                 proposed

A request computes its last known token and its draft in one slice, and every row of logits chooses
a token as it would without the draft: the likeliest, or the one that the position's own random
number selects. A draft token is accepted if it is the token chosen before it, so the first row
after the accepted ones chooses a token too. The output is therefore the same as without drafts.
Sampling by rejection would accept more drafts of a sampled request, but change its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from inferscope.engine.scheduler import Slice

_NGRAM_SIZES = (2, 1)
"""Lengths of the n-grams, best first."""


UNKNOWN = -1
"""Draft token in a plan whose draft model has not run yet."""


def draft_start(part: Slice) -> int:
    """Return the first position that the draft model reads for a slice of the target.

    It has not read the last token that it proposed, so where that token was accepted it is read
    with the next one.
    """
    return part.context - (part.context >= part.request.num_prompt)


def verified(draft: Sequence[int], chosen: Sequence[int]) -> list[int]:
    """Return the tokens that a step adds to a request: those chosen up to the first rejection.

    Args:
        draft: proposed tokens.
        chosen: tokens chosen after the last known token and after each proposed one.
    """
    num_accepted = 0
    while num_accepted < len(draft) and draft[num_accepted] == chosen[num_accepted]:
        num_accepted += 1
    return list(chosen[: num_accepted + 1])


class NgramIndex:
    """Index of one request's tokens by the n-grams before them.

    Source: prompt lookup decoding, Saxena (2023),
    https://github.com/apoorvumang/prompt-lookup-decoding.
    """

    def __init__(self) -> None:
        self._next_by_ngram: dict[tuple[int, ...], int] = {}
        """Position after the latest occurrence of an n-gram."""
        self._num_indexed = 0

    def propose(self, tokens: Sequence[int], num: int) -> list[int]:
        """Return the `num` tokens after the latest earlier occurrence of the last n-gram.

        Args:
            tokens: the request's tokens; those of earlier calls are their beginning.
            num: number of tokens; an occurrence that has fewer behind it continues with its period.

        Returns:
            No tokens without an earlier occurrence.
        """
        for end in range(self._num_indexed + 1, len(tokens)):
            for size in _NGRAM_SIZES:
                self._next_by_ngram[tuple(tokens[max(0, end - size) : end])] = end
        self._num_indexed = len(tokens) - 1
        for size in _NGRAM_SIZES:
            start = self._next_by_ngram.get(tuple(tokens[-size:]))
            if start is not None:
                followed = tokens[start : start + num]
                return [followed[idx % len(followed)] for idx in range(num)]
        return []
