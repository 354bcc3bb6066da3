"""Who is in a step and for what, read from its slices: made once, kept while nobody comes or goes.

A decode step differs from the last one in its contexts only, and a team that takes a prompt in does
so in a few kinds of steps. So the last kinds are kept, and all of them name their requests by the
same array of slots: who holds two such arrays can tell by identity that it is the same requests.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from inferscope.collector.slots import SlotMap
from inferscope.cost.batch import Chunk, PlainTeams, Team
from inferscope.cost.shape import pairs
from inferscope.records import COLUMNS, DRAFT, PREFILL, RECOMPUTED, VERIFY, StepSlices

Ints = NDArray[np.int64]
Bytes = NDArray[np.uint8]

_FEW = 4
"""Prefills that are cheaper told one by one than by column."""
_MOST_KINDS = 8
_MOST_MAKE_UPS = 16
_MOST_PAIRS = 1 << 40
"""Of query and key in a slice: a million tokens behind half a million. More is damage."""
_U32 = np.dtype(COLUMNS["contexts"])
_ONE_TOKEN, _ONE_ROW = b"\1\0\0\0", b"\1\0"
"""One, as the columns have it."""


class Rows:
    """Who is in a step and for what: all of its slices but the contexts.

    One row is one phase of one request; a request may have several.

    Attributes:
        key: all columns but the contexts, as recorded.
        slots: [rows].
        slot_bytes: the same, for the digest.
        tokens: [rows].
        members: [requests], the slots, each once.
        member_of_row: [rows], positions in `members`; None where rows and requests are the same.
        team: what each request computes.
        prefills: positions of the rows that are prefills.
        num_prefill_tokens: of these.
        member_prefills: positions of the requests that have one.
        recomputed: [requests], tokens lost to a preemption; None where there are none.
        is_simple: a few prefills at most, all others decode and sample one token each, one row for
            each request; nothing is drafted or verified.
    """

    __slots__ = (
        "_slices",
        "is_simple",
        "key",
        "member_of_row",
        "member_prefills",
        "members",
        "num_prefill_tokens",
        "prefills",
        "recomputed",
        "slot_bytes",
        "slots",
        "team",
        "tokens",
    )

    def __init__(
        self,
        slices: StepSlices,
        slots: Ints,
        teams: PlainTeams,
        *,
        like: Rows | None = None,
        alike: Rows | None = None,
    ) -> None:
        """Read the columns.

        Args:
            slices: the step's.
            slots: [rows].
            teams: those that are plain.
            like: rows of the same slots, in the same order.
            alike: rows of others, one for each of them, that are otherwise the same.

        Raises:
            ValueError: they do not fit together.
        """
        self.key = _key(slices)
        self._slices = slices
        num = len(slots)
        self.slots = slots
        self.slot_bytes: bytes = slots.tobytes() if like is None else like.slot_bytes
        self.members: Ints = slots
        self.member_of_row: Ints | None = None
        if like is not None:
            self.members, self.member_of_row = like.members, like.member_of_row
        elif len(set(slots.tolist())) < num:
            self.members, self.member_of_row = np.unique(slots, return_inverse=True)
        if alike is not None and self.member_of_row is None:
            self._do_as(alike)
            return
        lengths = len(slices.phases), len(slices.flags), len(slices.sampled) / 2
        if lengths != (num, 0, num) and not {0, num}.issuperset(lengths):
            raise ValueError(f"columns have {lengths} entries for {num} rows")
        self.prefills = _positions(slices.phases or bytes(num), PREFILL)
        self.num_prefill_tokens = 0
        self.member_prefills = self.prefills
        self.recomputed: Ints | None = None
        chunks = None if self.member_of_row is not None else self._chunks_among_singles()
        self.is_simple = chunks is not None
        if chunks is not None:
            self.team = teams.team(num, chunks)
            self.tokens: Ints = self.team.tokens
            if self.prefills:
                self._read_prefills()
            return
        self.tokens = _column(slices.tokens, "tokens", num).astype(np.int64)
        tokens = self.by_member(self.tokens)
        if num and not np.minimum.reduce(tokens):
            tokens = np.maximum(tokens, 1)
        self.team = Team(tokens, self.by_member(self.sampled))
        if self.prefills:
            self._read_prefills()

    @property
    def phases(self) -> Bytes:
        """Return the phases: [rows]."""
        return _column(self._slices.phases, "phases", len(self.slots)).astype(np.uint8, copy=False)

    @property
    def flags(self) -> Bytes:
        """Return the flags: [rows]."""
        return _column(self._slices.flags, "flags", len(self.slots)).astype(np.uint8, copy=False)

    @property
    def sampled(self) -> Ints:
        """Return the sampled rows of logits: [rows]."""
        return _column(self._slices.sampled, "sampled", len(self.slots)).astype(np.int64)

    def _do_as(self, alike: Rows) -> None:
        """Take over all that does not depend on who it is."""
        self.prefills, self.num_prefill_tokens = alike.prefills, alike.num_prefill_tokens
        self.member_prefills, self.recomputed = alike.member_prefills, alike.recomputed
        self.is_simple, self.team, self.tokens = alike.is_simple, alike.team, alike.tokens

    def _read_prefills(self) -> None:
        self.num_prefill_tokens = sum(map(self.tokens.item, self.prefills))
        if self.member_of_row is not None:
            self.member_prefills = sorted(set(self.member_of_row[self.prefills].tolist()))
        if any(self._slices.flags):
            again = np.zeros(len(self.slots), dtype=np.int64)
            again[self.prefills] = self.tokens[self.prefills]
            again *= (self.flags & RECOMPUTED) > 0
            self.recomputed = self.by_member(again) if again.any() else None

    def _chunks_among_singles(self) -> tuple[Chunk, ...] | None:
        """Return position, tokens and sampled rows of each chunk, if the step is a simple one.

        Compares whole columns with what they would be without the prefills.
        """
        slices, prefills, num = self._slices, self.prefills, len(self.slots)
        if len(prefills) > _FEW or VERIFY in slices.phases or DRAFT in slices.phases:
            return None
        tokens_of, rows_of = slices.tokens, slices.sampled
        chunks = []
        if prefills:
            if len(tokens_of) != 4 * num or len(rows_of) != 2 * num:
                return None
            for at in prefills:
                tokens = int.from_bytes(tokens_of[4 * at : 4 * at + 4], "little")
                rows = int.from_bytes(rows_of[2 * at : 2 * at + 2], "little")
                if not tokens:
                    return None
                if tokens != 1:
                    chunks.append((at, tokens, rows))
                    tokens_of = tokens_of[: 4 * at] + _ONE_TOKEN + tokens_of[4 * at + 4 :]
                    rows_of = rows_of[: 2 * at] + _ONE_ROW + rows_of[2 * at + 2 :]
        is_simple = tokens_of == _ONE_TOKEN * num and rows_of == _ONE_ROW * num
        return tuple(chunks) if is_simple else None

    def contexts(self, slices: StepSlices) -> Ints:
        """Return the contexts, by row.

        Raises:
            ValueError: they are not as many as the rows, or no engine computes so much in a step.
        """
        found = np.frombuffer(slices.contexts, _U32)
        if len(found) != len(self.slots):
            found = _column(slices.contexts, "contexts", len(self.slots))
        contexts: Ints = found.astype(np.int64)
        chunks = self.team.chunk_tokens
        if chunks and pairs(max(chunks), contexts.item(contexts.argmax())) > _MOST_PAIRS:
            raise ValueError(f"a chunk of {max(chunks)} tokens in one step")
        return contexts

    def by_request(self, contexts: Ints) -> Ints:
        """Return how far each request had come, by the contexts of its rows."""
        if self.member_of_row is None:
            return contexts
        first = np.full(len(self.members), np.iinfo(np.int64).max)
        np.minimum.at(first, self.member_of_row, contexts)
        return first

    def by_member(self, values: NDArray[np.generic]) -> Ints:
        """Sum the rows' values by request."""
        if self.member_of_row is None:
            return values.astype(np.int64, copy=False)
        sums = np.bincount(self.member_of_row, weights=values, minlength=len(self.members))
        return sums.astype(np.int64)


