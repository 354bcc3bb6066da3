"""Blame: the requests that another request waited for, by cause.

The question is: without which other requests would the request not have waited?

    queue                  what kept the head of the queue out, step by step: the slots, by all who
                           hold one; the KV blocks, by blocks held; the budget of tokens, by
                           tokens; where nothing did and the step itself was waited for, by the
                           time that each of its requests adds to it. Those behind wait for the same
    decode_interference    prefills in one's steps, by the time that each adds
    decode_co_batched      the other decodes in them, likewise
    prefill_interference   decodes beside one's prompt, likewise
    prefill_co_batched     the other prefills beside it, likewise
    preempted              who held blocks when one lost one's own

The time that a request adds is that by which the wait would have been shorter without it, see
`marginal`. Each cause's culprits are scaled to the ledger's row: the ledger says how long, this
says because of which.

`queue_idle` has no culprits, for the device did nothing. The queue is kept as one vector of sums by
culprit, which grows while requests wait: a request that comes remembers it, and blames each culprit
for what it has grown by. The causes inside steps are kept as one matrix each, [victims, culprits],
to which a window of steps is added as one product. Both are exact in any order: the products are of
whole numbers below 2^53.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from inferscope.attribution.blame_shares import BlameShare, BlameTotals
from inferscope.attribution.busy import Busy
from inferscope.attribution.counterfactual import Delay
from inferscope.attribution.holds import NOBODY_ROW, HeldResources, Holds
from inferscope.attribution.marginal import BlameWeights
from inferscope.cost import product

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

BLAMED = (
    "queue",
    "decode_interference",
    "decode_co_batched",
    "prefill_interference",
    "prefill_co_batched",
    "preempted",
)
"""Causes that lie with other requests."""
_IN_STEPS = BLAMED[1:5]
_DECODE_INTERFERENCE, _DECODE_CO_BATCHED, _PREFILL_INTERFERENCE, _PREFILL_CO_BATCHED = range(4)
_SHARE = 1 << 20
"""Denominator of shares, which are whole multiples of its reciprocal."""
_SPENT_NS = 1 << 6
"""Resolution of waits within steps in nanoseconds."""
_FIRST_SEATS = 64
UNKNOWN_SLOT, UNKNOWN_SEAT = 0, 0
"""Slot and seat of unknown members."""


class Taken(msgspec.Struct, eq=False, gc=False):
    """Step whose members wait for each other."""

    slots: Ints
    """[members]."""
    delay: Delay
    weights: BlameWeights
    """Weights by which each member is blamed."""
    part: Floats | None
    """[members], fraction of the step that each waits for; None for all of it."""
    rows: Ints
    """[members]."""
    num_taken: int
    """Number of rows assigned when the step was recorded."""
    is_folded: bool = False
    """Whether the step is in the matrices."""


class _Held(msgspec.Struct):
    """Preempted request: the start of its wait and the KV blocks that others held then."""

    since_ns: int
    parts: dict[str, float]


class Blame:
    """Blame among the requests of one replica, by slot."""

    def __init__(self, num_slots: int, device: Busy) -> None:
        """Allocate columns for some requests; `grow` adds more.

        Args:
            num_slots: initial number of slots.
            device: device of the engine, which records its pauses.
        """
        self._device = device
        self._names = [""] * num_slots
        self._row_of: Ints = np.zeros(num_slots, dtype=np.int64)
        """[slots], row of each culprit; 0 before its first step."""
        self._seat_of: Ints = np.zeros(num_slots, dtype=np.int64)
        """[slots], seat of each victim; 0 before its first step."""
        self._holds = Holds(
            weight_of=self._weight_of,
            forget=self._forget,
            paused_within_ns=device.paused_within_ns,
        )
        self._pairs: list[Floats | None] = [None] * len(_IN_STEPS)
        """[seats, rows] matrix of each cause, in `_SPENT_NS` · `_SHARE`; None until the first
        entry."""
        self._num_seats = _FIRST_SEATS
        self._seats = list(range(_FIRST_SEATS - 1, UNKNOWN_SEAT, -1))
        self._steps: list[Taken] = []
        """Steps that are not in the matrices yet."""
        self._cuts: list[tuple[Taken, Floats | None, Floats]] = []
        """Changes to steps in the matrices: the fraction waited for as stored there, and the new
        one."""
        self._held: dict[int, _Held] = {}
        self._found: dict[int, dict[str, BlameTotals]] = {}
        self._last_slots: Ints | None = None
        self._last_rows = self._row_of
        """Slots and rows of the last step's members."""

    def grow(self, num_slots: int) -> None:
        """Extend the columns to `num_slots` requests."""
        more = np.zeros(num_slots - len(self._names), dtype=np.int64)
        self._names += [""] * len(more)
        self._row_of = np.concatenate([self._row_of, more])
        self._seat_of = np.concatenate([self._seat_of, more])

    @property
    def num_waiting(self) -> int:
        """Return the number of requests that wait for admission."""
        return self._holds.num_waiting

    # --- requests, in the order of time -------------------------------------------------------

    def begin(self, slot: int, name: str) -> None:
        """Register a new request in a free slot."""
        self._names[slot] = name

    def queued(self, slot: int, at_ns: int) -> None:
        """Start the queue time of a request."""
        self._holds.queued(slot, at_ns)

    def admitted(self, slot: int, at_ns: int) -> None:
        """End the queue time of a request."""
        parts, total_ns = self._holds.admitted(slot, at_ns)
        if total_ns > 0:
            self._add_rows(self._found_of(slot), slot, "queue", parts, total_ns)

    def left_out(self, slot: int, since_ns: int, until_ns: int) -> None:
        """Exclude an interval in which a queued request waited for no other request."""
        self._holds.leave_out(slot, since_ns, until_ns)

    def withdraw(self, slot: int) -> None:
        """Discard the queue time of a request that waits on another replica."""
        self._holds.admitted(slot, 0)
        self.end(slot)

    def runs(self, slot: int) -> None:
        """Record that a request holds a sequence slot."""
        row = self._row_of.item(slot)
        if not row:
            row = self._row_of[slot] = self._holds.take(self._names[slot])
            self._last_slots = None
            if not self._seats:
                self._seats = list(range(2 * self._num_seats - 1, self._num_seats - 1, -1))
                self._num_seats *= 2
            self._seat_of[slot] = self._seats.pop()
        else:
            self._holds.lost_blocks(row)  # it was preempted
        self._holds.runs(row)

    def leave_batch(self, slot: int) -> None:
        """Release the sequence slot of a request."""
        self._holds.left(self._row_of.item(slot))

    def preempted(self, slot: int, at_ns: int) -> None:
        """Record a preemption: the requests that hold KV blocks now are blamed for the wait."""
        parts: dict[str, float] = {}
        for row, blocks in self._holds.blocks().items():
            if (name := self._holds.names[row]) is not None:
                parts[name] = parts.get(name, 0.0) + blocks
        parts.pop(self._names[slot], None)
        self._held[slot] = _Held(at_ns, parts)

    def resumed(self, slot: int, at_ns: int) -> None:
        """End the wait of a preempted request that resumes or ends."""
        held = self._held.pop(slot, None)
        if held is not None:
            self._note_held(self._found_of(slot), held, at_ns)

    def delivered_first(self, slot: int, made_ns: int, at_ns: int) -> None:
        """Exclude the part of a preemption before the delivery of the request's first token.

        Args:
            slot: slot of the request, which may be preempted.
            made_ns: start of the step that computed the token.
            at_ns: time of the delivery.
        """
        held = self._held.get(slot)
        if held is not None and held.since_ns > made_ns:
            held.since_ns = max(held.since_ns, at_ns)

    def end(self, slot: int) -> None:
        """Release a request as a victim after its blame is read; others may still blame it."""
        self._found.pop(slot, None)
        row, seat = self._row_of.item(slot), self._seat_of.item(slot)
        if row:
            self._holds.end(row)
            self._seats.append(seat)
            for pairs in self._pairs:
                if pairs is not None and seat < len(pairs):
                    pairs[seat] = 0.0
        self._row_of[slot] = self._seat_of[slot] = 0
        self._last_slots = None

    # --- steps --------------------------------------------------------------------------------

    def step(
        self,
        slots: Ints,
        delay: Delay,
        grip: HeldResources | None,
        weights: BlameWeights | None,
        start_ns: int,
        from_ns: int,
        until_ns: int,
        part: Floats | None = None,
    ) -> Taken | None:
        """Record a step: how long its members wait for each other, and other requests for them.

        Args:
            slots: [members].
            delay: delay of the step, by member.
            grip: resources that the members hold; None if unknown.
            weights: weights by which each member is blamed; None if unknown.
            start_ns: start of the step.
            from_ns: start of the interval in which the device executed only this step.
            until_ns: end of that interval.
            part: [members], fraction of the step that each waits for; None for all of it.

        Returns:
            the recorded step, for `cut`; None if no member waits for another.
        """
        if slots is not self._last_slots:
            self._last_slots, self._last_rows = slots, self._row_of[slots]
        of_queue = None if weights is None else weights.queue
        self._holds.step(self._last_rows, grip, of_queue, start_ns, from_ns, until_ns)
        if weights is None or len(slots) < 2:
            return None
        taken = Taken(slots, delay, weights, part, self._last_rows, self._holds.num_taken)
        self._steps.append(taken)
        return taken

    def cut(self, taken: Taken, member: int, part: float) -> None:
        """Subtract a fraction of a step from the wait of one member.

        Args:
            taken: recorded step.
            member: position of the member in the step.
            part: fraction of the step.
        """
        before = taken.part
        taken.part = np.ones(len(taken.slots)) if before is None else before.copy()
        taken.part[member] = max(0.0, taken.part[member] - part)
        if taken.is_folded:
            self._cuts.append((taken, before, taken.part))

    def fold(self) -> None:
        """Add the steps since the last call to the matrices."""
        if self._steps:
            steps, self._steps = self._steps, []
            parts = None
            if any(taken.part is not None for taken in steps):
                parts = np.concatenate([_part_of(taken, taken.part) for taken in steps])
            self._fold(steps, parts)
            for taken in steps:
                taken.is_folded = True
        cuts, self._cuts = self._cuts, []
        for taken, before, part in cuts:
            self._fold([taken], part, _part_of(taken, before))

    def _fold(self, steps: list[Taken], part: Floats | None, before: Floats | None = None) -> None:
        """Add steps to the matrices.

        Args:
            steps: steps, at least one.
            part: [all members], fraction of its step that each waits for; None for all of it.
            before: [members], fraction stored in the matrices; None if the steps are not there yet.
                Some members may have ended since.
        """
        num = len(steps)
        delays = [taken.delay for taken in steps]
        slots = np.concatenate([taken.slots for taken in steps])
        sizes = np.array([len(taken.slots) for taken in steps])
        step = np.repeat(np.arange(num), sizes)
        # Each step has two classes: decodes, then prefills.
        of = step * 2
        is_prefill = np.zeros(len(slots), dtype=np.bool_)
        column_of = slots
        if any(delay.prefills for delay in delays):
            starts = (sizes.cumsum() - sizes).tolist()
            at = [s + p for s, d in zip(starts, delays, strict=True) for p in d.prefills]
            is_prefill[at] = True
            of += is_prefill
            # Unknown members that prefill share one column, apart from unknown decodes.
            column_of = np.where(is_prefill & (slots == UNKNOWN_SLOT), len(self._row_of), slots)
        here = np.bincount(column_of, minlength=len(self._row_of) + 1).nonzero()[0]
        place = np.empty(len(self._row_of) + 1, dtype=np.int64)
        place[here] = np.arange(len(here))
        slot = np.where(here == len(self._row_of), UNKNOWN_SLOT, here)
        rows, seats = self._row_of[slot], self._seat_of[slot]
        if before is not None:
            rows[place[column_of]] = self._holds.kept(steps[0].rows, steps[0].num_taken)
        has_one_row_each = np.count_nonzero(rows == NOBODY_ROW) < 2
        cell = step * len(here) + place[column_of]
        counts = np.bincount(of, minlength=2 * num)
        share = _shares(np.concatenate([taken.weights.co_batched for taken in steps]), of, counts)
        class_ns = np.array([(d.decode_class_ns, d.prefill_class_ns) for d in delays])
        own_ns = np.concatenate([_own_ns(delay) for delay in delays])
        waited = class_ns.reshape(-1)[of] - own_ns
        waited = waited / np.maximum(1.0 - share * (1 / _SHARE), 1 / _SHARE)
        waited[(counts == 1)[of]] = 0.0
        waited *= 1 / _SPENT_NS
        waited = np.rint(waited) if part is None else _changed(waited, part, before)
        shape = (num, len(here))
        shares: Floats = np.zeros(shape)
        if here[0] == UNKNOWN_SLOT:  # several that are not known have one cell
            np.add.at(shares.reshape(-1), cell, share)
        else:
            shares.reshape(-1)[cell] = share
        waits = np.zeros(shape)
        waits.reshape(-1)[cell] = waited
        if not is_prefill.any():
            pairs = self._of_cause(_DECODE_CO_BATCHED)
            if has_one_row_each:
                pairs[seats[:, None], rows] += product(waits.T, shares)
            else:
                np.add.at(pairs, (seats[:, None], rows), product(waits.T, shares))
            return
        grid = np.zeros(shape, dtype=np.bool_)
        grid.reshape(-1)[cell] = is_prefill
        is_in, was_in = np.zeros(shape), None
        is_in.reshape(-1)[cell] = 1.0 if part is None else part
        if before is not None:
            was_in = np.zeros(shape)
            was_in.reshape(-1)[cell] = before
        explained_ns = np.array([delay.explained_ns for delay in delays])
        others_ns = (explained_ns[:, None] - class_ns) * (1 / _SPENT_NS)
        p = grid.any(axis=0).nonzero()[0]  # few prefill
        of_others = np.zeros(shape)
        of_others.reshape(-1)[cell] = _shares(
            np.concatenate([taken.weights.interference for taken in steps]), of, counts
        )
        decodes = _changed(~grid * others_ns[:, :1], is_in, was_in)
        prefills = _changed(grid * others_ns[:, 1:], is_in, was_in)[:, p]
        for cause, victims, spent, culprits, found in (
            (_DECODE_CO_BATCHED, seats, waits * ~grid, rows, shares * ~grid),
            (
                _DECODE_INTERFERENCE,
                seats,
                decodes,
                rows[p],
                (of_others * grid)[:, p],
            ),
            (
                _PREFILL_CO_BATCHED,
                seats[p],
                waits[:, p] * grid[:, p],
                rows[p],
                (shares * grid)[:, p],
            ),
            (_PREFILL_INTERFERENCE, seats[p], prefills, rows, of_others * ~grid),
        ):
            pairs = self._of_cause(cause)
            cells = (victims * pairs.shape[1])[:, None] + culprits
            if has_one_row_each:
                pairs.reshape(-1)[cells.reshape(-1)] += product(spent.T, found).reshape(-1)
            else:
                np.add.at(pairs.reshape(-1), cells.reshape(-1), product(spent.T, found).reshape(-1))

    def _of_cause(self, cause: int) -> Floats:
        """Return the matrix of a cause, enlarged to all current seats and rows."""
        pairs, shape = self._pairs[cause], (self._num_seats, self._holds.num_rows)
        if pairs is None or pairs.shape != shape:
            grown = np.zeros(shape)
            if pairs is not None:
                grown[: pairs.shape[0], : pairs.shape[1]] = pairs
            pairs = self._pairs[cause] = grown
        return pairs

    def _forget(self, rows: list[int]) -> None:
        """Remove culprits: their blame in the matrices counts as unknown from now on."""
        gone = np.array(rows)
        for pairs in self._pairs:
            if pairs is not None:
                of_cause = gone[gone < pairs.shape[1]]
                pairs[:, 0] += pairs[:, of_cause].sum(axis=1)
                pairs[:, of_cause] = 0.0

    def _weight_of(self, rows: list[int]) -> Floats:
        """Return the total blame of culprits in the matrices: [rows], in nanoseconds."""
        self.fold()
        weight = np.zeros(self._holds.num_rows)
        for pairs in self._pairs:
            if pairs is not None:
                weight[: pairs.shape[1]] += pairs.sum(axis=0)
        return weight[rows] * (_SPENT_NS / _SHARE)

    # --- what is found ------------------------------------------------------------------------

    def of(self, slot: int, row_ns: dict[str, int], *, at_ns: int) -> tuple[BlameShare, ...]:
        """Return a request's blame: for each cause, its culprits in falling order, then the rest.

        Args:
            slot: slot of the request.
            row_ns: waits in its ledger in nanoseconds, by cause; each cause's culprits sum to it.
            at_ns: current time, for a request that waits to be admitted or resumed.
        """
        wanted = [cause for cause in BLAMED if row_ns.get(cause, 0) > 0]
        if not wanted:
            return ()
        self.fold()
        found = {
            cause: BlameTotals(it.total_ns, dict(it.by_name))
            for cause, it in self._found.get(slot, {}).items()
        }
        parts, total_ns = self._holds.until(slot, at_ns)
        if total_ns > 0:
            self._add_rows(found, slot, "queue", parts, total_ns)
        if slot in self._held:
            self._note_held(found, self._held[slot], at_ns)
        seat, row = self._seat_of.item(slot), self._row_of.item(slot)
        for cause, pairs in zip(_IN_STEPS, self._pairs, strict=True):
            if cause in wanted and pairs is not None and seat < len(pairs):
                parts = pairs[seat] * (_SPENT_NS / _SHARE)
                parts[row] = 0.0
                self._add_rows(found, slot, cause, parts, float(parts.sum()))
        nothing = BlameTotals()
        culprits: list[BlameShare] = []
        for cause in wanted:
            culprits += found.get(cause, nothing).to_shares(cause, row_ns[cause])
        return tuple(culprits)

    def _note_held(self, found: dict[str, BlameTotals], held: _Held, until_ns: int) -> None:
        spent_ns = until_ns - held.since_ns
        spent_ns -= self._device.paused_within_ns(held.since_ns, until_ns)
        whole = sum(held.parts.values())
        if spent_ns > 0:
            parts = {name: spent_ns * part / whole for name, part in held.parts.items()}
            found.setdefault("preempted", BlameTotals()).add(parts, total_ns=spent_ns)

    def _found_of(self, slot: int) -> dict[str, BlameTotals]:
        return self._found.setdefault(slot, {})

    def _add_rows(
        self, found: dict[str, BlameTotals], slot: int, cause: str, parts: Floats, total_ns: float
    ) -> None:
        if cause not in found:
            found[cause] = BlameTotals()
        found[cause].add_rows(
            parts, self._holds.names, total_ns=total_ns, but_for=self._names[slot]
        )


