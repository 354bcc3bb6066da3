from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from numpy.typing import NDArray

from inferscope.attribution.counterfactual import Delay
from inferscope.attribution.ledger import ARRIVING, HELD, RUNNING, WAITING, Ledger
from inferscope.records import CAUSES
from tests.attribution import oracle

Ints = NDArray[np.int64]


def make_delay(draw: random.Random, delay_ns: int, num: int) -> Delay:
    """Return some explanation of a delay: any that adds up."""
    prefills = [at for at in range(num) if draw.random() < 0.3]
    explained_ns = draw.choice([delay_ns, draw.randint(0, delay_ns)])
    prefill_ns = draw.randint(0, explained_ns) if prefills else explained_ns
    decode_ns = draw.randint(0, explained_ns) if prefills else explained_ns
    own = np.array(
        [draw.randint(0, prefill_ns if at in prefills else decode_ns) for at in range(num)]
    )
    again = None
    if draw.random() < 0.3:
        again = np.where(np.isin(np.arange(num), prefills), own // 3, 0)
    return Delay(
        own if again is None else own - again,
        again,
        prefills,
        prefill_ns,
        decode_ns,
        explained_ns,
        delay_ns - explained_ns,
    )


def few_prefills(draw: random.Random, delay_ns: int, num: int) -> Delay:
    """Return an explanation that the ledger keeps as sums."""
    class_ns = delay_ns - draw.randint(0, 9)
    own = np.array([draw.randint(0, class_ns // 2) for _ in range(num)])
    prefills = sorted(draw.sample(range(num), draw.randint(0, 2)))
    return Delay(own, None, prefills, class_ns // 2, class_ns, class_ns, delay_ns - class_ns)


class AnyOrder(RuleBasedStateMachine):
    """Events in any order, late ones and impossible ones too: every ledger closes at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(3)
        self.now_ns = 1_000
        self.first_ns = self.now_ns
        self.arrived: dict[int, int] = {}
        self.team: Ints | None = None
        self.ledger.pass_idle(self.now_ns)

    @rule(state=st.sampled_from([ARRIVING, WAITING, RUNNING, HELD]), ago_ns=st.integers(0, 30))
    def arrive(self, state: int, ago_ns: int) -> None:
        slot = next((s for s in range(1, 9) if s not in self.arrived), None)
        if slot is None:
            return
        if slot >= len(self.ledger.state):
            self.ledger.grow(2 * len(self.ledger.state))
        self.arrived[slot] = self.now_ns - ago_ns
        self.ledger.begin(slot, self.now_ns - ago_ns, state)

    @rule(dt_ns=st.integers(0, 40))
    def pass_time(self, dt_ns: int) -> None:
        self.now_ns += dt_ns
        self.ledger.close_steps(self.now_ns)

    @rule()
    def tick(self) -> None:
        self.ledger.close_steps(self.now_ns)
        self.ledger.pass_idle(self.now_ns)

    @rule(
        slot=st.integers(1, 8),
        kind=st.sampled_from(["queued", "admitted", "admitted", "preempted", "finished", "lost"]),
        ago_ns=st.sampled_from([0, 0, 0, 3, 50]),
        was_emitted=st.booleans(),
    )
    def happen(self, slot: int, kind: str, ago_ns: int, was_emitted: bool) -> None:
        if slot not in self.arrived:
            return
        at_ns = self.now_ns - ago_ns
        if kind == "finished":
            emitted_ns = int(self.ledger.mark_ns[slot]) if was_emitted else 0
            self.ledger.finished(slot, at_ns, emitted_ns=emitted_ns)
        else:
            getattr(self.ledger, kind)(slot, at_ns)

    @rule(kind=st.sampled_from(["paused", "unpaused"]), ago_ns=st.sampled_from([0, 0, 7]))
    def turn(self, kind: str, ago_ns: int) -> None:
        getattr(self.ledger, kind)(self.now_ns - ago_ns)

    @rule(slot=st.integers(1, 8), late_ns=st.integers(0, 20), is_delivered=st.booleans())
    def leave(self, slot: int, late_ns: int, is_delivered: bool) -> None:
        if slot not in self.arrived:
            return
        if is_delivered:
            self.ledger.finished(slot, self.now_ns, emitted_ns=0)
            self.ledger.delivered(slot, self.now_ns - late_ns, self.now_ns)
            self.check_rows()
        self.ledger.free(slot)
        del self.arrived[slot]

    @rule(seed=st.integers(0, 2**32), ago_ns=st.sampled_from([0, 0, 5]), is_team=st.booleans())
    def emit(self, seed: int, ago_ns: int, is_team: bool) -> None:
        slots = self.some(random.Random(seed))
        if is_team and self.team is not None:
            slots = self.team
        if len(slots):
            self.ledger.emitted(slots, self.now_ns - ago_ns)

    @rule(
        seed=st.integers(0, 2**32),
        start_ns=st.sampled_from([0, 0, -10, 4]),
        length_ns=st.integers(1, 60),
        is_cold=st.booleans(),
        is_same_team=st.booleans(),
    )
    def begin_step(
        self, seed: int, start_ns: int, length_ns: int, is_cold: bool, is_same_team: bool
    ) -> None:
        draw = random.Random(seed)
        slots = self.some(draw)
        if is_same_team and self.team is not None:
            slots = self.team
        if not len(slots):
            return
        self.team = slots
        delay = make_delay(draw, length_ns, len(slots))
        start_ns += self.now_ns
        self.ledger.open_step(
            slots,
            delay,
            start_ns=start_ns,
            end_ns=start_ns + length_ns,
            is_cold=is_cold,
        )
        self.now_ns = max(self.now_ns, start_ns)

    def some(self, draw: random.Random) -> Ints:
        if draw.random() < 0.5:
            running = [s for s in self.arrived if self.ledger.state[s] == RUNNING]
            return np.array(running, dtype=np.int64)
        return np.array([s for s in self.arrived if draw.random() < 0.6], dtype=np.int64)

    @invariant()
    def check_rows(self) -> None:
        for slot, arrived_ns in self.arrived.items():
            row = self.ledger.rows[slot]
            assert int(row.sum()) == int(self.ledger.mark_ns[slot]) - arrived_ns
            assert (row >= 0).all()

    @invariant()
    def check_device(self) -> None:
        device = self.ledger.device
        assert device.mark_ns is not None
        spent_ns = device.busy_ns + device.idle_host_gap_ns + device.idle_no_work_ns
        assert spent_ns == device.mark_ns - self.first_ns
        assert min(device.busy_ns, device.idle_host_gap_ns, device.idle_no_work_ns) >= 0


AnyOrder.TestCase.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
TestAnyOrder = AnyOrder.TestCase


class Run:
    """A run without overlap: a made-up engine tells the ledger, and remembers for the oracle."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.ledger = Ledger(2)
        self.now_ns = 0
        self.lives: dict[int, oracle.Life] = {}
        self.steps: list[oracle.Step] = []
        self.running: list[int] = []
        self.held: list[int] = []
        self.waiting: list[int] = []
        self.tokens: Counter[int] = Counter()
        self.team = np.zeros(0, dtype=np.int64)
        self.ledger.pass_idle(0)

    def pass_time(self) -> None:
        self.now_ns += self.draw.randint(0, 50)

    def arrive(self) -> None:
        slot = len(self.lives) + 1
        while slot >= len(self.ledger.state):
            self.ledger.grow(2 * len(self.ledger.state))
        self.ledger.begin(slot, self.now_ns, ARRIVING)
        arrived_ns = self.now_ns
        self.pass_time()
        self.lives[slot] = oracle.Life(arrived_ns, self.now_ns)
        self.ledger.queued(slot, self.now_ns)
        self.waiting.append(slot)

    def admit(self, slots: list[int], most: int) -> None:
        for slot in slots[:most]:
            slots.remove(slot)
            self.ledger.admitted(slot, self.now_ns)
            self.running.append(slot)
            self.lives[slot].stays.append((self.now_ns, -1))

    def preempt(self) -> None:
        slot = self.running.pop()
        self.ledger.preempted(slot, self.now_ns)
        self.lives[slot].stays[-1] = (self.lives[slot].stays[-1][0], self.now_ns)
        self.held.append(slot)

    def step(self) -> None:
        members = [slot for slot in self.running if self.draw.random() < 0.9] or self.running[:]
        if members != self.team.tolist():
            self.team = np.array(members, dtype=np.int64)
        start_ns, self.now_ns = self.now_ns, self.now_ns + self.draw.randint(1, 200)
        delay = make_delay(self.draw, self.now_ns - start_ns, len(members))
        is_cold = self.draw.random() < 0.1
        self.ledger.open_step(
            self.team,
            delay,
            start_ns=start_ns,
            end_ns=self.now_ns,
            is_cold=is_cold,
        )
        self.ledger.close_steps(self.now_ns)
        parts = {}
        co_batched = delay.co_batched_ns()
        for at, slot in enumerate(members):
            phase = "prefill" if at in delay.prefills else "decode"
            parts[slot] = {
                f"{phase}_own": int(delay.own_ns[at]),
                f"{phase}_co_batched": int(co_batched[at]),
                f"{phase}_interference": getattr(delay, f"{phase}_interference_ns"),
                "recompute": 0 if delay.recompute_ns is None else int(delay.recompute_ns[at]),
                "cold_start" if is_cold else "slowdown": delay.excess_ns,
            }
        self.steps.append(oracle.Step(start_ns, self.now_ns, parts))
        self.emit(members)

    def emit(self, members: list[int]) -> None:
        self.pass_time()
        at_ns = self.now_ns
        self.ledger.emitted(self.team, at_ns)
        for slot in members:
            self.lives[slot].emitted_ns.append(at_ns)
            self.tokens[slot] += 1
            if self.tokens[slot] >= slot % 7 + 1:
                self.finish(slot)

    def finish(self, slot: int) -> None:
        life = self.lives[slot]
        life.finished_ns = self.now_ns + self.draw.randint(0, 9)
        life.delivered_ns = life.finished_ns + self.draw.randint(0, 9)
        life.stays[-1] = (life.stays[-1][0], life.finished_ns)
        self.ledger.finished(slot, life.finished_ns, emitted_ns=life.emitted_ns[-1])
        self.ledger.delivered(slot, life.emitted_ns[-1], life.delivered_ns)
        self.running.remove(slot)
        self.now_ns = max(self.now_ns, life.finished_ns)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32))
def test_the_ledger_is_the_partition_by_clipping(seed: int) -> None:
    run = Run(seed)
    for _ in range(40):
        run.pass_time()
        if run.draw.random() < 0.5 or not run.lives:
            run.arrive()
        run.admit(run.held, 1)
        run.admit(run.waiting, run.draw.randint(0, 2))
        if run.draw.random() < 0.1 and len(run.running) > 1:
            run.preempt()
        run.pass_time()
        if run.running:
            run.step()
    done = {slot: life for slot, life in run.lives.items() if life.delivered_ns}
    for slot, life in done.items():
        row = run.ledger.rows[slot]
        booked = {cause: int(ns) for cause, ns in zip(CAUSES, row, strict=True) if ns}
        assert booked == dict(oracle.ledger(slot, life, run.steps))
        assert sum(booked.values()) == life.delivered_ns - life.arrived_ns


class Watched(Ledger):
    """A ledger of which somebody reads everything after each call."""

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name not in WATCHED:
            return found

        def call(*arguments: Any, **named: Any) -> None:
            found(*arguments, **named)
            assert (self.rows[1:] >= 0).all()
            self._scatter()  # and forgets who stands together

        return call


WATCHED = ("begin", "queued", "admitted", "preempted", "finished", "delivered", "emitted")
WATCHED += ("open_step", "close_steps")


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32))
def test_what_is_kept_as_sums_comes_to_what_is_booked_one_by_one(seed: int) -> None:
    """Teams that change by a few, that emit in part, whose members end: read or not, the same."""
    ledgers = Ledger(4), Watched(4)
    for ledger in ledgers:
        draw, now_ns, num = random.Random(seed), 0, 8
        ledger.grow(100)
        running = list(range(1, num + 1))
        for slot in running:
            ledger.begin(slot, 0, RUNNING)
        team = np.array(running, dtype=np.int64)
        for _ in range(30):
            now_ns += draw.randint(0, 20)
            while len(running) < 8 or draw.random() < 0.1:
                num += 1
                ledger.begin(num, now_ns - draw.randint(0, 9), draw.choice([WAITING, RUNNING]))
                running.append(num)
            if team.tolist() != running:
                draw.shuffle(running)
                team = np.array(running, dtype=np.int64)
            delay = make_delay(draw, draw.randint(20, 90), len(team))
            if draw.random() < 0.7:
                delay = few_prefills(draw, draw.randint(20, 90), len(team))
            whole_ns = delay.explained_ns + delay.excess_ns
            ledger.open_step(
                team, delay, start_ns=now_ns, end_ns=now_ns + whole_ns, is_cold=draw.random() < 0.2
            )
            if draw.random() < 0.1:
                ledger.finished(running.pop(), now_ns + whole_ns // 2, emitted_ns=0)
            now_ns += whole_ns + draw.randint(-5, 5)
            ledger.close_steps(now_ns)
            emitting = team if draw.random() < 0.5 else team[draw.randint(1, 3) :]
            ledger.emitted(emitting, now_ns)
            for slot in [slot for slot in running if draw.random() < 0.1]:
                running.remove(slot)
                ledger.finished(slot, now_ns, emitted_ns=now_ns if slot in emitting else 0)
            if len(running) > 2 and draw.random() < 0.1:
                ledger.preempted(running[0], now_ns)
        ledger.close_steps(now_ns + 1_000)
    assert (ledgers[0].rows[1:] == ledgers[1].rows[1:]).all()
    assert (ledgers[0].mark_ns[1:] == ledgers[1].mark_ns[1:]).all()
    assert ledgers[0].rows.sum()


# --- overlap and other places where adding durations counts twice -----------------------------


def plain(delay_ns: int, num: int) -> Delay:
    own = np.full(num, delay_ns // 2)
    return Delay(own, None, [], delay_ns, delay_ns, delay_ns, 0)


def ledger_of(ledger: Ledger, slot: int) -> dict[str, int]:
    row = ledger.rows[slot]
    return {cause: int(ns) for cause, ns in zip(CAUSES, row, strict=True) if ns}


@pytest.fixture
def two_running() -> tuple[Ledger, Ints]:
    ledger = Ledger(4)
    ledger.pass_idle(0)
    for slot in (1, 2):
        ledger.begin(slot, 0, RUNNING)
    return ledger, np.array([1, 2])


def test_a_token_that_leaves_inside_the_next_step_cuts_it_and_counts_nothing_twice(
    two_running: tuple[Ledger, Ints],
) -> None:
    ledger, team = two_running
    for start_ns in (0, 100):
        ledger.open_step(
            team, plain(100, 2), start_ns=start_ns, end_ns=start_ns + 100, is_cold=False
        )
    ledger.emitted(team, 140)
    assert ledger_of(ledger, 1) == {"decode_own": 70, "decode_co_batched": 70}
    assert ledger.mark_ns[1] == 140
    ledger.close_steps(200)
    assert ledger_of(ledger, 1) == {"decode_own": 100, "decode_co_batched": 100}


def test_of_two_steps_that_overlap_the_earlier_has_its_members_first(
    two_running: tuple[Ledger, Ints],
) -> None:
    ledger, team = two_running
    ledger.open_step(team, plain(100, 2), start_ns=0, end_ns=100, is_cold=False)
    ledger.open_step(team, plain(100, 2), start_ns=60, end_ns=160, is_cold=False)
    ledger.close_steps(200)
    assert ledger.mark_ns[1] == 160
    assert sum(ledger_of(ledger, 1).values()) == ledger.device.busy_ns == 160


def test_a_step_within_a_step_adds_nothing(two_running: tuple[Ledger, Ints]) -> None:
    ledger, team = two_running
    ledger.open_step(team, plain(100, 2), start_ns=0, end_ns=100, is_cold=False)
    ledger.open_step(team, plain(20, 2), start_ns=50, end_ns=70, is_cold=False)
    ledger.close_steps(200)
    assert sum(ledger_of(ledger, 1).values()) == ledger.device.busy_ns == 100


def test_a_slot_given_back_in_an_open_step_comes_back_clean(
    two_running: tuple[Ledger, Ints],
) -> None:
    ledger, team = two_running
    ledger.open_step(team, plain(100, 2), start_ns=0, end_ns=100, is_cold=False)
    ledger.free(1)
    ledger.begin(1, 30, WAITING)
    ledger.close_steps(100)
    ledger.finished(1, 120, emitted_ns=0)
    assert ledger_of(ledger, 1) == {"queue": 70, "queue_idle": 20}


def test_a_request_that_has_ended_gains_nothing_from_a_step_that_still_names_it(
    two_running: tuple[Ledger, Ints],
) -> None:
    """And who runs beside the step's members was not scheduled, however many they are."""
    ledger, team = two_running
    ledger.finished(1, 10, emitted_ns=0)
    ledger.begin(3, 0, RUNNING)
    ledger.open_step(team, plain(100, 2), start_ns=50, end_ns=150, is_cold=False)
    ledger.close_steps(150)
    assert ledger_of(ledger, 1) == {"cpu_gap": 10}
    assert ledger_of(ledger, 3) == {"cpu_gap": 50, "not_scheduled": 100}


def test_a_wait_is_a_queue_only_while_the_device_works(two_running: tuple[Ledger, Ints]) -> None:
    ledger, team = two_running
    ledger.begin(3, 20, WAITING)
    ledger.open_step(team, plain(100, 2), start_ns=50, end_ns=150, is_cold=False)
    ledger.admitted(3, 90)
    assert ledger_of(ledger, 3) == {"queue": 40, "queue_idle": 30}


def test_a_step_announced_late_takes_back_the_idle_time_it_was_not(
    two_running: tuple[Ledger, Ints],
) -> None:
    ledger, team = two_running
    ledger.pass_idle(500)
    ledger.open_step(team, plain(100, 2), start_ns=450, end_ns=550, is_cold=False)
    ledger.close_steps(550)
    device = ledger.device
    assert (device.busy_ns, device.idle_host_gap_ns, device.idle_no_work_ns) == (100, 450, 0)
