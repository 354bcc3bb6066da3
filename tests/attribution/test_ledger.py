from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from numpy.typing import NDArray

from inferscope.attribution.counterfactual import Delay
from inferscope.attribution.ledger import (
    ABORTED,
    ADMITTED,
    ANSWERED,
    ARRIVING,
    DELIVERED,
    EDGE,
    END,
    HELD,
    LOST,
    PREEMPTED,
    QUEUED,
    RUNNING,
    TRANSFERRED,
    WAITING,
    Ledger,
    Step,
    scaled,
)
from inferscope.records import CAUSES
from tests.attribution import oracle
from tests.attribution.games import co_batched_ns

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


def rows_of(ledger: Ledger, slot: int, *, is_streamed: bool = True) -> Ints:
    """Return a request's whole row."""
    up_to_first, after = ledger.rows_of(slot, is_streamed=is_streamed)
    return up_to_first + after


def ledger_of(ledger: Ledger, slot: int) -> dict[str, int]:
    row = rows_of(ledger, slot)
    return {cause: int(ns) for cause, ns in zip(CAUSES, row, strict=True) if ns}


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

    @rule(ago_ns=st.sampled_from([0, 0, 20]), is_end=st.booleans())
    def fold(self, ago_ns: int, is_end: bool) -> None:
        self.ledger.fold(None if is_end else self.now_ns - ago_ns)
        self.ledger.pass_idle(self.now_ns)

    @rule(
        slot=st.integers(1, 8),
        kind=st.sampled_from(
            [QUEUED, ADMITTED, ADMITTED, PREEMPTED, ANSWERED, ABORTED, LOST, EDGE, TRANSFERRED]
        ),
        ago_ns=st.sampled_from([0, 0, 0, 3, 50]),
        since_ns=st.sampled_from([0, 0, 30]),
    )
    def happen(self, slot: int, kind: int, ago_ns: int, since_ns: int) -> None:
        if slot in self.arrived:
            at_ns = self.now_ns - ago_ns
            self.ledger.note(slot, kind, at_ns, since_ns=since_ns and at_ns - since_ns)

    @rule(is_paused=st.booleans(), ago_ns=st.sampled_from([0, 0, 7]))
    def turn(self, is_paused: bool, ago_ns: int) -> None:
        turn = self.ledger.pause if is_paused else self.ledger.unpause
        turn(self.now_ns - ago_ns)

    @rule(slot=st.integers(1, 8), late_ns=st.integers(0, 20), is_delivered=st.booleans())
    def leave(self, slot: int, late_ns: int, is_delivered: bool) -> None:
        if slot not in self.arrived:
            return
        if is_delivered:
            self.ledger.note(slot, ANSWERED, self.now_ns)
            self.ledger.note(slot, DELIVERED, self.now_ns, since_ns=self.now_ns - late_ns)
        self.ledger.note(slot, END, self.now_ns)
        self.ledger.fold(None)
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
        self.ledger.step(Step(slots, delay, start_ns, start_ns + length_ns, is_cold))
        self.now_ns = max(self.now_ns, start_ns)

    def some(self, draw: random.Random) -> Ints:
        if draw.random() < 0.5:
            running = [s for s in self.arrived if self.ledger.state[s] == RUNNING]
            return np.array(running, dtype=np.int64)
        return np.array([s for s in self.arrived if draw.random() < 0.6], dtype=np.int64)

    @invariant()
    def check_rows(self) -> None:
        for slot, arrived_ns in self.arrived.items():
            parts = self.ledger.rows_of(slot, is_streamed=True)
            assert sum(int(part.sum()) for part in parts) == self.ledger.mark_ns[slot] - arrived_ns
            assert min(part.min() for part in parts) >= 0

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
        self.ledger.note(slot, QUEUED, self.now_ns)
        self.waiting.append(slot)

    def admit(self, slots: list[int], most: int) -> None:
        for slot in slots[:most]:
            slots.remove(slot)
            self.ledger.note(slot, ADMITTED, self.now_ns)
            self.running.append(slot)
            self.lives[slot].stays.append((self.now_ns, -1))

    def preempt(self) -> None:
        slot = self.running.pop()
        self.ledger.note(slot, PREEMPTED, self.now_ns)
        self.lives[slot].stays[-1] = (self.lives[slot].stays[-1][0], self.now_ns)
        self.held.append(slot)

    def step(self) -> None:
        members = [slot for slot in self.running if self.draw.random() < 0.9] or self.running[:]
        if members != self.team.tolist():
            self.team = np.array(members, dtype=np.int64)
        start_ns, self.now_ns = self.now_ns, self.now_ns + self.draw.randint(1, 200)
        delay = make_delay(self.draw, self.now_ns - start_ns, len(members))
        is_cold = self.draw.random() < 0.1
        self.ledger.step(Step(self.team, delay, start_ns, self.now_ns, is_cold))
        parts = {}
        co_batched = co_batched_ns(delay)
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
        self.ledger.note(slot, ANSWERED, life.finished_ns)
        self.ledger.note(slot, DELIVERED, life.delivered_ns, since_ns=life.emitted_ns[-1])
        self.running.remove(slot)
        self.now_ns = max(self.now_ns, life.finished_ns)


