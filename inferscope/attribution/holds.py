"""Blame for the queue time of the head of the queue, as sums by culprit.

A row is one request that has run; its sum grows by its part of each step that was waited for. A
request that comes to the queue marks the sums of then, and blames each row for what it has grown by
when it goes.

Memory is bounded, whatever is reported: of the requests that are over, those that mattered least
are forgotten as more come; of the marks, those are dropped whose age is nearly another's. What is
then missing counts as unknown, and no request is blamed for more than its part.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable

import msgspec
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

FIRST_ROWS = 256
MOST_CELLS = 1 << 20
"""Most cells of all marks: 8 MB, which is 4,096 marks of 256 rows."""
_FEWEST_MARKS = 16
NOBODY_ROW = 0
_REMEMBERED_STEPS = 256
"""Number of recent steps whose holders are kept for waits that are reported late."""
_MOST_GRIPS = 64
_MOST_BLOCK_TOKENS = 1 << 24
"""Largest plausible block size in tokens; more, or less than one, is damage."""


class HeldResources(msgspec.Struct, frozen=True, gc=False):
    """Resources that the members of a step hold and that keep others out of it.

    Attributes:
        binding: scarce resource, as reported by the scheduler.
        block_tokens: tokens in a KV block, 0 if the engine does not report it.
        tokens: [members], tokens computed in the step.
        contexts: [members], tokens before them.
    """

    binding: str
    block_tokens: int
    tokens: Ints
    contexts: Ints

    def blocks(self, held_tokens: Ints) -> Floats:
        """Return the number of KV blocks, or of tokens if the block size is unknown: [requests]."""
        per_block = self.block_tokens if 0 < self.block_tokens <= _MOST_BLOCK_TOKENS else 1
        blocks = -(-held_tokens // per_block)
        return blocks.astype(np.float64)


class _Span(msgspec.Struct, eq=False, gc=False):
    """Interval in which the device executed one step."""

    from_ns: int
    until_ns: int
    rows: Ints
    """Rows of the step's members; if slots or blocks are scarce, of all requests that hold some."""
    grip: HeldResources | None
    """Held resources; None if unknown: the rows are then blamed equally."""
    adds_ns: Floats | None
    held_tokens: Ints | None = None
    """[rows], tokens in KV blocks if those are scarce."""
    parts: Floats | None = None
    """[rows], shares that sum to 1; None until a request waits for them."""

    def shares(self) -> tuple[Ints, Floats]:
        """Return the rows that are blamed for this interval, and the share of each."""
        if self.parts is None:
            found = self._weights()
            whole = 0.0 if found is None else float(found.sum())
            if found is None:
                self.rows, self.parts = np.zeros(1, dtype=np.int64), np.ones(1)
            elif whole > 0:
                self.parts = found / whole
            else:
                self.parts = np.full(len(found), 1.0 / len(found))
        return self.rows, self.parts

    def _weights(self) -> Floats | None:
        grip, adds_ns = self.grip, self.adds_ns
        if not len(self.rows):
            return None
        if grip is None:
            return np.ones(len(self.rows))
        match grip.binding:
            case "slots":
                return np.ones(len(self.rows))
            case "blocks" if self.held_tokens is not None:
                return grip.blocks(self.held_tokens)
            case "budget":
                return grip.tokens.astype(np.float64)
            case _ if adds_ns is not None:
                return adds_ns
        return np.ones(len(self.rows))


class _Wait(msgspec.Struct, gc=False):
    """Queued request: the total of all sums at its arrival, and its checkpoint."""

    total_ns: float
    since_ns: int
    """End of the time in which it waited for another cause, or its arrival."""
    mark: int = 0
    left_out_ns: Floats | None = None
    """[rows], growth of the sums since its arrival while it waited for another cause."""


