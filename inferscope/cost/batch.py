"""What of a step's make-up the cost model sees: one row per request, and its sums.

Made once per step and passed around, because at this rate every pass over a small array counts.
Who is in a step changes seldom, how far each has come changes always: `Team` is the part that
consecutive decode steps share.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from inferscope.cost.shape import pairs

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


_MOST_SINGLES = 1024
_NONE: Ints = np.zeros(0, dtype=np.int64)


class Team:
    """The requests of a step, by what each of them computes.

    Attributes:
        tokens: [requests], scheduled, each at least 1.
        sampled: [requests], rows of logits.
        num_tokens: their sum.
        num_rows: sampled rows in all.
        chunks: positions of the requests with more than one token.
        num_single: requests with one token.
        features: what `cost.fit` has worked out for it.
        shared: what `attribution.split` has worked out for it, and the key of the model.
        alone: what `attribution.counterfactual` has.
    """

    __slots__ = (
        "alone",
        "chunks",
        "features",
        "num_rows",
        "num_single",
        "num_tokens",
        "sampled",
        "shared",
        "tokens",
    )

    def __init__(self, tokens: Ints, sampled: Ints) -> None:
        self.tokens = tokens
        self.sampled = sampled
        self.num_tokens = int(np.add.reduce(tokens))
        self.num_rows = int(np.add.reduce(sampled))
        has_chunks = self.num_tokens > len(tokens)
        self.chunks: Ints = (tokens != 1).nonzero()[0] if has_chunks else _NONE
        self.num_single = len(tokens) - len(self.chunks)
        self.features: tuple[float, ...] | None = None
        self.shared: tuple[object, float | Floats] | None = None
        self.alone: tuple[object, float | Floats] | None = None


class Singles:
    """Teams of requests with one token and one sampled row each, told apart by number."""

    def __init__(self) -> None:
        self._by_num: dict[int, Team] = {}

    def team(self, num: int) -> Team:
        """Return the team of so many."""
        found = self._by_num.get(num)
        if found is None:
            if len(self._by_num) >= _MOST_SINGLES:
                self._by_num.clear()
            found = self._by_num[num] = Team(np.ones(num, np.int64), np.ones(num, np.int64))
        return found


class Batch:
    """A team and how far it has come.

    Attributes:
        team: who computes what.
        context: [requests], cached before.
        visible: [requests], context and new tokens.
        single_visible: visible tokens of the requests with one token, in all.
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
        "visible",
    )

    def __init__(self, team: Team, context: Ints) -> None:
        self.team = team
        self.context = context
        self.visible: Ints = context + team.tokens
        self.single_visible = int(np.add.reduce(self.visible))
        chunks = team.chunks
        self.chunk_pairs: list[int] = []
        self.chunk_visible: list[int] = []
        of_singles = self.visible
        if len(chunks):
            of_singles = self.visible.copy()
            for at in chunks.tolist():
                self.chunk_pairs.append(pairs(team.tokens.item(at), context.item(at)))
                self.chunk_visible.append(of_singles.item(at))
                of_singles[at] = 0
            self.single_visible -= sum(self.chunk_visible)
        self.longest_single = int(np.maximum.reduce(of_singles))