@pytest.mark.thorough
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
        if run.draw.random() < 0.3:
            run.ledger.fold(run.now_ns)
    run.ledger.fold(None)
    done = {slot: life for slot, life in run.lives.items() if life.delivered_ns}
    for slot, life in done.items():
        row = rows_of(run.ledger, slot)
        booked = {cause: int(ns) for cause, ns in zip(CAUSES, row, strict=True) if ns}
        assert booked == dict(oracle.ledger(slot, life, run.steps))
        assert sum(booked.values()) == life.delivered_ns - life.arrived_ns


def book_decodes(draw: random.Random, ledgers: list[Ledger]) -> int:
    """Note the same long runs of decodes in each ledger, with what may come between; return when.

    The second ledger is folded in between, too.
    """
    slots, now_ns = [1, 2, 3, 4, 5], 0
    for ledger in ledgers:
        ledger.pass_idle(0)
        for slot in slots:
            ledger.begin(slot, 0, RUNNING)
    over: set[int] = set()
    first = set(slots)
    for number in range(30):
        now_ns += draw.choice([0, 3, 7])
        members = np.array([slot for slot in slots if draw.random() < 0.95] or [1])
        took_ns = draw.randint(5, 60)
        delay = make_delay(draw, took_ns, len(members))
        if draw.random() < 0.8:  # of decodes alone
            own_ns = np.array([draw.randint(0, 5) for _ in members])
            delay = Delay(own_ns, None, [], 5, 5, 5, took_ns - 5)
        is_cold, wait_ns = draw.random() < 0.1, draw.randint(0, delay.excess_ns)
        start_ns, now_ns = now_ns, now_ns + took_ns
        if draw.random() < 0.05:  # beside a step that lasts longer than many
            long_ns = draw.randint(50, 500)
            whole = Delay(np.array([3, 4]), None, [], 9, 9, 9, long_ns - 9)
            for ledger in ledgers:
                ledger.step(Step(np.array([1, 2]), whole, start_ns, start_ns + long_ns))
        emitted_ns = now_ns + draw.choice([0, 0, 2, 9])
        emits = members if draw.random() < 0.9 else members[: len(members) // 2]
        for ledger in ledgers:
            step = Step(members, delay, start_ns, now_ns, is_cold, wait_ns)
            ledger.step(step)
            ledger.emitted(emits, emitted_ns)
        now_ns = emitted_ns if draw.random() < 0.9 else now_ns  # or the next step overlaps
        events: list[tuple[int, int]] = []
        for slot in sorted(first & set(emits.tolist())):
            if draw.random() < 0.7:
                events.append((slot, EDGE))
                first.discard(slot)
        slot = draw.choice(slots)
        if draw.random() < 0.1:
            events += [(slot, PREEMPTED), (slot, ADMITTED)]
        elif draw.random() < 0.05 and slot not in over:
            over.add(slot)
            events += [(slot, ANSWERED), (slot, END)]
        now_ns = max(now_ns, emitted_ns) if events else now_ns
        for ledger in ledgers:
            for each, kind in events:
                ledger.note(each, kind, now_ns)
            if number == 12 and took_ns % 3 == 0:
                ledger.pause(now_ns)
                ledger.unpause(now_ns + 4)
        if draw.random() < 0.5 and now_ns >= emitted_ns:
            ledgers[1].fold(now_ns)
        now_ns += 5 * (number == 12)
    return now_ns + 100


@pytest.mark.thorough
@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32))
def test_runs_of_decodes_are_booked_as_their_steps_one_by_one(seed: int) -> None:
    ledgers = [Ledger(8), Ledger(8)]
    until_ns = book_decodes(random.Random(seed), ledgers)
    for ledger in ledgers:
        for slot in (1, 2, 3, 4, 5):
            ledger.note(slot, ABORTED, until_ns)
        ledger.fold(None)
    for slot in (1, 2, 3, 4, 5):
        whole, cut = (ledger.rows_of(slot, is_streamed=True) for ledger in ledgers)
        for one, other in zip(whole, cut, strict=True):
            assert one.tolist() == other.tolist()
        assert ledgers[0].mark_ns[slot] == ledgers[1].mark_ns[slot]


