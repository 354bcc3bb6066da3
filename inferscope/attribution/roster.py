"""Who was in the batch, since when and until when: what a request can be blamed for.

A row is one stay in the batch. Two kinds of sums are kept of it, and both make blame over a stretch
of time a matter of two look-ups, however many requests wait meanwhile.

Where each costs the others alike, a place on a scale stands for the time: how far all have come in
what one of them costs. A stay spans a part of each scale, and what a request waited for it is what
their spans have in common:

        scale   0 ──────────────────────────────────────────►
        r1            entered ═══════════════ left
        r2                        entered ═══════════════════

Where they do not, as with the blocks and the tokens that others wait for in the queue, `held_ns`
grows with every step. A mark is a copy of it: whoever came then and goes now blames each row for
what it has grown by.

Memory is bounded, whatever is told. Of the stays that are over, those that mattered least are
forgotten as more come; of the marks, those are let go whose age is nearly another's. What is then
missing is nobody's, and nobody is blamed for more than is his.
"""

from __future__ import annotations

from bisect import bisect_left

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

FIRST_ROWS = 512
MOST_CELLS = 1 << 18
"""Of all marks: 2 MB, which is 512 marks while batches are of up to 256."""
_FEWEST_MARKS = 16
NOBODY_ROW = 0
SCALES = DECODING, BESIDE_PROMPTS, PROMPTS, BESIDE_OTHER_PROMPTS, SLOTS = range(5)
"""What a decode costs other decodes, and prompts; a prompt costs decodes, and other prompts; and
whoever runs costs those who wait for a slot."""


