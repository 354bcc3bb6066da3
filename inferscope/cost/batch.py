"""What of a step's make-up the cost model sees: one row per request, and its sums.

Made once per step and passed around, because at this rate every pass over a small array counts.
Who is in a step changes seldom, how far each has come changes always: `Team` is the part that
consecutive decode steps share.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from inferscope.cost.shape import pairs

Floats = NDArray[np.float64]
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
        chunk_rows: [chunks], sampled.
        num_single: requests with one token.
        singles: [singles], their positions; None where there are no others.
        rows: [requests], sampled; None where each request with one token samples one row.
        features: what `cost.fit` has worked out for it.
        shared: what `attribution.split` has worked out for it, and the key of the model.
        spread: of its last step.
        alone: what `cost.alone` has.
        classes: what `attribution.counterfactual` has.
        weights: what `attribution.weights` has, and of which model's.
        moved: what `collector.moved` has of the decodes, likewise.
    """

    __slots__ = (
        "alone",
        "chunk_rows",
        "chunk_tokens",
        "chunks",
        "classes",
        "features",
        "moved",
        "num_rows",
        "num_single",
        "num_tokens",
        "rows",
        "shared",
        "singles",
        "spread",
        "tokens",
        "weights",
    )

    def __init__(self, tokens: Ints, sampled: Ints) -> None:
        self.tokens = tokens
        self.num_tokens = int(np.add.reduce(tokens))
        self.num_rows = int(np.add.reduce(sampled))
        self.chunks: list[int] = []
        if self.num_tokens > len(tokens):
            self.chunks = (tokens != 1).nonzero()[0].tolist()
        self.chunk_tokens: list[int] = [tokens.item(at) for at in self.chunks]
        self.chunk_rows: list[int] = [sampled.item(at) for at in self.chunks]
        self.num_single = len(tokens) - len(self.chunks)
        self.singles = _singles(tokens) if self.chunks else None
        num_plain = np.count_nonzero(sampled == 1) - self.chunk_rows.count(1)
        self.rows: Ints | None = None if num_plain == self.num_single else sampled
        self.features: tuple[float, ...] | None = None
        self.shared: tuple[object, Line] | None = None
        self.spread: Spread | None = None
        self.alone: tuple[object, Line] | None = None
        self.weights: tuple[object, Any] | None = None
        self.classes: tuple[object, float, float] | None = None
        self.moved: tuple[object, Any] | None = None

    @classmethod
    def plain(cls, num: int, chunks: tuple[Chunk, ...]) -> Team:
        """Return the team of requests with one token and one sampled row each, but for chunks.

        Args:
            num: of requests.
            chunks: of several tokens each, in order.
        """
        team = cls.__new__(cls)
        team.tokens = np.ones(num, dtype=np.int64)
        team.chunks, team.chunk_tokens, team.chunk_rows = [], [], []
        for at, tokens, rows in chunks:
            team.tokens[at] = tokens
            team.chunks.append(at)
            team.chunk_tokens.append(tokens)
            team.chunk_rows.append(rows)
        team.num_single = num - len(chunks)
        team.singles = _singles(team.tokens) if chunks else None
        team.num_tokens = team.num_single + sum(team.chunk_tokens)
        team.num_rows = team.num_single + sum(team.chunk_rows)
        team.rows = team.features = team.shared = team.spread = team.alone = None
        team.weights = team.classes = team.moved = None
        return team

    def rows_of(self, at: int) -> int:
        """Return how many rows one request samples."""
        if self.rows is not None:
            return self.rows.item(at)
        return self.chunk_rows[self.chunks.index(at)] if at in self.chunks else 1


def _singles(tokens: Ints) -> Ints:
    singles: Ints = (tokens == 1).nonzero()[0]
    return singles


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