def plain(delay_ns: int, num: int) -> Delay:
    """Explain a step of decodes: half of it each one's own."""
    own = np.full(num, delay_ns // 2)
    return Delay(own, None, [], delay_ns, delay_ns, delay_ns, 0)


@pytest.fixture
def two_running() -> tuple[Ledger, Ints]:
    ledger = Ledger(4)
    ledger.pass_idle(0)
    for slot in (1, 2):
        ledger.begin(slot, 0, RUNNING)
    return ledger, np.array([1, 2])


def test_a_first_token_that_is_delivered_inside_the_next_step_cuts_it(
    two_running: tuple[Ledger, Ints],
) -> None:
    ledger, team = two_running
    for start_ns in (0, 100):
        ledger.step(Step(team, plain(100, 2), start_ns, start_ns + 100))
    ledger.emitted(team, 140)
    ledger.note(1, EDGE, 140)
    ledger.fold(200)
    up_to_first, after = ledger.rows_of(1, is_streamed=True)
    assert int(up_to_first.sum()) == 140
    assert int(after.sum()) == 60
    assert ledger_of(ledger, 1) == {"decode_own": 100, "decode_co_batched": 100}


def test_a_first_token_on_its_way_is_output_though_the_next_step_runs() -> None:
    ledger = Ledger(4)
    ledger.begin(1, 0, RUNNING)
    prefill = Delay(np.array([100]), None, [0], 100, 100, 100, 0)
    ledger.step(Step(np.array([1]), prefill, 0, 100))
    ledger.step(Step(np.array([1]), plain(100, 1), 101, 201))
    ledger.emitted(np.array([1]), 110)
    ledger.note(1, EDGE, 150)
    ledger.fold(300)
    up_to_first, after = ledger.rows_of(1, is_streamed=True)
    assert up_to_first[CAUSES.index("prefill_own")] == 100
    assert up_to_first[CAUSES.index("output")] == 50
    assert int(after.sum()) == 51
    up_to_first, _ = ledger.rows_of(1, is_streamed=False)  # its body goes out as a whole
    assert int(up_to_first.sum()) == 150
    assert up_to_first[CAUSES.index("decode_own")] > 0


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ("SE", {"output": 10, "cpu_gap": 20}),
        ("S", {"cpu_gap": 30}),
        ("UE", {"cpu_gap": 30}),  # the step in front of the token was not timed
    ],
)
def test_from_a_steps_end_to_its_tokens_emission_is_output(
    kinds: str, expected: dict[str, int]
) -> None:
    ledger, team = Ledger(4), np.array([1])
    ledger.begin(1, 0, RUNNING)
    ledger.step(Step(team, plain(100, 1), 0, 100))
    if "U" in kinds:
        ledger.emitted(team, 100)
        ledger.untimed(team, 100)
    if "E" in kinds:
        ledger.emitted(team, 110)
    ledger.step(Step(team, plain(100, 1), 130, 230))
    ledger.fold(None)
    booked = ledger_of(ledger, 1)
    assert {cause: ns for cause, ns in booked.items() if "decode" not in cause} == expected