def _shares(weights: Floats, of: Ints, counts: Ints) -> Floats:
    """Return each member's share of the weights of its class and step, in `1 / _SHARE`."""
    whole = np.bincount(of, weights, len(counts))
    none = (whole <= 0) & (counts > 0)
    if none.any():  # the model knows no difference: all alike
        weights[none[of]] = 1.0
        whole = np.where(none, counts, whole)
    shares: Floats = np.rint(weights * (_SHARE / np.maximum(whole, 1e-9))[of])
    return shares


def _own_ns(delay: Delay) -> Ints:
    """Return each member's wait for its own work: [members]."""
    return delay.own_ns if delay.recompute_ns is None else delay.own_ns + delay.recompute_ns


def _part_of(taken: Taken, part: Floats | None) -> Floats:
    return np.ones(len(taken.slots)) if part is None else part


def _changed(spent: Floats, part: Floats, before: Floats | None) -> Floats:
    """Return the given fractions of waits as whole numbers, less the stored ones."""
    found = np.rint(spent * part)
    if before is not None:
        found -= np.rint(spent * before)
    return found


def unknown(row_ns: dict[str, int]) -> tuple[BlameShare, ...]:
    """Return the blame of a request without a known culprit; see `Blame.of`."""
    nothing = BlameTotals()
    return tuple(
        culprit
        for cause in BLAMED
        if row_ns.get(cause, 0) > 0
        for culprit in nothing.to_shares(cause, row_ns[cause])
    )