class KeptRows:
    """The last kinds of steps of one ring's team, and of teams before it.

    Attributes:
        num_dropped: the ring's, for which the slots hold.
        teams: those that are plain.
    """

    def __init__(self) -> None:
        self.num_dropped = -1
        self.teams = PlainTeams()
        self._by_key: dict[tuple[bytes, ...], Rows] = {}
        self._by_make_up: dict[tuple[bytes, ...], Rows] = {}
        """Of whatever team, one row for each of as many requests as the first column tells."""
        self._last: Rows | None = None

    def read(self, slices: StepSlices, slots: Ints, *, like: Rows | None = None) -> Rows:
        """Read rows; of what others have done before them, only who they are.

        Args:
            slices: the step's.
            slots: [rows].
            like: rows of the same slots, in the same order.

        Raises:
            ValueError: the columns do not fit together.
        """
        make_up = (len(slots).to_bytes(4, "little"), *_key(slices)[1:])
        alike = self._by_make_up.get(make_up)
        rows = Rows(slices, slots, self.teams, like=like, alike=alike)
        if alike is None and rows.member_of_row is None:
            if len(self._by_make_up) >= _MOST_MAKE_UPS:
                self._by_make_up.clear()
            self._by_make_up[make_up] = rows
        return rows

    def rows_of(self, slices: StepSlices, slots: SlotMap) -> Rows | None:
        """Return the rows of slices that differ from kept ones in their contexts only."""
        if self.num_dropped != slots.num_dropped:
            self._look_up_again(slices.requests, slots)
        key = _key(slices)
        if self._last is not None and self._last.key == key:
            return self._last
        rows = self._by_key.get(key)
        if rows is not None:
            self._last = rows
        return rows

    def _look_up_again(self, requests: bytes, slots: SlotMap) -> None:
        """Keep what is of these requests, if none of them is who has left.

        Who finishes is forgotten only when all that came before is settled: a step or two into the
        life of the team that goes on without it.
        """
        num_missed = slots.num_dropped - self.num_dropped
        self.num_dropped = slots.num_dropped
        last = self.last_of(requests)
        if last is None:
            self.drop()
            return
        if num_missed > 1 or slots.last_dropped.to_bytes(4, "little") in requests:
            found = slots.slots(np.frombuffer(requests, dtype=COLUMNS["requests"]))
            if found.tobytes() != last.slot_bytes:
                self.drop()
                return
        self._by_key = {key: rows for key, rows in self._by_key.items() if key[0] == requests}

    def last_of(self, requests: bytes) -> Rows | None:
        """Return the last step's rows, if it was made up of just these requests."""
        last = self._last
        return None if last is None or last.key[0] != requests else last

    def keep(self, rows: Rows) -> None:
        """Keep rows, all of whose requests are known."""
        if len(self._by_key) >= _MOST_KINDS:
            self._by_key.clear()
        self._last = self._by_key[rows.key] = rows

    def drop(self) -> None:
        """Keep none: what comes now is of other requests."""
        self._by_key.clear()
        self._last = None


def _positions(column: bytes, value: int) -> list[int]:
    """Return where a column of bytes holds a value."""
    found, at = [], column.find(value)
    while at >= 0:
        found.append(at)
        at = column.find(value, at + 1)
    return found


def _key(slices: StepSlices) -> tuple[bytes, ...]:
    return (slices.requests, slices.phases, slices.tokens, slices.flags, slices.sampled)


def _column(raw: bytes, name: str, num_rows: int) -> NDArray[np.generic]:
    if not raw:
        return np.zeros(num_rows, dtype=COLUMNS[name])
    found = np.frombuffer(raw, dtype=COLUMNS[name])
    if len(found) != num_rows:
        raise ValueError(f"column {name} has {len(found)} rows, not {num_rows}")
    return found


NO_SLICES = StepSlices(0, 0, 0, b"", b"", b"", b"")
NO_ROWS = Rows(NO_SLICES, np.zeros(0, dtype=np.int64), PlainTeams())
"""Of a step of nobody."""
