"""Who was waited for: each cause that lies with other requests, by those requests.

    queue                  who held what kept the next one out, step by step: the slots, the KV
                           blocks, the budget of tokens; where nothing did and the step itself was
                           waited for, who made it long
    decode_interference    whose prompts were computed in one's steps, by what each takes alone
    decode_co_batched      who decoded in them, all alike
    prefill_interference   who decoded beside one's prompt, all alike
    prefill_co_batched     whose prompts were computed beside it, by what each takes alone
    preempted              who held the blocks when one lost one's own

The scheduler names one constraint for a step, and it is that of the head of the queue: those behind
wait for the same. `queue_idle` has nobody to blame, for the device did nothing.

While it runs this costs next to nothing: a few sums a step, and one addition by member where
somebody waits. Who answers for what is worked out when it is asked (see `roster`), and is scaled to
the ledger's rows: the ledger says how long, this says for whom.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec
import numpy as np
from numpy.typing import NDArray

from inferscope.attribution.counterfactual import Delay
from inferscope.attribution.culprits import Culprit, Found
from inferscope.attribution.roster import (
    BESIDE_OTHER_PROMPTS,
    BESIDE_PROMPTS,
    DECODING,
    NOBODY_ROW,
    PROMPTS,
    SLOTS,
    Marks,
    Roster,
)
from inferscope.attribution.stays import Course, Grip, Place, Stay

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
_OF_PROMPTS = (PROMPTS, BESIDE_OTHER_PROMPTS)
"""Scales of what a request costs others with its prompt; likewise while it decodes."""
_OF_DECODES = (DECODING, BESIDE_PROMPTS)
_MOST_STAYS = 8
"""Of one request: older ones are worked out as it goes."""


class _Wait(msgspec.Struct):
    """A request in the queue: what there was to blame others for when it came."""

    slots_ns: float
    """On the scale of slots."""
    mark: int | None = None
    """None until somebody is blamed for something else."""


class _Held(msgspec.Struct):
    """A preempted request: since when, and who had how much of what it lacked."""

    since_ns: int
    parts: dict[str, float]


class Blame:
    """The blame among one engine's requests, by slot."""

    def __init__(self, num_slots: int) -> None:
        """Start with room for this many requests; `grow` makes more."""
        self._names = [""] * num_slots
        self._row_of: Ints = np.zeros(num_slots, dtype=np.int64)
        """[slots], of their stays under way."""
        self._is_staying = np.arange(num_slots) == 0
        """[slots], where there is one; nobody, who has no row to enter, is there always."""
        self._roster = Roster()
        self._marks = Marks(self._roster)
        self._waiting: dict[int, _Wait] = {}
        self._unmarked: dict[int, _Wait] = {}
        """Those who have no mark yet."""
        self._queued_ns = 0
        """When the last one came."""
        self._slots_ns = 0.0
        """How far all have come on the scale of slots."""
        self._staying: dict[int, Stay] = {}
        self._prefilling: set[int] = set()
        self._stays: dict[int, list[Stay]] = {}
        """Those that are over."""
        self._held: dict[int, _Held] = {}
        self._found: dict[int, dict[str, Found]] = {}
        self._courses: dict[int, Course] = {}
        """By data-parallel rank."""
        self._num_left = 0

    def grow(self, num_slots: int) -> None:
        """Make room for more requests."""
        more = num_slots - len(self._names)
        self._names += [""] * more
        self._row_of = np.concatenate([self._row_of, np.zeros(more, dtype=np.int64)])
        self._is_staying = np.concatenate([self._is_staying, np.zeros(more, dtype=np.bool_)])

    @property
    def num_waiting(self) -> int:
        """Return how many wait to be admitted."""
        return len(self._waiting)

    # --- requests -----------------------------------------------------------------------------

    def begin(self, slot: int, name: str) -> None:
        """Meet a request, in a free slot."""
        self._names[slot] = name

    def end(self, slot: int) -> None:
        """Forget a request that is in no state any more."""
        self._stays.pop(slot, None)
        self._found.pop(slot, None)

    def queued(self, slot: int, at_ns: int) -> None:
        """Let a request begin to wait."""
        self._waiting[slot] = self._unmarked[slot] = _Wait(self._slots_ns)
        self._queued_ns = at_ns

    def admitted(self, slot: int, waited_ns: int) -> None:
        """End a request's wait, which was so long while the device worked."""
        wait = self._waiting.pop(slot)
        self._unmarked.pop(slot, None)
        if waited_ns > 0:
            self._note_wait(slot, self._found_of(slot), wait, waited_ns)

    def preempted(self, slot: int, at_ns: int) -> None:
        """Take a request's blocks: whoever has blocks now had them before it could get any."""
        parts: dict[str, float] = {}
        stays = self._stays.get(slot)
        course = stays[-1].course if stays else None
        if course is not None and course.grip is not None:
            blocks = course.grip.blocks().tolist()
            for other, held in zip(course.members.tolist(), blocks, strict=True):
                if other in self._staying and other != slot:
                    parts[self._names[other]] = held
        self._held[slot] = _Held(at_ns, parts)

    def resumed(self, slot: int, at_ns: int) -> None:
        """Let a preempted request go on, or end."""
        _note_held(self._found_of(slot), self._held.pop(slot), at_ns)

    def left(self, slot: int) -> None:
        """Take a request out of the batch."""
        stay = self._staying.pop(slot, None)
        if stay is None:
            return
        self._num_left += 1
        self._roster.left[SLOTS, stay.row] = self._slots_ns
        stay.left = stay.course.place()
        if slot in self._prefilling:
            self._prefilling.discard(slot)
            self._end_spans(stay.row, stay.left, _OF_PROMPTS)
        else:
            self._end_spans(stay.row, stay.left, _OF_DECODES)
        self._roster.end(stay.row)
        self._row_of[slot], self._is_staying[slot] = NOBODY_ROW, False
        stays = self._stays.setdefault(slot, [])
        stays.append(stay)
        if len(stays) > _MOST_STAYS:
            self._note_stay(slot, self._found_of(slot), stays.pop(0))

    # --- steps --------------------------------------------------------------------------------

    def hold(self, slots: Ints, delay: Delay, grip: Grip | None, spent_ns: int) -> None:
        """Blame the members of a step for some of its time: others waited for it in the queue.

        Args:
            slots: [members].
            delay: theirs.
            grip: what they hold; None where that is not known.
            spent_ns: how long others waited.
        """
        if grip is not None and grip.binding == "slots" and self._staying:
            # Not only those whom this step computes.
            self._slots_ns += spent_ns / len(self._staying)
            return
        if self._unmarked:
            mark = self._marks.set(self._queued_ns)
            for wait in self._unmarked.values():
                wait.mark = mark
            self._unmarked.clear()
        held_ns = self._roster.held_ns
        if grip is None or not len(slots):
            held_ns[NOBODY_ROW] += spent_ns
            return
        parts: Floats
        match grip.binding:
            case "blocks":
                parts = grip.blocks()
            case "budget":
                parts = grip.tokens.astype(np.float64)
            case _:
                parts = _alone_ns(delay)
        whole = float(np.add.reduce(parts))
        if whole > 0:
            parts *= spent_ns / whole
        else:
            parts = np.full(len(slots), spent_ns / len(slots))
        held_ns[self._row_of[slots]] += parts

    def step(self, slots: Ints, delay: Delay, grip: Grip | None) -> None:
        """Take a step: what its members wait for each other.

        Args:
            slots: [members], NOBODY where one has left; the same array says the same members.
            delay: theirs.
            grip: what they hold; None where that is not known.
        """
        prefills = delay.prefills
        dp_rank = 0 if grip is None else grip.dp_rank
        course = self._courses.get(dp_rank)
        if course is None:
            course = self._courses[dp_rank] = Course(dp_rank)
        if slots is not course.members or course.num_left != self._num_left:
            course.members, course.num_left = slots, self._num_left
            are_staying = self._is_staying[slots].tobytes()
            at = are_staying.find(0)
            while at >= 0:
                self._enter(slots.item(at), course, is_prefill=at in prefills)
                at = are_staying.find(0, at + 1)
        course.grip = grip
        if self._prefilling:
            done = self._prefilling.difference([slots.item(at) for at in prefills])
            for slot in sorted(done.intersection(slots.tolist())) if done else ():
                self._promote(slot)
        num_decodes = len(slots) - len(prefills)
        if num_decodes > 1:
            at = 0
            if prefills:
                while at in prefills:
                    at += 1
            co_batched_ns = max(1, delay.decode_class_ns - delay.own_ns.item(at))
            course.co_batched_ns += co_batched_ns
            course.decoding += co_batched_ns / (num_decodes - 1)
        if prefills:
            self._step_with_prompts(course, delay, num_decodes)

    def _step_with_prompts(self, course: Course, delay: Delay, num_decodes: int) -> None:
        slots, prefills = course.members, delay.prefills
        of_decodes_ns = 0
        if num_decodes:
            of_decodes_ns = delay.decode_interference_ns
            beside_ns = delay.prefill_interference_ns
            course.prompts += of_decodes_ns
            course.beside_ns += beside_ns
            course.beside_prompts += beside_ns / num_decodes
        if len(prefills) == 1:
            row = self._row_of.item(slots.item(prefills[0]))
            self._roster.cost_ns[PROMPTS, row] += of_decodes_ns
            return
        own_ns, again_ns = delay.own_ns, delay.recompute_ns
        alone_ns = [own_ns.item(at) for at in prefills]
        if again_ns is not None:
            alone_ns = [ns + again_ns.item(at) for ns, at in zip(alone_ns, prefills, strict=True)]
        whole_ns = sum(alone_ns)
        others_ns = max(0, delay.prefill_class_ns - min(alone_ns))
        course.beside_other_prompts += others_ns
        for at, ns in zip(prefills, alone_ns, strict=True):
            row = self._row_of.item(slots.item(at))
            part = ns / whole_ns if whole_ns else 1 / len(prefills)
            self._roster.cost_ns[PROMPTS, row] += of_decodes_ns * part
            if others_ns:
                self._roster.cost_ns[BESIDE_OTHER_PROMPTS, row] += others_ns * part

    # --- stays --------------------------------------------------------------------------------

    def _enter(self, slot: int, course: Course, *, is_prefill: bool) -> None:
        row = self._roster.take(self._names[slot], course.dp_rank)
        self._row_of[slot], self._is_staying[slot] = row, True
        self._roster.entered[SLOTS, row] = self._slots_ns
        place = course.place()
        self._staying[slot] = Stay(row, course, place, None if is_prefill else place)
        if is_prefill:
            self._prefilling.add(slot)
        for scale in _OF_PROMPTS if is_prefill else _OF_DECODES:
            self._roster.entered[scale, row] = place.scales[scale]

    def _promote(self, slot: int) -> None:
        """Let a request whose prompt is done decode from here on."""
        self._prefilling.discard(slot)
        stay = self._staying[slot]
        stay.promoted = place = stay.course.place()
        self._end_spans(stay.row, place, _OF_PROMPTS)
        for scale in _OF_DECODES:
            self._roster.entered[scale, stay.row] = place.scales[scale]

    def _end_spans(self, row: int, place: Place, scales: tuple[int, int]) -> None:
        for scale in scales:
            self._roster.left[scale, row] = place.scales[scale]

    # --- what is found ------------------------------------------------------------------------

    def of(
        self, slot: int, row_ns: dict[str, int], *, at_ns: int, waited_ns: int = 0
    ) -> tuple[Culprit, ...]:
        """Return a request's blame: each cause's culprits, the most to blame first, then others.

        Args:
            slot: the request's.
            row_ns: what its ledger says it waited, by cause; each cause's culprits sum to it.
            at_ns: now, for one that waits to be resumed.
            waited_ns: what it has waited in the queue, for one that is there yet.
        """
        wanted = [cause for cause in BLAMED if row_ns.get(cause, 0) > 0]
        if not wanted:
            return ()
        found = {
            cause: Found(it.total_ns, dict(it.by_name))
            for cause, it in self._found.get(slot, {}).items()
        }
        if waited_ns > 0 and slot in self._waiting:
            self._note_wait(slot, found, self._waiting[slot], waited_ns)
        for stay in self._stays.get(slot, ()):
            self._note_stay(slot, found, stay, wanted)
        if slot in self._staying:
            self._note_stay(slot, found, self._staying[slot], wanted)
        if slot in self._held:
            _note_held(found, self._held[slot], at_ns)
        nothing = Found()
        culprits: list[Culprit] = []
        for cause in wanted:
            culprits += found.get(cause, nothing).told(cause, row_ns[cause])
        return tuple(culprits)

    def _found_of(self, slot: int) -> dict[str, Found]:
        return self._found.setdefault(slot, {})

    def _note_wait(self, slot: int, found: dict[str, Found], wait: _Wait, waited_ns: int) -> None:
        now = self._slots_ns
        parts = self._roster.common(SLOTS, wait.slots_ns, now, now=now)
        if wait.mark is not None:
            parts += self._marks.growth(wait.mark)
        self._note(slot, found, "queue", parts, waited_ns)

    def _note_stay(
        self,
        slot: int,
        found: dict[str, Found],
        stay: Stay,
        wanted: Collection[str] = BLAMED,
    ) -> None:
        """Add what a stay in the batch has shown, of the causes that are wanted."""
        course, start, end = stay.course, stay.entered, stay.left or stay.course.place()
        middle = stay.promoted or end
        beside_ns = middle.beside_ns - start.beside_ns
        co_batched_ns = end.co_batched_ns - middle.co_batched_ns
        prompts_ns = end.scales[PROMPTS] - middle.scales[PROMPTS]
        now = course.scales()
        for cause, scale, since, until, total_ns in (
            ("prefill_interference", BESIDE_PROMPTS, start, middle, beside_ns),
            ("prefill_co_batched", BESIDE_OTHER_PROMPTS, start, middle, 0.0),
            ("decode_interference", PROMPTS, middle, end, prompts_ns),
            ("decode_co_batched", DECODING, middle, end, co_batched_ns),
        ):
            first, last = since.scales[scale], until.scales[scale]
            if last > first and cause in wanted:
                parts = self._roster.common(scale, first, last, now=now[scale])
                if len(self._courses) > 1:
                    parts *= self._roster.dp_ranks == course.dp_rank
                self._note(slot, found, cause, parts, total_ns)

    def _note(
        self, slot: int, found: dict[str, Found], cause: str, parts: Floats, total_ns: float
    ) -> None:
        if cause not in found:
            found[cause] = Found()
        found[cause].add_rows(
            parts, self._roster.names, total_ns=total_ns, but_for=self._names[slot]
        )


def _note_held(found: dict[str, Found], held: _Held, until_ns: int) -> None:
    spent_ns = until_ns - held.since_ns
    whole = sum(held.parts.values())
    if spent_ns > 0:
        parts = {name: spent_ns * part / whole for name, part in held.parts.items()}
        found.setdefault("preempted", Found()).add(parts, total_ns=spent_ns)


def _alone_ns(delay: Delay) -> Floats:
    """Return what each member would have taken alone: [members]."""
    if delay.recompute_ns is None:
        return delay.own_ns.astype(np.float64)
    return (delay.own_ns + delay.recompute_ns).astype(np.float64)
