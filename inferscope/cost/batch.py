"""What of a step's make-up the cost model sees: one row per request, and its sums.

Who is in a step changes seldom, how far each has come changes always: `Team` is the part that
consecutive decode steps share.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from inferscope.cost.shape import pairs

Ints = NDArray[np.int64]


_MOST_TEAMS = 1024


Chunk = tuple[int, int, int]
"""Position, tokens, sampled rows."""


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
        features: what `cost.fit` has worked out for it.
    """

    __slots__ = (
        "chunk_tokens",
        "chunks",
        "features",
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
        self.features: tuple[float, ...] | None = None

    @classmethod
    def plain(cls, num: int, chunks: tuple[Chunk, ...]) -> Team:
        """Return the team of requests with one token and one sampled row each, but for chunks.

        Args:
            num: of requests.
            chunks: of several tokens each, in order.
        """
        team = cls.__new__(cls)
        team.tokens = np.ones(num, dtype=np.int64)
        team.sampled = np.ones(num, dtype=np.int64)
        team.chunks, team.chunk_tokens = [], []
        team.num_rows = num
        for at, tokens, rows in chunks:
            team.tokens[at] = tokens
            team.sampled[at] = rows
            team.chunks.append(at)
            team.chunk_tokens.append(tokens)
            team.num_rows += rows - 1
        team.num_single = num - len(chunks)
        team.num_tokens = team.num_single + sum(team.chunk_tokens)
        team.features = None
        return team


class PlainTeams:
    """Plain teams, each made once: those that fill a budget with one prompt are much alike."""

    def __init__(self) -> None:
        self._by_make_up: dict[tuple[int, tuple[Chunk, ...]], Team] = {}

    def team(self, num: int, chunks: tuple[Chunk, ...] = ()) -> Team:
        """Return a team; see `Team.plain`."""
        key = (num, chunks)
        found = self._by_make_up.get(key)
        if found is None:
            if len(self._by_make_up) >= _MOST_TEAMS:
                self._by_make_up.clear()
            found = self._by_make_up[key] = Team.plain(num, chunks)
        return found


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

    def __init__(self, team: Team, context: Ints, *, sums: tuple[int, int] | None = None) -> None:
        """Take a team.

        Args:
            team: who computes what.
            context: [requests].
            sums: visible tokens of those with one token, in all and at most, where they are known.
        """
        self.team = team
        self.context = context
        if sums is None:
            sums = _visible(team, context)
        self.single_visible, self.longest_single = sums
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
