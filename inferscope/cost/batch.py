"""What of one step's make-up the cost model sees: one row per request, and its sums."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from inferscope.cost.shape import pairs

Ints = NDArray[np.int64]


class Team:
    """The requests of a step, by what each of them computes.

    Attributes:
        tokens: [requests], scheduled, each at least 1.
        num_tokens: their sum.
        num_rows: sampled rows of logits, in all.
        chunks: positions of the requests with more than one token.
        chunk_tokens: [chunks].
        num_single: requests with one token.
        sampled: [requests], rows of logits.
    """

    __slots__ = (
        "chunk_tokens",
        "chunks",
        "num_rows",
        "num_single",
        "num_tokens",
        "sampled",
        "tokens",
    )

    def __init__(self, tokens: Ints, sampled: Ints) -> None:
        self.tokens, self.sampled = tokens, sampled
        self.num_tokens = int(np.add.reduce(tokens))
        self.num_rows = int(np.add.reduce(sampled))
        self.chunks: list[int] = []
        if self.num_tokens > len(tokens):
            self.chunks = (tokens != 1).nonzero()[0].tolist()
        self.chunk_tokens: list[int] = [tokens.item(at) for at in self.chunks]
        self.num_single = len(tokens) - len(self.chunks)


class Batch:
    """A team and how far it has come.

    Attributes:
        team: who computes what.
        context: [requests], cached before.
        single_visible: visible tokens (context and new) of the requests with one token, in all.
        longest_single: the most that one of them has, 0 where there is none.
        chunk_pairs: [chunks], query-key pairs.
        chunk_visible: [chunks].
    """

    __slots__ = (
        "chunk_pairs",
        "chunk_visible",
        "context",
        "longest_single",
        "single_visible",
        "team",
    )

    def __init__(self, team: Team, context: Ints) -> None:
        """Take a team and how far each has come, [requests]."""
        self.team = team
        self.context = context
        self.single_visible, self.longest_single = _visible(team, context)
        self.chunk_pairs: list[int] = []
        self.chunk_visible: list[int] = []
        for at, tokens in zip(team.chunks, team.chunk_tokens, strict=True):
            cached = context.item(at)
            self.chunk_pairs.append(pairs(tokens, cached))
            self.chunk_visible.append(cached + tokens)


def _visible(team: Team, context: Ints) -> tuple[int, int]:
    """Return visible tokens of the requests with one token, in all and at most."""
    if not team.num_single:
        return 0, 0
    visible = 1 + (context[team.tokens == 1] if team.chunks else context)
    return int(np.add.reduce(visible)), int(np.maximum.reduce(visible))