def test_the_wait_for_the_slowest_rank_is_its_own_steps(two_running: tuple[Ledger, Ints]) -> None:
    ledger, team = two_running
    cold = Delay(np.array([50, 50]), None, [], 100, 100, 100, 300)
    slow = Delay(np.array([50, 50]), None, [], 100, 100, 100, 250)
    ledger.step(Step(team, cold, 0, 400, is_cold=True))
    ledger.step(Step(team, slow, 400, 750, wait_ns=200))
    ledger.fold(None)
    booked = ledger_of(ledger, 1)
    assert (booked["cold_start"], booked["rank_wait"], booked["slowdown"]) == (300, 200, 50)


def test_a_draft_models_step_is_draft_for_its_own_part_and_others_for_the_rest(
    two_running: tuple[Ledger, Ints],
) -> None:
    ledger, team = two_running
    ledger.step(Step(team, plain(60, 2), 0, 60, is_draft=True))
    ledger.step(Step(team, plain(100, 2), 60, 160))
    ledger.fold(None)
    for slot in (1, 2):
        booked = ledger_of(ledger, slot)
        assert (booked["draft"], booked["decode_own"], booked["decode_co_batched"]) == (30, 50, 80)


def test_of_two_steps_that_overlap_the_earlier_has_its_members_first(
    two_running: tuple[Ledger, Ints],
) -> None:
    ledger, team = two_running
    ledger.step(Step(team, plain(100, 2), 0, 100))
    ledger.step(Step(team, plain(100, 2), 60, 160))
    ledger.fold(200)
    assert ledger.mark_ns[1] == 160
    assert sum(ledger_of(ledger, 1).values()) == ledger.device.busy_ns == 160


def test_a_step_within_a_step_adds_nothing(two_running: tuple[Ledger, Ints]) -> None:
    ledger, team = two_running
    ledger.step(Step(team, plain(100, 2), 0, 100))
    ledger.step(Step(team, plain(20, 2), 50, 70))
    ledger.fold(200)
    assert sum(ledger_of(ledger, 1).values()) == ledger.device.busy_ns == 100


def test_a_request_that_has_ended_gains_nothing_from_a_step_that_still_names_it(
    two_running: tuple[Ledger, Ints],
) -> None:
    """And who runs beside the step's members was not scheduled, however many they are."""
    ledger, team = two_running
    ledger.begin(3, 0, RUNNING)
    ledger.note(1, ABORTED, 10)
    ledger.note(1, END, 10)
    ledger.step(Step(team, plain(100, 2), 50, 150))
    ledger.note(3, ABORTED, 150)
    ledger.fold(150)
    assert ledger_of(ledger, 1) == {"cpu_gap": 10}
    assert ledger_of(ledger, 3) == {"cpu_gap": 50, "not_scheduled": 100}


def test_a_request_cut_out_of_a_step_waits_for_no_more_of_it(
    two_running: tuple[Ledger, Ints],
) -> None:
    ledger, team = two_running
    ledger.step(Step(team, plain(100, 2), 0, 100))
    ledger.fold(20)  # the step is not over: nothing of it is booked
    assert not ledger_of(ledger, 1)
    assert ledger.is_held(1)
    ledger.note(1, ABORTED, 40)
    ledger.fold(60)
    assert sum(ledger_of(ledger, 1).values()) == 40
    assert not ledger.is_held(1)
    assert ledger.is_held(2)


@pytest.mark.parametrize(("is_team", "expected_ns"), [(True, 40), (False, 140)])
def test_a_token_that_awaits_output_does_so_while_earlier_ones_are_emitted(
    two_running: tuple[Ledger, Ints], is_team: bool, expected_ns: int
) -> None:
    # Overlapped scheduling with an output that takes longer than a step.
    ledger, team = two_running
    last = team if is_team else team[:1]
    ledger.step(Step(team, plain(100, 2), 0, 100, number=0))
    ledger.step(Step(last, plain(100, len(last)), 100, 200, number=1))
    ledger.step(Step(team[1:], plain(100, 1), 200, 300, number=2))
    ledger.emitted(team, 210, step=0)
    ledger.emitted(last, 320, step=1)
    ledger.step(Step(team[1:], plain(10, 1), 330, 340, number=3))
    ledger.emitted(team[1:], 350, step=2)
    ledger.fold(None)
    assert ledger_of(ledger, 1)["output"] == 120
    assert ledger_of(ledger, 2)["output"] == expected_ns


