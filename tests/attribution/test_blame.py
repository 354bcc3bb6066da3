"""Whoever is blamed has to do with it, and all that is blamed sums to what was waited."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from inferscope.attribution import roster
from inferscope.attribution.blame import BLAMED, Blame
from inferscope.attribution.counterfactual import Delay
from inferscope.attribution.culprits import NUM_NAMED, Culprit
from inferscope.attribution.ledger import HELD, RUNNING, WAITING, Ledger
from inferscope.attribution.stays import Grip
from inferscope.records import CAUSES

Ints = NDArray[np.int64]


def by_cause(row: Ints) -> dict[str, int]:
    return {cause: ns for cause, ns in zip(CAUSES, row.tolist(), strict=True) if ns}


def of_cause(culprits: tuple[Culprit, ...], cause: str) -> dict[str | None, int]:
    return {name: ns for told, name, ns in culprits if told == cause}


def additive(own_ns: list[int], prefills: list[int], took_ns: int) -> Delay:
    """Explain a step whose members each add to it what they take alone, but for 1000 ns at once."""
    own = np.array(own_ns)

    def together(members: list[int]) -> int:
        return min(took_ns, 1000 + sum(own_ns[at] - 1000 for at in members))

    decodes = [at for at in range(len(own_ns)) if at not in prefills]
    everybody = together([*range(len(own_ns))])
    of_prefills = together(prefills) if prefills else everybody
    of_decodes = together(decodes) if decodes else everybody
    return Delay(own, None, prefills, of_prefills, of_decodes, everybody, took_ns - everybody)


class Bench:
    """A ledger with requests by slot, named r1, r2, …; steps of what the test says."""

    def __init__(self, num_slots: int = 64) -> None:
        self.ledger = Ledger(num_slots)
        self.ledger.pass_idle(0)

    def begin(self, slot: int, at_ns: int, state: int = WAITING) -> None:
        self.ledger.blame.begin(slot, f"r{slot}")
        self.ledger.begin(slot, at_ns, state)

    def step(
        self,
        slots: list[int],
        start_ns: int,
        end_ns: int,
        *,
        binding: str = "none",
        tokens: list[int] | None = None,
        contexts: list[int] | None = None,
        delay: Delay | None = None,
        dp_rank: int = 0,
    ) -> None:
        num = len(slots)
        counts = np.array(tokens or [1] * num)
        before = np.array(contexts or [0] * num)
        took_ns = end_ns - start_ns
        self.ledger.open_step(
            np.array(slots),
            delay or additive([1000] * num, [], took_ns),
            start_ns=start_ns,
            end_ns=end_ns,
            is_cold=False,
            grip=Grip(binding, 16, counts, before, dp_rank),
        )

    def of(self, slot: int, at_ns: int = 0) -> tuple[Culprit, ...]:
        ledger = self.ledger
        return ledger.blame.of(slot, by_cause(ledger.row(slot)), at_ns=at_ns)


# --- the queue ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("binding", "expected"),
    [
        ("slots", {"r1": 3000, "r2": 3000, "r3": 3000}),
        ("blocks", {"r1": 1000, "r2": 3000, "r3": 5000}),  # 1, 3 and 5 blocks of 16 tokens
        ("budget", {"r1": 900, "r2": 900, "r3": 7200}),
        ("none", {"r1": 1000, "r2": 2000, "r3": 6000}),
    ],
)
def test_what_was_scarce_says_who_is_to_blame(binding: str, expected: dict[str, int]) -> None:
    bench = Bench()
    for slot in (1, 2, 3):
        bench.begin(slot, 0, RUNNING)
    bench.begin(4, 500)
    bench.step(
        [1, 2, 3],
        1_000,
        10_000,
        binding=binding,
        tokens=[1, 1, 8],
        contexts=[15, 32, 72],
        delay=additive([1000, 2000, 6000], [2], 9_000),
    )
    bench.ledger.admitted(4, 10_000)
    assert of_cause(bench.of(4), "queue") == expected


def test_alone_in_the_queue_one_blames_just_those_who_held_the_slots_and_only_meanwhile() -> None:
    bench = Bench()
    bench.begin(1, 0, RUNNING)
    bench.begin(2, 0, RUNNING)
    bench.step([1, 2], 0, 1_000, binding="slots")  # nobody waits yet
    bench.step([1, 2], 2_000, 6_000, binding="slots")
    bench.ledger.close_steps(3_000)
    bench.begin(3, 3_000)  # in the middle of the step
    bench.ledger.close_steps(6_000)
    bench.ledger.finished(2, 6_500, emitted_ns=0)
    bench.ledger.free(2)
    bench.step([1], 7_000, 9_000, binding="slots")
    bench.ledger.close_steps(8_000)
    bench.ledger.admitted(3, 8_000)  # while it is still being executed
    assert by_cause(bench.ledger.row(3)) == {"queue": 4_000, "queue_idle": 1_000}
    assert bench.of(3) == (Culprit("queue", "r1", 2_500), Culprit("queue", "r2", 1_500))


def test_nobody_is_blamed_while_the_device_idles() -> None:
    bench = Bench()
    bench.begin(1, 0)
    bench.ledger.admitted(1, 50_000)
    assert by_cause(bench.ledger.row(1)) == {"queue_idle": 50_000}
    assert bench.of(1) == ()


def test_who_still_waits_can_be_told_whom_for() -> None:
    bench = Bench()
    bench.begin(1, 0, RUNNING)
    bench.begin(2, 0)
    bench.step([1], 0, 4_000, binding="slots")
    bench.ledger.close_steps(4_000)
    waited_ns = bench.ledger.waited_ns(2)
    assert waited_ns == 4_000
    for _ in range(2):  # asking changes nothing
        told = bench.ledger.blame.of(2, {"queue": waited_ns}, at_ns=0, waited_ns=waited_ns)
        assert told == (Culprit("queue", "r1", 4_000),)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_the_queue_is_blamed_as_if_every_step_had_been_divided_for_everybody(seed: int) -> None:
    """A slow and plain account of the same, step by step and one by one."""
    draw = random.Random(seed)
    bench = Bench()
    due = {slot: draw.randrange(40_000) for slot in range(1, 13)}
    waiting: dict[int, int] = {}
    left = {slot: draw.randint(1, 6) for slot in due}
    expected: dict[int, Counter[str]] = {slot: Counter() for slot in due}
    running: list[int] = []
    now = 0

    def come(until: int) -> None:
        for slot in sorted(due, key=due.__getitem__):
            if due[slot] <= until:
                at_ns = due.pop(slot)
                bench.ledger.close_steps(at_ns)
                bench.begin(slot, at_ns)
                waiting[slot] = at_ns

    while due or waiting or running:
        come(now)
        while waiting and len(running) < 4:
            slot = min(waiting, key=waiting.__getitem__)
            del waiting[slot]
            bench.ledger.admitted(slot, now)
            running.append(slot)
        if not running:
            now = min(due.values())
            continue
        start, end = now, now + draw.randint(1, 3_000)
        binding = draw.choice(["slots", "blocks", "budget"])
        tokens = [draw.randint(1, 40) for _ in running]
        contexts = [draw.randint(0, 200) for _ in running]
        bench.step(running, start, end, binding=binding, tokens=tokens, contexts=contexts)
        parts = {
            "slots": [1.0] * len(running),
            "blocks": [-(-(n + m) // 16) for n, m in zip(tokens, contexts, strict=True)],
            "budget": tokens,
        }[binding]
        come(end)
        bench.ledger.close_steps(end)
        for slot, queued_ns in waiting.items():
            for holder, part in zip(running, parts, strict=True):
                waited = end - max(start, queued_ns)
                expected[slot][f"r{holder}"] += waited * part / sum(parts)  # type: ignore[assignment]
        for slot in list(running):
            left[slot] -= 1
            if not left[slot]:
                running.remove(slot)
                bench.ledger.finished(slot, end, emitted_ns=0)
                told = of_cause(bench.of(slot), "queue")
                others = told.pop(None, 0)
                assert sum(told.values()) + others == bench.ledger.row(slot)[CAUSES.index("queue")]
                for name, ns in told.items():
                    assert ns == pytest.approx(expected[slot][name], abs=1.01)
                least = min(told.values(), default=0)
                unnamed = [ns for name, ns in expected[slot].items() if name not in told]
                assert max(unnamed, default=0) <= least + 1
                assert others == pytest.approx(sum(unnamed), abs=NUM_NAMED + 1)
                bench.ledger.free(slot)
        now = end + draw.choice([0, 200])


# --- inside steps ---------------------------------------------------------------------------------


def test_decodes_blame_the_prompts_beside_them_by_what_those_take() -> None:
    bench = Bench()
    for slot in (1, 2, 3, 4):
        bench.begin(slot, 0, RUNNING)
    bench.step([1, 2], 0, 1_500, delay=additive([1200, 1300], [], 1_500))
    bench.step(
        [1, 2, 3, 4], 2_000, 20_000, delay=additive([1200, 1300, 4000, 10_000], [2, 3], 18_000)
    )
    bench.ledger.close_steps(20_000)
    told = of_cause(bench.of(1), "decode_interference")
    assert told == {"r3": 3_429, "r4": 8_571}  # of 12,000, by 4,000 and 10,000
    assert of_cause(bench.of(1), "decode_co_batched") == {"r2": 600}
    assert of_cause(bench.of(2), "decode_co_batched") == {"r1": 400}
    assert of_cause(bench.of(3), "prefill_co_batched") == {"r4": 9_000}
    assert of_cause(bench.of(3), "prefill_interference") == {"r1": 250, "r2": 250}


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1000, 9000), min_size=2, max_size=NUM_NAMED + 1), st.integers(1, 9))
def test_companions_answer_alike_for_just_what_one_waited(own: list[int], num: int) -> None:
    bench = Bench()
    slots = list(range(1, len(own) + 1))
    for slot in slots:
        bench.begin(slot, 0, RUNNING)
    for at in range(num):
        delay = additive(own, [], 100_000)
        bench.step(slots, at * 100_000, (at + 1) * 100_000, delay=delay)
    bench.ledger.close_steps(num * 100_000)
    for slot in slots:
        told = of_cause(bench.of(slot), "decode_co_batched")
        assert set(told) <= {f"r{other}" for other in slots if other != slot}
        waited_ns = bench.ledger.row(slot)[CAUSES.index("decode_co_batched")]
        assert sum(told.values()) == waited_ns
        for ns in told.values():
            assert ns == pytest.approx(waited_ns / (len(slots) - 1), abs=1)


def test_one_does_not_answer_for_what_came_before_or_after_one() -> None:
    bench = Bench()
    for slot in (1, 2, 3):
        bench.begin(slot, 0, RUNNING)
    delay = additive([2000, 2000], [], 3_000)
    bench.step([1, 2], 0, 3_000, delay=delay)
    bench.ledger.close_steps(3_000)
    bench.ledger.finished(2, 3_000, emitted_ns=0)
    bench.ledger.free(2)
    bench.step([1, 3], 3_000, 6_000, delay=additive([2000, 2000], [], 3_000))
    bench.ledger.close_steps(6_000)
    assert of_cause(bench.of(1), "decode_co_batched") == {"r2": 1_000, "r3": 1_000}
    assert of_cause(bench.of(3), "decode_co_batched") == {"r1": 1_000}


def test_who_runs_on_another_rank_is_no_companion() -> None:
    bench = Bench()
    for slot in (1, 2, 3, 4):
        bench.begin(slot, 0, RUNNING)
    delay = additive([2000, 2000], [], 3_000)
    for at in range(3):
        bench.step([1, 2], 6_000 * at, 6_000 * at + 3_000, delay=delay)
        bench.step([3, 4], 6_000 * at + 3_000, 6_000 * at + 6_000, delay=delay, dp_rank=1)
    bench.ledger.close_steps(18_000)
    assert of_cause(bench.of(1), "decode_co_batched") == {"r2": 3_000}
    assert of_cause(bench.of(4), "decode_co_batched") == {"r3": 3_000}


def test_who_lost_its_blocks_blames_those_who_had_some_then() -> None:
    bench = Bench()
    for slot in (1, 2, 3):
        bench.begin(slot, 0, RUNNING)
    bench.step([1, 2, 3], 0, 1_000, contexts=[15, 47, 100])
    bench.ledger.close_steps(1_000)
    bench.ledger.preempted(3, 1_000)
    bench.step([1, 2], 1_000, 2_000)
    bench.ledger.close_steps(2_000)
    assert bench.ledger.blame.of(3, {"preempted": 400}, at_ns=1_400) == (
        Culprit("preempted", "r2", 300),
        Culprit("preempted", "r1", 100),
    )
    bench.ledger.admitted(3, 9_000)
    assert of_cause(bench.of(3), "preempted") == {"r1": 2_000, "r2": 6_000}


# --- any order ------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_blame_sums_to_the_ledger_in_any_order_of_events(seed: int) -> None:
    draw = random.Random(seed)
    bench = Bench(3)
    ledger = bench.ledger
    alive: set[int] = set()
    now = 1_000
    for _ in range(120):
        now += draw.choice([0, 3, 40])
        ledger.close_steps(now)
        slot = draw.randint(1, 8)
        at_ns = now - draw.choice([0, 0, 7])
        match draw.choice(["begin", "begin", "step", "step", "step", "move", "move", "free"]):
            case "begin" if slot not in alive:
                if slot >= len(ledger.state):
                    ledger.grow(2 * len(ledger.state))
                if slot < len(ledger.state):
                    bench.begin(slot, at_ns, draw.choice([WAITING, WAITING, RUNNING, HELD]))
                    alive.add(slot)
            case "step" if alive:
                slots = draw.sample(sorted(alive), draw.randint(1, len(alive)))
                took = draw.randint(1, 60)
                prefills = [at for at in range(len(slots)) if draw.random() < 0.3]
                own = [draw.randint(0, took) for _ in slots]
                cls = [draw.randint(0, took) for _ in range(2)]
                delay = Delay(
                    np.array([min(x, *cls) for x in own]), None, prefills,
                    cls[0] if prefills else took, cls[1] if prefills else took, took, 0,
                )  # fmt: skip
                start = now - draw.choice([0, 0, 5])
                bench.step(
                    slots, start, start + took, delay=delay,
                    binding=draw.choice(["slots", "blocks", "budget", "none", "new"]),
                )  # fmt: skip
            case "move" if slot in alive:
                match draw.choice(["queued", "admitted", "admitted", "preempted", "finished"]):
                    case "finished":
                        ledger.finished(slot, at_ns, emitted_ns=0)
                    case move:
                        getattr(ledger, move)(slot, at_ns)
            case "free" if slot in alive:
                ledger.free(slot)
                alive.remove(slot)
        for slot in draw.sample(sorted(alive), min(1, len(alive))):
            row_ns = by_cause(ledger.row(slot))
            told = bench.of(slot, now)
            sums = Counter[str]()
            for cause, name, ns in told:
                assert ns > 0
                assert name != f"r{slot}"
                sums[cause] += ns
            assert dict(sums) == {cause: ns for cause, ns in row_ns.items() if cause in BLAMED}
            assert len(set(told)) == len({(cause, name) for cause, name, _ in told}) == len(told)


# --- memory ---------------------------------------------------------------------------------------


def num_cells(blame: Blame) -> int:
    """Count the numbers that are kept of times gone by."""
    return sum(sums.size for _, sums in blame._marks._kept)


def test_a_hundred_thousand_may_wait() -> None:
    num = 100_000
    bench = Bench(num + 10)
    bench.begin(1, 0, RUNNING)
    bench.begin(2, 0, RUNNING)
    for at in range(100):
        start = 10_000 * at
        bench.step([1, 2], start, start + 10_000, binding=["slots", "blocks"][at % 2])
        for slot in range(3 + at * num // 100, 3 + (at + 1) * num // 100):
            bench.begin(slot, start)
    bench.ledger.close_steps(1_000_000)
    blame = bench.ledger.blame
    assert blame.num_waiting == num
    assert num_cells(blame) <= roster.MOST_CELLS
    assert len(blame._roster) == roster.FIRST_ROWS
    for slot in (3, num // 2, num):
        bench.ledger.admitted(slot, 1_000_000)
        told = of_cause(bench.of(slot), "queue")
        ns = bench.ledger.row(slot)[CAUSES.index("queue")]
        assert sum(told.values()) == ns
        assert told["r1"] == pytest.approx(told["r2"], abs=1)
        assert told.get(None, 0) <= ns / 50  # old marks are thinned out


def test_who_held_most_is_remembered_however_many_come_after() -> None:
    bench = Bench()
    bench.begin(1, 0, RUNNING)
    bench.begin(63, 0)
    bench.step([1], 0, 10_000_000, binding="slots")
    now = 10_000_000
    for at in range(2_000):
        slot = 1 + at % 50
        bench.ledger.close_steps(now)
        bench.ledger.free(slot)
        bench.begin(slot + 1, now, RUNNING)
        bench.ledger.blame.begin(slot + 1, f"small-{at}")
        bench.step([slot + 1], now, now + 1_000, binding="slots")
        now += 1_000
    bench.ledger.close_steps(now)
    blame = bench.ledger.blame
    assert len(blame._roster) == roster.FIRST_ROWS
    bench.ledger.admitted(63, now)
    told = of_cause(bench.of(63), "queue")
    assert told["r1"] == 10_000_000
    assert sum(told.values()) == bench.ledger.row(63)[CAUSES.index("queue")] == now