class Spread:
    """How much further than the first of a team's requests with one token the others have come.

    Which stays the same while they decode together: what follows from it is kept with it.

    Attributes:
        key: `ahead`, as bytes.
        ahead: [singles], tokens.
        total: their sum.
        most: of them.
        padded: what `attribution.split` has worked out for it, and what of the team's it rests on.
    """

    __slots__ = ("ahead", "key", "most", "padded", "total")

    def __init__(self, key: bytes, ahead: Ints) -> None:
        self.key = key
        self.ahead = ahead
        self.total = int(np.add.reduce(ahead))
        self.most: int = ahead.item(ahead.argmax())  # a quarter of a reduction's time
        self.padded: tuple[Line, Line] | None = None


class Batch:
    """A team and how far it has come.

    Attributes:
        team: who computes what.
        context: [requests], cached before.
        context_float: the same, for lines over it.
        spread: of the requests with one token; None where there is none.
        single_visible: visible tokens (context and new) of the requests with one token, in all.
        longest_single: the most that one of them has, 0 where there is none.
        chunk_pairs: [chunks], query-key pairs.
        chunk_visible: [chunks].
    """

    __slots__ = (
        "chunk_pairs",
        "chunk_visible",
        "context",
        "context_float",
        "longest_single",
        "single_visible",
        "spread",
        "team",
    )

    def __init__(self, team: Team, context: Ints) -> None:
        self.team = team
        self.context = context
        self.context_float: Floats = context.astype(np.float64)
        self.chunk_pairs: list[int] = []
        self.chunk_visible: list[int] = []
        self.single_visible = self.longest_single = 0
        self.spread: Spread | None = None
        if team.num_single:
            of_singles = context if team.singles is None else context[team.singles]
            first = of_singles.item(0)
            ahead = of_singles - of_singles[0]  # a number off it takes longer than a scalar
            key, spread = ahead.tobytes(), team.spread
            if spread is None or spread.key != key:
                spread = team.spread = Spread(key, ahead)
            self.spread = spread
            self.single_visible = spread.total + team.num_single * (first + 1)
            self.longest_single = spread.most + first + 1
        if not team.chunks:
            return
        for at, tokens in zip(team.chunks, team.chunk_tokens, strict=True):
            cached = context.item(at)
            self.chunk_pairs.append(pairs(tokens, cached))
            self.chunk_visible.append(cached + tokens)


class Line(msgspec.Struct, frozen=True, gc=False):
    """Nanoseconds by request: a line over visible tokens, and the chunks', one by one.

    What a step's requests with one token pay differs by how much they see and by nothing else, so
    few numbers stand for all of them until the last moment.
    """

    slope: float
    """Per visible token."""
    level: float | Floats
    """Of each; [requests] where they differ."""
    chunks: list[float]
    """[chunks], in place of the line."""
    levels: float | None = None
    """The sum of the levels without the chunks', if it is known already."""

    def total(self, batch: Batch) -> float:
        """Return the sum over all requests."""
        team, level = batch.team, self.level
        if self.levels is not None:
            levels = self.levels
        elif isinstance(level, float):
            levels = level * team.num_single
        else:
            levels = float(np.add.reduce(level if team.singles is None else level[team.singles]))
        return self.slope * batch.single_visible + levels + sum(self.chunks)

    def values(self, batch: Batch, scale: float = 1.0) -> Floats:
        """Return each request's nanoseconds, scaled: [requests]."""
        values: Floats = batch.context_float * (self.slope * scale)
        values += (self.slope + self.level) * scale
        if self.chunks:
            for at, value in zip(batch.team.chunks, self.chunks, strict=True):
                values[at] = value * scale
        return values

    def one(self, batch: Batch, at: int) -> float:
        """Return one request's nanoseconds."""
        chunks = batch.team.chunks
        if at in chunks:
            return self.chunks[chunks.index(at)]
        level = self.level if isinstance(self.level, float) else self.level.item(at)
        return self.slope * (batch.context.item(at) + 1) + level