class Roster:
    """Stays in the batch, those under way and those lately over.

    Attributes:
        names: [rows], of the requests; None where a row is free. The first row is nobody's.
        dp_ranks: [rows], in whose batch.
        since: [rows], how many rows had been taken when this one was.
        num_taken: by now.
        held_ns: [rows], how long others have waited for what it holds, but for its slot.
        entered: [scales, rows], where its span begins; infinite where it has none yet.
        left: [scales, rows], where it ends; infinite while it is under way.
        cost_ns: [scales, rows], what it costs one other in all of its span, where that is not the
            length of it.
    """

    def __init__(self) -> None:
        self.names: list[str | None] = [None] * FIRST_ROWS
        self.dp_ranks: Ints = np.zeros(FIRST_ROWS, dtype=np.int64)
        self.since: Ints = np.zeros(FIRST_ROWS, dtype=np.int64)
        self.num_taken = 0
        self.held_ns: Floats = np.zeros(FIRST_ROWS)
        self.entered: Floats = np.full((len(SCALES), FIRST_ROWS), np.inf)
        self.left: Floats = np.full((len(SCALES), FIRST_ROWS), np.inf)
        self.cost_ns: Floats = np.zeros((len(SCALES), FIRST_ROWS))
        self._free = list(range(FIRST_ROWS - 1, NOBODY_ROW, -1))
        self._over: list[int] = []
        """Rows of stays that are over, in the order in which they ended."""

    def __len__(self) -> int:
        return len(self.names)

    def take(self, name: str, dp_rank: int) -> int:
        """Begin a stay, and return its row."""
        if not self._free:
            self._make_room()
        row = self._free.pop()
        self.num_taken += 1
        self.since[row] = self.num_taken
        self.names[row] = name
        self.dp_ranks[row] = dp_rank
        return row

    def end(self, row: int) -> None:
        """Note that a stay is over; others may have to blame it yet."""
        self._over.append(row)

    def _make_room(self) -> None:
        num, over = len(self.names), self._over
        if len(over) < num // 2:
            none = np.full((len(SCALES), num), np.inf)
            self.since = np.concatenate([self.since, np.zeros(num, dtype=np.int64)])
            self.dp_ranks = np.concatenate([self.dp_ranks, np.zeros(num, dtype=np.int64)])
            self.held_ns = np.concatenate([self.held_ns, np.zeros(num)])
            self.entered = np.concatenate([self.entered, none], axis=1)
            self.left = np.concatenate([self.left, none], axis=1)
            self.cost_ns = np.concatenate([self.cost_ns, np.zeros_like(none)], axis=1)
            self.names += [None] * num
            self._free += range(2 * num - 1, num - 1, -1)
            return
        # Those that ended lately may be all that somebody waited for: the older half is thinned.
        older = over[: len(over) // 2]
        order = self._worth(older).argsort(kind="stable")
        lesser = {older[at] for at in order[: len(older) // 2].tolist()}
        self._over = [row for row in over if row not in lesser]
        rows = sorted(lesser, reverse=True)
        self._free += rows
        for row in rows:
            self.names[row] = None
        self.held_ns[rows] = 0
        self.entered[:, rows] = self.left[:, rows] = np.inf
        self.cost_ns[:, rows] = 0

    def _worth(self, rows: list[int]) -> Floats:
        """Return what stays that are over have cost others, whom it may concern: [rows]."""
        worth: Floats = self.held_ns[rows] + self.cost_ns[:, rows].sum(axis=0)
        for scale in (DECODING, SLOTS):
            entered, left = self.entered[scale, rows], self.left[scale, rows]
            is_there = np.isfinite(entered)
            worth += np.where(is_there, left, 0) - np.where(is_there, entered, 0)
        return worth

    def common(self, scale: int, since: float, until: float, *, now: float) -> Floats:
        """Return what each row has cost a request in some span of a scale: [rows].

        Args:
            scale: one of `SCALES`.
            since: where the request's span begins.
            until: where it ends.
            now: where the engine has come to.
        """
        entered, left = self.entered[scale], self.left[scale]
        common: Floats = np.minimum(left, until)
        common -= np.maximum(entered, since)
        np.maximum(common, 0, out=common)
        if scale in (PROMPTS, BESIDE_OTHER_PROMPTS):
            rows = common.nonzero()[0]
            spans = np.minimum(left[rows], now) - entered[rows]
            common[rows] *= self.cost_ns[scale, rows] / spans
        return common


class Marks:
    """What rows had held by times to which somebody will look back."""

    def __init__(self, roster: Roster) -> None:
        """Keep marks of a roster."""
        self._roster = roster
        self._ids: list[int] = []
        self._at_ns: list[int] = []
        self._kept: list[tuple[int, Floats]] = []
        """For each, how many rows had been taken, and the sums."""
        self._num_set = 0

    def __len__(self) -> int:
        return len(self._ids)

    def set(self, at_ns: int) -> int:
        """Remember the sums of now, and return the mark's number."""
        sums = self._roster.held_ns.copy()
        self._num_set += 1
        self._ids.append(self._num_set)
        self._at_ns.append(at_ns)
        self._kept.append((self._roster.num_taken, sums))
        if len(self._ids) > max(_FEWEST_MARKS, MOST_CELLS // len(sums)):
            self._thin_out()
        return self._num_set

    def growth(self, mark: int) -> Floats:
        """Return by how much the sums have grown since a mark: [rows].

        Where it was let go, since the next one: a little is missing, nothing is too much.
        """
        taken, sums = self._kept[bisect_left(self._ids, mark)]
        grown: Floats = self._roster.held_ns.copy()
        num = len(sums)
        grown[:num] -= sums * (self._roster.since[:num] <= taken)
        return grown

    def _thin_out(self) -> None:
        """Let go of a quarter of the marks: those whose age is nearly that of the next one.

        What a look-up can miss is a small part of what it looks back to, whatever its age.
        """
        at_ns = np.maximum.accumulate(np.array(self._at_ns, dtype=np.float64))
        gap_ns = at_ns[2:] - at_ns[:-2]  # around every mark but the first and the last
        part = (gap_ns / (at_ns[-1] - at_ns[:-2] + 1))[::2]  # no two neighbours go
        lost = {2 * at + 1 for at in part.argsort(kind="stable")[: len(part) // 2].tolist()}
        kept = [at for at in range(len(at_ns)) if at not in lost]
        self._ids = [self._ids[at] for at in kept]
        self._at_ns = [self._at_ns[at] for at in kept]
        self._kept = [self._kept[at] for at in kept]