@pytest.mark.parametrize("between", ["nothing", "hung step", "restart"])
def test_an_emission_finds_the_step_that_it_names_among_others(
    two_running: tuple[Ledger, Ints], between: str
) -> None:
    ledger, team = two_running
    if between == "restart":  # the engine that ran before used the same numbers
        ledger.step(Step(np.array([3]), plain(5, 1), 5, 10, number=0))
        ledger.step(Step(np.array([3]), plain(5, 1), 10, 15, number=1))
    ledger.step(Step(team, plain(100, 2), 20, 120, number=0))
    held = [ledger.hold(np.array([3]), 130)] if between == "hung step" else []
    ledger.step(Step(team, plain(100, 2), 150, 250, number=1))
    ledger.fold(260)
    ledger.emitted(team, 300, step=0)
    ledger.emitted(team, 310, step=1)
    ledger.release(held)
    ledger.fold(None)
    assert ledger_of(ledger, 1)["output"] == (150 - 120) + (310 - 250)


def test_an_emission_of_an_untimed_step_uses_no_step_from_before_a_restart(
    two_running: tuple[Ledger, Ints],
) -> None:
    ledger, team = two_running
    ledger.step(Step(team, plain(5, 2), 5, 10, number=0))
    ledger.step(Step(team, plain(5, 2), 10, 15, number=7))
    ledger.step(Step(team, plain(10, 2), 30, 40, number=1))  # after a restart; 0 was not timed
    ledger.step(Step(team, plain(10, 2), 60, 70, number=2))
    ledger.emitted(team, 80, step=0)
    ledger.fold(None)
    assert ledger_of(ledger, 1) == {
        "cpu_gap": 5 + 15 + 20, "decode_own": 14, "decode_co_batched": 16, "output": 10
    }  # fmt: skip


@pytest.mark.parametrize("end_ns", [100, 98])
def test_a_request_that_has_finished_waits_for_no_step_that_was_planned_before(
    two_running: tuple[Ledger, Ints], end_ns: int
) -> None:
    # Asynchronous scheduling: the second step is planned before the first one's tokens are read.
    ledger, team = two_running
    ledger.step(Step(team, plain(90, 2), 0, 90))
    ledger.emitted(team, end_ns)
    ledger.note(1, ANSWERED, end_ns)
    ledger.step(Step(team, plain(50, 2), 100, 150))
    ledger.note(1, EDGE, 120)
    ledger.note(1, DELIVERED, 200, since_ns=120)
    ledger.note(1, END, 200)
    ledger.fold(200)
    assert ledger_of(ledger, 1) == {
        "decode_own": 45,
        "decode_co_batched": 45,
        "output": 30,
        "delivery": 80,
    }
    assert ledger_of(ledger, 2)["decode_own"] == 45 + 25


@pytest.mark.parametrize(("kind", "cause"), [(ANSWERED, "output"), (PREEMPTED, "preempted")])
def test_a_first_tokens_edge_resumes_no_step_that_is_over_for_the_request(
    two_running: tuple[Ledger, Ints], kind: int, cause: str
) -> None:
    ledger, team = two_running
    ledger.step(Step(team, plain(100, 2), 0, 100))
    ledger.note(1, kind, 20)
    ledger.note(1, EDGE, 50)
    ledger.note(1, ABORTED, 120)
    ledger.note(1, END, 120)
    ledger.fold(200)
    assert ledger_of(ledger, 1) == {"decode_own": 10, "decode_co_batched": 10, cause: 100}


def test_a_step_that_begins_at_the_edge_of_the_first_token_is_whole(
    two_running: tuple[Ledger, Ints],
) -> None:
    ledger, team = two_running
    ledger.step(Step(team, plain(100, 2), 0, 100))
    ledger.step(Step(team, plain(100, 2), 100, 200))
    ledger.emitted(team, 100)
    ledger.note(1, EDGE, 100)
    ledger.fold(200)
    assert ledger_of(ledger, 1) == {"decode_own": 100, "decode_co_batched": 100}