class Holds:
    """Running requests, and the queue time that others spend because of each.

    Attributes:
        names: [rows], request IDs; None if a row is free. The first row belongs to no request.
        num_taken: number of rows assigned so far.
        num_waiting: number of requests in the queue.
    """

    def __init__(
        self,
        *,
        weight_of: Callable[[list[int]], Floats],
        forget: Callable[[list[int]], None],
        paused_within_ns: Callable[[int, int], int],
    ) -> None:
        """Start without requests.

        Args:
            weight_of: callback that returns the blame of rows outside the queue.
            forget: callback that receives rows whose requests are dropped.
            paused_within_ns: callback that returns how long the engine was paused in an interval.
        """
        self.names: list[str | None] = [None] * FIRST_ROWS
        self._weight_of, self._forget = weight_of, forget
        self._paused_within_ns = paused_within_ns
        self._free = list(range(FIRST_ROWS - 1, NOBODY_ROW, -1))
        self._over: list[int] = []
        """Rows of ended requests, in the order in which they ended."""
        self._running: dict[int, None] = {}
        self._runners: Ints | None = None
        """Running rows as an array; None after a change."""
        self._grips: list[tuple[Ints, HeldResources]] = []
        """Rows and held resources of the newest steps, which are in no array yet."""
        self._grip: HeldResources | None = None
        """Held resources of the newest step that is in the array."""
        self._held_tokens: Ints = np.zeros(FIRST_ROWS, dtype=np.int64)
        """[rows], tokens in KV blocks at each row's newest step."""
        self._sums_ns: Floats = np.zeros(FIRST_ROWS)
        self._total_ns = 0.0
        self._since: Ints = np.zeros(FIRST_ROWS, dtype=np.int64)
        """[rows], value of `num_taken` when the row was assigned."""
        self.num_taken = 0
        self._spans: deque[_Span] = deque()
        """Steps whose blame is not added yet."""
        self._past: deque[_Span] = deque(maxlen=_REMEMBERED_STEPS)
        self._at_ns = 0
        """Time through which blame is added."""
        self._waiting: dict[int, _Wait] = {}
        self._unmarked: dict[int, _Wait] = {}
        """Requests that arrived since the sums last changed."""
        self._marks = _Marks()

    @property
    def num_rows(self) -> int:
        """Return the number of rows, including free ones."""
        return len(self.names)

    @property
    def num_waiting(self) -> int:
        """Return the number of requests in the queue."""
        return len(self._waiting)

    # --- rows ---------------------------------------------------------------------------------

    def take(self, name: str) -> int:
        """Assign a row to a request."""
        if not self._free:
            self._make_room()
        row = self._free.pop()
        self.num_taken += 1
        self._since[row] = self.num_taken
        self._held_tokens[row] = 0
        self.names[row] = name
        return row

    def kept(self, rows: Ints, num_taken: int) -> Ints:
        """Return former rows; those assigned to other requests since become the unknown row.

        Args:
            rows: rows as of `num_taken` assignments.
            num_taken: number of assignments then.
        """
        is_kept = [self.names[row] is not None for row in rows.tolist()]
        return np.where(is_kept & (self._since[rows] <= num_taken), rows, NOBODY_ROW)

    def end(self, row: int) -> None:
        """Record the end of a request; others may still blame it."""
        self._over.append(row)

    def runs(self, row: int) -> None:
        """Record that a request holds a sequence slot."""
        self._running[row] = None
        self._runners = None

    def left(self, row: int) -> None:
        """Record that a request released its sequence slot."""
        self._running.pop(row, None)
        self._runners = None

    def blocks(self) -> dict[int, float]:
        """Return the number of KV blocks held now, by row."""
        rows = self._runners_now()
        held_tokens = self._held_now()[rows]
        if self._grip is None:
            return {}
        blocks = self._grip.blocks(held_tokens)
        return {row: held for row, held in zip(rows.tolist(), blocks.tolist(), strict=True) if held}

    def lost_blocks(self, row: int) -> None:
        """Record that a request holds no KV blocks until its next step."""
        self._held_now()[row] = 0

    def _runners_now(self) -> Ints:
        if self._runners is None:
            self._runners = np.fromiter(self._running, np.int64, len(self._running))
        return self._runners

    def _held_now(self) -> Ints:
        """Return each row's tokens in KV blocks after all steps so far: [rows]."""
        grips = self._grips
        if grips:
            rows = np.concatenate([rows for rows, _ in grips])
            tokens = np.concatenate([grip.tokens for _, grip in grips])
            tokens += np.concatenate([grip.contexts for _, grip in grips])
            self._held_tokens[rows] = tokens  # of several of one row, the last to be assigned
            self._grip = grips[-1][1]
            grips.clear()
        return self._held_tokens

    def _make_room(self) -> None:
        num, over = len(self.names), self._over
        self._held_now()
        if len(over) < num // 2:
            self._held_tokens = np.concatenate([self._held_tokens, np.zeros(num, dtype=np.int64)])
            self._sums_ns = np.concatenate([self._sums_ns, np.zeros(num)])
            self._since = np.concatenate([self._since, np.zeros(num, dtype=np.int64)])
            self.names += [None] * num
            self._free += range(2 * num - 1, num - 1, -1)
            return
        # Recently ended requests may be all that a request waited for: thin out the older half.
        older = over[: len(over) // 2]
        order = (self._sums_ns[older] + self._weight_of(older)).argsort(kind="stable")
        lesser = [older[at] for at in order[: max(1, len(older) // 2)].tolist()]
        gone = set(lesser)
        self._forget(lesser)
        self._over = [row for row in over if row not in gone]
        kept = np.arange(num)
        kept[lesser] = NOBODY_ROW
        spans = (*self._spans, *self._past)
        rows = {id(span.rows): span.rows for span in spans}  # of many spans the same
        rows = {key: kept[each] for key, each in rows.items()}
        for span in spans:
            span.rows = rows[id(span.rows)]
        for row in sorted(lesser, reverse=True):
            self._free.append(row)
            self.names[row] = None
        self._sums_ns[lesser] = 0.0
        for wait in self._waiting.values():
            if wait.left_out_ns is not None:
                here = [row for row in lesser if row < len(wait.left_out_ns)]
                wait.left_out_ns[here] = 0.0

    # --- steps --------------------------------------------------------------------------------

    def step(
        self,
        rows: Ints,
        grip: HeldResources | None,
        adds_ns: Floats | None,
        start_ns: int,
        from_ns: int,
        until_ns: int,
    ) -> None:
        """Record a step.

        Args:
            rows: [members].
            grip: resources that the members hold; None if unknown.
            adds_ns: [members], nanoseconds that the step would save without each; None if unknown.
            start_ns: start of the step; a request may be admitted between then and `from_ns`.
            from_ns: start of the interval in which the device executed only this step.
            until_ns: end of that interval.
        """
        held_tokens: Ints | None = None
        if grip is not None:
            self._note_grip(rows, grip)
            if grip.binding == "slots":
                rows = self._runners_now()  # not only those that this step computes
            elif grip.binding == "blocks":
                rows, held_tokens = self._holders(rows, grip)
        if until_ns <= from_ns:
            return
        self._pass(start_ns)
        self._spans.append(_Span(from_ns, until_ns, rows, grip, adds_ns, held_tokens))

    def _note_grip(self, rows: Ints, grip: HeldResources) -> None:
        grips = self._grips
        if grips and grips[-1][0] is rows:
            grips[-1] = rows, grip
            return
        grips.append((rows, grip))
        if len(grips) > _MOST_GRIPS:
            self._held_now()

    def _holders(self, rows: Ints, grip: HeldResources) -> tuple[Ints, Ints]:
        """Return the rows that hold KV blocks while a step runs, and their tokens.

        These are all rows with a slot, and the members that released theirs since the plan.
        """
        runners = self._runners_now()
        has_left = np.array([row not in self._running for row in rows.tolist()], dtype=np.bool_)
        of_members = (grip.contexts + grip.tokens)[has_left]
        return (
            np.concatenate([runners, rows[has_left]]),
            np.concatenate([self._held_now()[runners], of_members]),
        )

    def _pass(self, until_ns: int) -> None:
        """Add the blame through a time to the sums."""
        spans = self._spans
        while spans and spans[0].from_ns < until_ns:
            span = spans[0]
            spent_ns = 0
            if self._waiting:
                spent_ns = self._spent_ns(span, self._at_ns, until_ns)
            if spent_ns > 0:
                if self._unmarked:
                    self._mark(until_ns)
                rows, parts = span.shares()
                np.add.at(self._sums_ns, rows, parts * spent_ns)
                self._total_ns += spent_ns
            if span.until_ns > until_ns:
                break
            self._past.append(spans.popleft())
        self._at_ns = max(self._at_ns, until_ns)

    def _spent_ns(self, span: _Span, since_ns: int, until_ns: int) -> int:
        """Return how long an interval was spent waiting for one step, without pauses."""
        since_ns, until_ns = max(span.from_ns, since_ns), min(span.until_ns, until_ns)
        if until_ns <= since_ns:
            return 0
        return until_ns - since_ns - self._paused_within_ns(since_ns, until_ns)

    # --- the queue ----------------------------------------------------------------------------

    def queued(self, slot: int, at_ns: int) -> None:
        """Start the queue time of a request."""
        self._pass(at_ns)
        wait = self._waiting[slot] = self._unmarked[slot] = _Wait(self._total_ns, at_ns)
        if at_ns >= self._at_ns:
            return
        # The report is late: other requests may have waited since.
        sums_ns = self._sums_ns.copy()
        for span in (*self._past, *list(self._spans)[:1]):
            spent_ns = self._spent_ns(span, at_ns, self._at_ns)
            if spent_ns > 0:
                rows, parts = span.shares()
                np.subtract.at(sums_ns, rows, parts * spent_ns)
                wait.total_ns -= spent_ns
        if wait.total_ns < self._total_ns:
            wait.mark = self._marks.set(at_ns, self.num_taken, sums_ns)
            del self._unmarked[slot]

    def leave_out(self, slot: int, since_ns: int, until_ns: int) -> None:
        """Exclude an interval in which a request waited for another cause."""
        wait = self._waiting.get(slot)
        if wait is None:
            return
        self._pass(until_ns)
        since_ns, wait.since_ns = max(since_ns, wait.since_ns), max(until_ns, wait.since_ns)
        if slot in self._unmarked:
            return  # no sum has grown since it came
        left_out_ns = np.zeros(self.num_rows)
        if wait.left_out_ns is not None:
            left_out_ns[: len(wait.left_out_ns)] = wait.left_out_ns
        wait.left_out_ns = left_out_ns
        for span in (*self._past, *list(self._spans)[:1]):
            spent_ns = self._spent_ns(span, since_ns, until_ns)
            if spent_ns > 0:
                rows, parts = span.shares()
                np.add.at(left_out_ns, rows, parts * spent_ns)
                wait.total_ns += spent_ns

    def _mark(self, at_ns: int) -> None:
        """Record a checkpoint of the sums for the requests that arrived since they changed."""
        mark = self._marks.set(at_ns, self.num_taken, self._sums_ns.copy())
        for wait in self._unmarked.values():
            wait.mark = mark
        self._unmarked.clear()

    def admitted(self, slot: int, at_ns: int) -> tuple[Floats, float]:
        """End a queue time; return its blame by row and its total, in nanoseconds."""
        self._pass(at_ns)
        found = self.until(slot, at_ns)
        del self._waiting[slot]
        self._unmarked.pop(slot, None)
        if self._marks:
            marks = (wait.mark for wait in self._waiting.values() if wait.mark)
            self._marks.drop_before(next(marks, None))
        return found

    def until(self, slot: int, at_ns: int) -> tuple[Floats, float]:
        """Return the same for a request that may still be queued, as far as known."""
        wait = self._waiting.get(slot)
        if wait is None or (slot in self._unmarked and not self._spans):
            return np.zeros(0), 0.0
        grown: Floats = self._sums_ns.copy()
        total_ns = self._total_ns - wait.total_ns
        if slot in self._unmarked:
            grown[:] = 0.0
        else:
            taken, sums_ns = self._marks.get(wait.mark)
            num = len(sums_ns)
            grown[:num] -= sums_ns * (self._since[:num] <= taken)
        if wait.left_out_ns is not None:
            grown[: len(wait.left_out_ns)] -= wait.left_out_ns
        for span in self._spans:  # not waited through: a reader changes nothing
            spent_ns = self._spent_ns(span, self._at_ns, at_ns)
            if spent_ns > 0:
                rows, parts = span.shares()
                np.add.at(grown, rows, parts * spent_ns)
                total_ns += spent_ns
        return np.maximum(grown, 0.0), total_ns


class _Marks:
    """Checkpoints of the sums at times to which a waiting request refers."""

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._at_ns: list[int] = []
        self._kept: list[tuple[int, Floats]] = []
        """Number of rows assigned and the sums, for each checkpoint."""
        self._num_set = 0

    def __len__(self) -> int:
        return len(self._ids)

    def drop_before(self, mark: int | None) -> None:
        """Drop the checkpoints to which no request refers any more; None drops all."""
        num = len(self._ids) if mark is None else bisect_left(self._ids, mark)
        for kept in (self._ids, self._at_ns, self._kept):
            del kept[:num]

    def set(self, at_ns: int, num_taken: int, sums_ns: Floats) -> int:
        """Record a checkpoint of the sums; return its number.

        Args:
            at_ns: time of the checkpoint.
            num_taken: number of rows assigned by then.
            sums_ns: [rows].
        """
        self._num_set += 1
        self._ids.append(self._num_set)
        self._at_ns.append(at_ns)
        self._kept.append((num_taken, sums_ns))
        if len(self._ids) > max(_FEWEST_MARKS, MOST_CELLS // len(sums_ns)):
            self._thin_out()
        return self._num_set

    def get(self, mark: int) -> tuple[int, Floats]:
        """Return a checkpoint; if it was dropped, the next one, which misses a little."""
        return self._kept[bisect_left(self._ids, mark)]

    def _thin_out(self) -> None:
        """Drop a quarter of the checkpoints: those whose age is close to the next one's.

        The part that a look-up can miss is small against its age.
        """
        at_ns = np.maximum.accumulate(np.array(self._at_ns, dtype=np.float64))
        gap_ns = at_ns[2:] - at_ns[:-2]  # around every mark but the first and the last
        part = (gap_ns / (at_ns[-1] - at_ns[:-2] + 1))[::2]  # no two neighbours go
        lost = {2 * at + 1 for at in part.argsort(kind="stable")[: len(part) // 2].tolist()}
        kept = [at for at in range(len(at_ns)) if at not in lost]
        self._ids = [self._ids[at] for at in kept]
        self._at_ns = [self._at_ns[at] for at in kept]
        self._kept = [self._kept[at] for at in kept]
