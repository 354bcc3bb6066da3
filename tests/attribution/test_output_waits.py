"""Waits for output where several steps are in flight and tokens leave several steps late."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from inferscope.attribution.counterfactual import Delay
from inferscope.attribution.ledger import (
    ABORTED,
    ADMITTED,
    ANSWERED,
    END,
    PREEMPTED,
    RUNNING,
    Ledger,
    Step,
)
from inferscope.records import CAUSES

NEVER_NS = 1 << 62


@dataclass(eq=False)
class _Planned:
    number: int
    planned_ns: int
    start_ns: int
    end_ns: int
    members: list[_Request]
    emitted_ns: int = NEVER_NS
    emits: list[_Request] = field(default_factory=list)


@dataclass(eq=False)
class _Request:
    slot: int
    replica: int
    num_due: int
    """Number of tokens still to emit."""
    over_ns: int = NEVER_NS
    held: list[tuple[int, int]] = field(default_factory=list)
    steps: list[_Planned] = field(default_factory=list)


class _Run:
    """Replicas that plan steps ahead, and put out their tokens in order, but late."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.facts: list[tuple[int, Callable[[Ledger], object]]] = []
        self.steps: list[list[_Planned]] = [[] for _ in range(self.rng.choice([1, 1, 2]))]
        self.requests = [
            _Request(slot, self.rng.randrange(len(self.steps)), self.rng.randint(1, 8))
            for slot in range(1, self.rng.randint(2, 7))
        ]
        for replica in range(len(self.steps)):
            self._serve(replica, num_in_flight=self.rng.choice([1, 2, 4]))
        for request in self.requests:
            if request.over_ns == NEVER_NS:
                self._end(request, 1_000_000)

    def _at(self, at_ns: int, fact: Callable[[Ledger], object]) -> None:
        self.facts.append((at_ns, fact))

    def _serve(self, replica: int, *, num_in_flight: int) -> None:
        rng, now_ns, emitted_ns = self.rng, 10, 0
        first_number = rng.choice([0, 500])
        is_slow, is_pipeline = rng.random() < 0.7, rng.random() < 0.3
        flying: list[_Planned] = []
        for at in range(rng.randint(2, 14)):
            if len(flying) >= num_in_flight:
                done = flying.pop(0)
                emitted_ns = self._emit(replica, done, emitted_ns, is_slow=is_slow)
                now_ns = max(now_ns, emitted_ns)
            now_ns += rng.choice([1, 20])
            mine = [each for each in self.requests if each.replica == replica]
            now_ns = max([now_ns, *(back_ns + 1 for each in mine for _, back_ns in each.held)])
            busy = {each for step in flying for each in step.members} if is_pipeline else set()
            members = [
                each
                for each in mine
                if each.over_ns == NEVER_NS and each not in busy and rng.random() < 0.7
            ]
            if not members:
                continue
            before = self.steps[replica][-1:] or [None]
            start_ns = now_ns + rng.choice([1, 1, 15])
            if before[0] is not None:
                free_ns = before[0].start_ns + 5 if is_pipeline else before[0].end_ns
                start_ns = max(start_ns, free_ns + rng.choice([0, 1, 15]))
            start_ns = max([start_ns, *(each.steps[-1].end_ns for each in members if each.steps)])
            number = first_number + at
            step = _Planned(number, now_ns, start_ns, start_ns + rng.randint(30, 120), members)
            for each in members:
                each.steps.append(step)
            self.steps[replica].append(step)
            flying.append(step)
            self._at(start_ns, self._start_of(replica, step))
        for done in flying:
            emitted_ns = self._emit(replica, done, emitted_ns, is_slow=is_slow)

    def _start_of(self, replica: int, step: _Planned) -> Callable[[Ledger], object]:
        members = np.array([each.slot for each in step.members])
        took_ns = step.end_ns - step.start_ns
        own = Delay(np.full(len(members), took_ns // 2), None, [], took_ns, took_ns, took_ns, 0)
        return lambda ledger: ledger.step(
            Step(
                members, own, step.start_ns, step.end_ns,
                dp_rank=replica, planned_ns=step.planned_ns, number=step.number,
            )
        )  # fmt: skip

    def _emit(self, replica: int, step: _Planned, after_ns: int, *, is_slow: bool) -> int:
        """Emit the tokens of a step; end or preempt some of its requests."""
        rng = self.rng
        delay_ns = rng.choice([1, 30, 400]) if is_slow else 1
        at_ns = step.emitted_ns = max(after_ns + 1, step.end_ns + delay_ns)
        # Not all members have a token: a chunk of a prompt, and a request that has ended.
        step.emits = [
            each for each in step.members if each.over_ns == NEVER_NS and rng.random() < 0.9
        ]
        slots = np.array([each.slot for each in step.emits], dtype=np.int64)
        if len(slots):
            self._at(
                at_ns,
                lambda ledger: ledger.emitted(slots, at_ns, step=step.number, dp_rank=replica),
            )
        for each in step.emits:
            each.num_due -= 1
            if not each.num_due:
                self._end(each, at_ns + rng.choice([0, 3]))
            elif rng.random() < 0.1:
                self._preempt(each, at_ns)
        return at_ns

    def _preempt(self, request: _Request, at_ns: int) -> None:
        is_running = any(step.start_ns <= at_ns < step.end_ns for step in request.steps)
        if is_running or request.steps[-1].start_ns >= at_ns or _covers(request.held, at_ns - 1):
            return
        request.held.append((at_ns, at_ns + 10))
        self._at(at_ns, lambda ledger: ledger.note(request.slot, PREEMPTED, at_ns))
        self._at(at_ns + 10, lambda ledger: ledger.note(request.slot, ADMITTED, at_ns + 10))

    def _end(self, request: _Request, at_ns: int) -> None:
        if any(step.start_ns == at_ns for step in request.steps):
            at_ns += 1  # of two facts at one time, either may come first
        request.over_ns = at_ns
        kind = ABORTED if request.num_due else ANSWERED
        self._at(at_ns, lambda ledger: ledger.note(request.slot, kind, at_ns))
        self._at(at_ns, lambda ledger: ledger.note(request.slot, END, at_ns))

    def play(self, rng: random.Random | None) -> Ledger:
        """Return a ledger of the run, booked in windows of any size; without `rng` at once."""
        ledger = Ledger(8)
        ledger.pass_idle(0)
        for request in self.requests:
            ledger.begin(request.slot, 0, RUNNING)
            ledger.replicas.begin(request.slot, str(request.slot))
        for request in self.requests:
            ledger.place(request.slot, request.replica)
        last_ns = 0
        for at_ns, fact in sorted(self.facts, key=lambda fact: fact[0]):
            if rng is not None and at_ns > last_ns and rng.random() < 0.5:
                ledger.fold(rng.randint(last_ns + 1, at_ns))
            fact(ledger)
            last_ns = at_ns
        ledger.fold(None)
        return ledger

    def waits_of(self, request: _Request) -> Counter[str]:
        """Return what a request waited for, by the definition; all steps under one name."""
        mine = [step for step in request.steps if step.start_ns < request.over_ns]
        waits = [(step.end_ns, step.emitted_ns) for step in mine if request in step.emits]
        busy = [(step.start_ns, step.end_ns) for step in self.steps[request.replica]]
        all_out_ns = NEVER_NS if request.num_due else max(until_ns for _, until_ns in waits)
        last_start_ns = max(step.start_ns for step in mine) if mine else 0
        times = {0, request.over_ns}
        for begin_ns, end_ns in [*waits, *busy, *request.held]:
            times |= {begin_ns, end_ns}
        found: Counter[str] = Counter()
        known = sorted(ns for ns in times if ns <= request.over_ns)
        for at_ns, until_ns in pairwise(known):
            if _covers(request.held, at_ns):
                cause = "preempted"
            elif any(step.start_ns <= at_ns < step.end_ns for step in mine):
                cause = "step"
            elif _covers(waits, at_ns) or (at_ns >= max(all_out_ns, last_start_ns)):
                cause = "output"
            else:
                cause = "not_scheduled" if _covers(busy, at_ns) else "cpu_gap"
            found[cause] += until_ns - at_ns
        return found


def _covers(intervals: list[tuple[int, int]], at_ns: int) -> bool:
    return any(begin_ns <= at_ns < end_ns for begin_ns, end_ns in intervals)


def _rows(ledger: Ledger, slot: int) -> dict[str, int]:
    up_to_first, after = ledger.rows_of(slot, is_streamed=False)
    return {
        cause: ns for cause, ns in zip(CAUSES, (up_to_first + after).tolist(), strict=True) if ns
    }


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32))
def test_from_each_steps_end_to_its_tokens_emission_is_output_in_windows_of_any_size(
    seed: int,
) -> None:
    run = _Run(seed)
    whole = run.play(None)
    cut = run.play(random.Random(seed))
    for request in run.requests:
        booked = Counter[str]()
        for cause, ns in _rows(whole, request.slot).items():
            booked["step" if cause.startswith("decode_") else cause] += ns
        assert sum(booked.values()) == request.over_ns
        assert booked == +run.waits_of(request), request.slot
        for one, other in zip(
            whole.rows_of(request.slot, is_streamed=True),
            cut.rows_of(request.slot, is_streamed=True),
            strict=True,
        ):
            assert one.tolist() == other.tolist(), request.slot
    assert not len(cut._gaps.slot)