def test_a_step_that_begins_as_a_request_is_preempted_was_planned_before(
    two_running: tuple[Ledger, Ints],
) -> None:
    ledger, team = two_running
    ledger.note(1, PREEMPTED, 50)
    ledger.step(Step(team, plain(100, 2), 50, 150))
    ledger.note(1, ADMITTED, 200)
    ledger.fold(200)
    assert ledger_of(ledger, 1) == {"cpu_gap": 50, "preempted": 150}


@pytest.mark.parametrize(
    ("resumed_ns", "expected"),
    [
        (200, {"cpu_gap": 20, "preempted": 180}),
        (60, {"cpu_gap": 60, "preempted": 40, "not_scheduled": 100}),  # for a later step
    ],
)
def test_a_request_that_was_preempted_since_the_plan_of_a_step_does_not_wait_for_it(
    two_running: tuple[Ledger, Ints], resumed_ns: int, expected: dict[str, int]
) -> None:
    ledger, team = two_running
    ledger.note(1, PREEMPTED, 20)
    if resumed_ns < 100:
        ledger.note(1, ADMITTED, resumed_ns)
    ledger.step(Step(team, plain(100, 2), 100, 200, planned_ns=10))
    if resumed_ns >= 200:
        ledger.note(1, ADMITTED, resumed_ns)
    ledger.note(1, ABORTED, 200)
    ledger.fold(200)
    assert ledger_of(ledger, 1) == expected
    assert ledger_of(ledger, 2)["decode_own"] == 50


def test_a_step_that_was_planned_after_a_preemption_resumes_the_request(
    two_running: tuple[Ledger, Ints],
) -> None:
    ledger, team = two_running
    ledger.note(1, PREEMPTED, 20)
    ledger.step(Step(team, plain(100, 2), 100, 200, planned_ns=30))
    ledger.fold(200)
    booked = ledger_of(ledger, 1)
    assert (booked["preempted"], booked["decode_own"]) == (80, 50)


def test_a_wait_is_a_queue_only_while_the_device_works(two_running: tuple[Ledger, Ints]) -> None:
    ledger, team = two_running
    ledger.begin(3, 20, WAITING)
    ledger.step(Step(team, plain(100, 2), 50, 150))
    ledger.note(3, ADMITTED, 90)
    ledger.fold(150)
    assert ledger_of(ledger, 3) == {"queue": 40, "queue_idle": 30}


def test_so_far_the_same_rules_hold_with_now_as_the_last_boundary(
    two_running: tuple[Ledger, Ints],
) -> None:
    ledger, team = two_running
    ledger.begin(3, 20, WAITING)
    ledger.step(Step(team, plain(100, 2), 50, 150))
    ledger.fold(150)
    row = ledger.until(3, 170, unfolded=None)
    assert row[CAUSES.index("queue")] == 100
    assert row[CAUSES.index("queue_idle")] == 50
    row = ledger.until(3, 170, unfolded=(160, 170))  # a step runs again
    assert row[CAUSES.index("queue")] == 110
    assert int(ledger.until(1, 170, unfolded=(160, 170)).sum()) == 10


def test_a_step_announced_late_takes_back_the_idle_time_it_was_not(
    two_running: tuple[Ledger, Ints],
) -> None:
    ledger, team = two_running
    ledger.pass_idle(500)
    ledger.step(Step(team, plain(100, 2), 450, 550))
    device = ledger.device
    assert (device.busy_ns, device.idle_host_gap_ns, device.idle_no_work_ns) == (100, 450, 0)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.integers(0, 50), min_size=4, max_size=4), min_size=1), st.floats(0, 1))
def test_scaled_rows_sum_to_their_totals_and_no_cell_grows(
    cells: list[list[int]], share: float
) -> None:
    rows = np.array(cells)
    totals = (rows.sum(axis=1) * share).astype(np.int64)
    found = scaled(rows, totals)
    assert found.sum(axis=1).tolist() == totals.tolist()
    assert (found <= rows).all()
    assert (found >= 0).all()
