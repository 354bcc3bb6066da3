"""Tests of blame: every culprit was waited for, and all blame sums to the wait."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from inferscope.attribution import holds
from inferscope.attribution.blame import BLAMED, Blame
from inferscope.attribution.blame_shares import NUM_NAMED, BlameShare
from inferscope.attribution.counterfactual import Delay, delays
from inferscope.attribution.holds import HeldResources
from inferscope.attribution.ledger import (
    ABORTED,
    ADMITTED,
    EDGE,
    HELD,
    PREEMPTED,
    QUEUED,
    RUNNING,
    TRANSFERRED,
    WAITING,
    Ledger,
    Step,
)
from inferscope.attribution.marginal import blame_weights, marginal_ns
from inferscope.attribution.split import price
from inferscope.cost.model import StepModel
from inferscope.cost.step_table import StepTable
from inferscope.records import CAUSES

Ints = NDArray[np.int64]


def by_cause(row: Ints) -> dict[str, int]:
    return {cause: ns for cause, ns in zip(CAUSES, row.tolist(), strict=True) if ns}


def of_cause(culprits: tuple[BlameShare, ...], cause: str) -> dict[str | None, int]:
    return {name: ns for each, name, ns in culprits if each == cause}


def model_of(
    *, per_token_ns: float = 0.0, fixed_ns: float = 1000.0, context_ns: float = 0.0
) -> StepModel:
    """Return a model: a price for any step, for each token, and for each visible token."""
    tokens = np.arange(20_001.0)
    f_ns = np.where(tokens > 0, fixed_ns + per_token_ns * tokens, 0.0)
    return StepModel("made-up", "fit", f_ns, np.zeros(20_001), context_ns, 0.0, 0.0, 0.0, 0.0)


class Bench:
    """A ledger with requests by slot, named r1, r2, …; steps that the test gives."""

    def __init__(self, num_slots: int = 64, model: StepModel | None = None) -> None:
        self.ledger = Ledger(num_slots)
        self.ledger.pass_idle(0)
        self.model = model or model_of(per_token_ns=100.0)

    def begin(self, slot: int, at_ns: int, state: int = WAITING, *, dp_rank: int = 0) -> None:
        self.ledger.replicas.begin(slot, f"r{slot}")
        self.ledger.begin(slot, at_ns, state)
        self.ledger.place(slot, dp_rank)

    def step(
        self,
        slots: list[int],
        start_ns: int,
        end_ns: int,
        *,
        binding: str = "none",
        tokens: list[int] | None = None,
        contexts: list[int] | None = None,
        prefills: list[int] | None = None,
        dp_rank: int = 0,
        delay: Delay | None = None,
    ) -> None:
        num = len(slots)
        counts = np.array(tokens or [1] * num)
        before = np.array(contexts or [0] * num)
        ones = np.ones(num, dtype=np.int64)
        priced = price(self.model, StepTable.of(counts, before, ones, prefills or ()))
        took_ns = np.array([end_ns - start_ns])
        weights = blame_weights(priced)
        found = delays(priced, took_ns, took_ns / priced.modelled_ns)[0]
        grip = HeldResources(binding, 16, counts, before)
        self.ledger.step(
            Step(
                np.array(slots), delay or found, start_ns, end_ns,
                grip=grip, weights=weights, dp_rank=dp_rank,
            )
        )  # fmt: skip

    def admit(self, slot: int, at_ns: int) -> None:
        self.ledger.note(slot, ADMITTED, at_ns)

    def finish(self, slot: int, at_ns: int) -> None:
        self.ledger.note(slot, ABORTED, at_ns)

    def row(self, slot: int) -> dict[str, int]:
        self.ledger.fold(None)
        up_to_first, after = self.ledger.rows_of(slot, is_streamed=True)
        return by_cause(up_to_first + after)

    def of(self, slot: int, at_ns: int = 0) -> tuple[BlameShare, ...]:
        return self.ledger.replicas.blame_of(slot, self.row(slot), at_ns=at_ns)


# --- the queue ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("binding", "expected"),
    [
        ("slots", {"r1": 3000, "r2": 3000, "r3": 3000}),
        ("blocks", {"r1": 1000, "r2": 3000, "r3": 5000}),  # 1, 3 and 5 blocks of 16 tokens
        ("budget", {"r1": 900, "r2": 900, "r3": 7200}),
        # 5, 5 and 40 % of the step are saved without each; all three could have been spared half.
        ("none", {"r1": 1950, "r2": 1950, "r3": 5100}),
    ],
)
def test_scarce_resource_determines_the_blame(binding: str, expected: dict[str, int]) -> None:
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
        prefills=[2],
    )
    bench.admit(4, 10_000)
    assert of_cause(bench.of(4), "queue") == expected


def test_a_request_alone_in_the_queue_blames_only_the_slot_holders_of_its_wait() -> None:
    bench = Bench()
    bench.begin(1, 0, RUNNING)
    bench.begin(2, 0, RUNNING)
    bench.step([1, 2], 0, 1_000, binding="slots")  # no request waits yet
    bench.step([1, 2], 2_000, 6_000, binding="slots")
    bench.begin(3, 3_000)  # in the middle of the step
    bench.finish(2, 6_500)
    bench.step([1], 7_000, 9_000, binding="slots")
    bench.admit(3, 8_000)  # while it is still being executed
    assert bench.row(3) == {"queue": 4_000, "queue_idle": 1_000}
    assert bench.of(3) == (BlameShare("queue", "r1", 2_500), BlameShare("queue", "r2", 1_500))


def test_all_holders_of_slots_are_blamed_though_some_are_in_no_step() -> None:
    bench = Bench()
    for slot in (1, 2, 3):
        bench.begin(slot, 0, RUNNING)
    bench.begin(4, 0)
    bench.step([1, 2], 0, 3_000, binding="slots")
    bench.finish(1, 3_000)
    bench.admit(4, 3_000)
    assert of_cause(bench.of(4), "queue") == {"r1": 1_000, "r2": 1_000, "r3": 1_000}


def test_a_wait_that_is_reported_late_finds_its_culprits() -> None:
    bench = Bench()
    for slot in (1, 2):
        bench.begin(slot, 0, RUNNING)
    bench.step([1, 2], 0, 10_000, binding="slots")
    bench.step([1, 2], 10_000, 12_000, binding="slots")
    bench.ledger.fold(11_000)
    bench.begin(3, 12_000)  # it makes the fold wait through the steps before
    bench.begin(4, 4_000)
    bench.admit(4, 12_000)
    assert of_cause(bench.of(4), "queue") == {"r1": 4_000, "r2": 4_000}


def test_idle_time_of_the_device_has_no_blame() -> None:
    bench = Bench()
    bench.begin(1, 0)
    bench.admit(1, 50_000)
    assert bench.row(1) == {"queue_idle": 50_000}
    assert bench.of(1) == ()


def test_blame_of_a_waiting_request_can_be_read() -> None:
    bench = Bench()
    bench.begin(1, 0, RUNNING)
    bench.begin(2, 0)
    bench.step([1], 0, 4_000, binding="slots")
    bench.ledger.fold(4_000)
    row = by_cause(bench.ledger.until(2, 4_000, unfolded=None))
    assert row == {"queue": 4_000}
    for _ in range(2):  # asking changes nothing
        assert bench.ledger.replicas.blame_of(2, row, at_ns=4_000) == (
            BlameShare("queue", "r1", 4_000),
        )


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_the_queue_is_blamed_as_if_every_step_had_been_divided_for_everybody(seed: int) -> None:
    """The result equals a slow and plain account of the same, step by step and one by one."""
    draw = random.Random(seed)
    bench = Bench()
    due = {slot: draw.randrange(40_000) for slot in range(1, 13)}
    waiting: dict[int, int] = {}
    """Since when: since it came, or since the last transfer of its blocks was over."""
    left = {slot: draw.randint(1, 6) for slot in due}
    steps: list[tuple[int, int, dict[str, float]]] = []
    waits: dict[int, list[tuple[int, int]]] = {slot: [] for slot in due}
    pauses: list[tuple[int, int]] = []
    running: list[int] = []
    now = 0

    def expected(slot: int) -> Counter[str]:
        found: Counter[str] = Counter()
        for since, until in waits[slot]:
            for start, end, parts in steps:
                spans = [(start, end), *((max(a, start), min(b, end)) for a, b in pauses)]
                waited, *paused = (max(0, min(b, until) - max(a, since)) for a, b in spans)
                for name, part in parts.items():
                    found[name] += (waited - sum(paused)) * part  # type: ignore[assignment]
        return found

    def transfer(slot: int, until: int) -> None:
        since = draw.randint(waiting[slot], until)
        bench.ledger.note(slot, TRANSFERRED, until, since_ns=since)
        waits[slot].append((waiting[slot], since))
        waiting[slot] = until

    def pause(until: int) -> None:
        since = draw.randint(now, until)
        come(since)
        bench.ledger.pause(since)
        come(until)
        bench.ledger.unpause(until)
        pauses.append((since, until))

    def come(until: int) -> None:
        for slot in sorted(due, key=due.__getitem__):
            if due[slot] <= until:
                at_ns = due.pop(slot)
                bench.begin(slot, at_ns)
                waiting[slot] = at_ns

    while due or waiting or running:
        come(now)
        while waiting and len(running) < 4:
            slot = min(waiting, key=waiting.__getitem__)
            waits[slot].append((waiting.pop(slot), now))
            bench.admit(slot, now)
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
        names = [f"r{slot}" for slot in running]
        shares = [part / sum(parts) for part in parts]
        steps.append((start, end, dict(zip(names, shares, strict=True))))
        if not draw.randrange(4):
            pause(end)
        come(end)
        for slot in sorted(waiting):
            if not draw.randrange(6):
                transfer(slot, end)
        for slot in list(running):
            left[slot] -= 1
            if not left[slot]:
                running.remove(slot)
                bench.finish(slot, end)
                shares_ns = of_cause(bench.of(slot), "queue")
                others = shares_ns.pop(None, 0)
                assert sum(shares_ns.values()) + others == bench.row(slot).get("queue", 0)
                for name, ns in shares_ns.items():
                    assert ns == pytest.approx(expected(slot)[name], abs=1.01)
                least = min(shares_ns.values(), default=0)
                unnamed = [ns for name, ns in expected(slot).items() if name not in shares_ns]
                assert max(unnamed, default=0) <= least + 1
                assert others == pytest.approx(sum(unnamed), abs=NUM_NAMED + 1)
                bench.ledger.free(slot)
        now = end + draw.choice([0, 200])


# --- inside steps ---------------------------------------------------------------------------------


def test_decodes_blame_the_prompts_beside_them_by_what_each_adds() -> None:
    bench = Bench(model=model_of(per_token_ns=100_000.0, fixed_ns=1_000_000.0))
    for slot in (1, 2, 3, 4):
        bench.begin(slot, 0, RUNNING)
    bench.step([1, 2], 0, 1_200_000)
    bench.step([1, 2, 3, 4], 2_000_000, 13_200_000, tokens=[1, 1, 20, 80], prefills=[2, 3])
    shares_ns = of_cause(bench.of(1), "decode_interference")
    assert shares_ns == pytest.approx({"r3": 2_000_000, "r4": 8_000_000}, rel=1e-5)
    assert of_cause(bench.of(1), "decode_co_batched") == {"r2": 200_000}
    assert of_cause(bench.of(2), "decode_co_batched") == {"r1": 200_000}
    assert of_cause(bench.of(3), "prefill_co_batched") == {"r4": 8_000_000}
    assert of_cause(bench.of(3), "prefill_interference") == {"r1": 100_000, "r2": 100_000}


MS = 1_000_000


def but_for_ns(model: StepModel, tokens: list[int], contexts: list[int], culprit: int) -> float:
    """Return how much shorter a step would have been without one of its requests."""

    def took(members: list[int]) -> float:
        if not members:
            return 0.0
        step = StepTable.of(
            np.array([tokens[at] for at in members]),
            np.array([contexts[at] for at in members]),
            np.ones(len(members), dtype=np.int64),
        )
        return model.steps_ns(step).item()

    everybody = list(range(len(tokens)))
    return took(everybody) - took([at for at in everybody if at != culprit])


@pytest.mark.parametrize("num_decodes", [64, 200])
def test_a_long_chunk_beside_decodes_is_blamed_for_what_would_have_been_without_it(
    num_decodes: int,
) -> None:
    model = model_of(fixed_ns=9.0 * MS, per_token_ns=0.08 * MS, context_ns=20.0)
    bench = Bench(256, model)
    slots = list(range(1, num_decodes + 2))
    for slot in slots:
        bench.begin(slot, 0, RUNNING)
    bench.begin(250, 0)
    tokens, contexts = [1] * num_decodes + [10_000], [500] * num_decodes + [0]
    bench.step(slots, 0, 900 * MS, tokens=tokens, contexts=contexts, prefills=[num_decodes])
    bench.admit(250, 900 * MS)
    shares_ns = of_cause(bench.of(250), "queue")
    chunk = shares_ns[f"r{slots[-1]}"] / sum(shares_ns.values())
    saved_ns = but_for_ns(model, tokens, contexts, num_decodes)
    whole_ns = but_for_ns(model, [num_decodes + 10_000], [0], 0)  # the decodes' attention is little
    assert saved_ns / whole_ns > 0.95
    assert chunk == pytest.approx(saved_ns / whole_ns, abs=0.05)
    assert set(of_cause(bench.of(1), "decode_interference")) == {f"r{slots[-1]}"}


def test_a_decode_with_a_long_context_is_blamed_for_what_would_have_been_without_it() -> None:
    model = model_of(fixed_ns=9.0 * MS, per_token_ns=0.0, context_ns=400.0)
    bench = Bench(64, model)
    slots = list(range(1, 34))
    for slot in slots:
        bench.begin(slot, 0, RUNNING)
    tokens, contexts = [1] * 33, [50] * 32 + [100_000]
    bench.step(slots, 0, 49 * MS, tokens=tokens, contexts=contexts)
    shares_ns = of_cause(bench.of(1), "decode_co_batched")
    assert shares_ns["r33"] / sum(shares_ns.values()) > 0.95


def test_decodes_beside_a_chunk_answer_for_what_they_add_to_the_decodes_alone() -> None:
    # The chunk makes each token dear. Without it 256 tokens cost as much as one.
    tokens = np.arange(20_001)
    f_ns = np.where(tokens > 0, np.maximum(1.0 * MS, 0.004 * MS * tokens), 0.0)
    model = StepModel("made-up", "fit", f_ns, np.zeros(20_001), 10.0, 0.0, 0.0, 0.0, 0.0)
    bench = Bench(64, model)
    slots = list(range(1, 34))
    for slot in slots:
        bench.begin(slot, 0, RUNNING)
    counts, contexts = [1] * 32 + [1_000], [99] + [19_999] + [99] * 30 + [0]
    bench.step(slots, 0, 5 * MS, tokens=counts, contexts=contexts, prefills=[32])
    shares_ns = of_cause(bench.of(1), "decode_co_batched")
    saved_ns = but_for_ns(model, [1] * 32, contexts[:32], 1)
    waited_ns = 10.0 * (20_000 + 30 * 100)
    assert shares_ns["r2"] / sum(shares_ns.values()) == pytest.approx(
        saved_ns / waited_ns, abs=0.05
    )


def test_of_a_step_that_no_absence_would_have_shortened_all_are_blamed_alike() -> None:
    model = model_of(fixed_ns=9.0 * MS, per_token_ns=0.0, context_ns=10.0)
    bench = Bench(8, model)
    for slot in (1, 2):
        bench.begin(slot, 0, RUNNING)
    bench.begin(3, 0)
    bench.step([1, 2], 0, 9 * MS, contexts=[99, 999])  # 1 and 10 us of 9 ms
    bench.admit(3, 9 * MS)
    shares_ns = of_cause(bench.of(3), "queue")
    assert shares_ns["r1"] == pytest.approx(shares_ns["r2"], rel=0.01)


@pytest.mark.parametrize("kind", [ABORTED, PREEMPTED])
def test_only_the_part_of_a_step_that_a_request_waited_for_is_blamed(kind: int) -> None:
    bench = Bench(model=model_of(fixed_ns=1.0 * MS, per_token_ns=0.1 * MS))
    for slot in (1, 2, 3, 4):
        bench.begin(slot, 0, RUNNING)
    bench.step([1, 2, 3], 0, 10 * MS, tokens=[1, 1, 20], prefills=[2])
    bench.step([1, 2, 4], 10 * MS, 110 * MS, tokens=[1, 1, 1_000], prefills=[2])
    bench.ledger.note(1, kind, 11 * MS)
    shares_ns = of_cause(bench.of(1, 11 * MS), "decode_interference")
    # Of 20 of 32 parts of the first 10 ms, and of 1000 of 1012 parts of 1 ms.
    of_first, of_second = 10 * 20 / 32, 1000 / 1012
    assert shares_ns["r4"] / sum(shares_ns.values()) == pytest.approx(
        of_second / (of_first + of_second), abs=0.01
    )


def test_a_member_that_has_finished_before_its_step_waits_for_nothing_in_it() -> None:
    bench = Bench(model=model_of(fixed_ns=1.0 * MS, per_token_ns=0.1 * MS))
    for slot in (1, 2, 3, 4):
        bench.begin(slot, 0, RUNNING)
    bench.step([1, 2, 3], 0, 10 * MS, tokens=[1, 1, 20], prefills=[2])
    bench.finish(1, 10 * MS)
    bench.step([1, 2, 4], 10 * MS, 110 * MS, tokens=[1, 1, 1_000], prefills=[2])
    assert set(of_cause(bench.of(1, 11 * MS), "decode_interference")) == {"r3"}
    assert set(of_cause(bench.of(2, 11 * MS), "decode_interference")) == {"r3", "r4"}


@pytest.mark.parametrize("is_cut_late", [False, True])
@pytest.mark.parametrize(("edge_ns", "of_first"), [(30 * MS, 0.5), (51 * MS, 0.0)])
def test_while_its_first_token_was_on_its_way_a_request_waits_for_no_one(
    edge_ns: int, of_first: float, is_cut_late: bool
) -> None:
    bench = Bench(model=model_of(fixed_ns=1.0 * MS, per_token_ns=0.1 * MS))
    for slot in (1, 2, 3):
        bench.begin(slot, 0, RUNNING)
    bench.step([1, 2], 0, 10 * MS, tokens=[8, 1], prefills=[0])
    bench.step([1, 2], 10 * MS, 50 * MS, tokens=[1, 1_000], prefills=[1])
    if is_cut_late:
        bench.ledger.replicas.fold()
    bench.ledger.deliver_first(1, edge_ns)
    bench.ledger.note(1, EDGE, edge_ns)
    bench.step([1, 3], 52 * MS, 92 * MS, tokens=[1, 1_000], prefills=[1])
    shares_ns = of_cause(bench.of(1), "decode_interference")
    of_r2 = of_first / (1 + of_first)
    assert shares_ns.get("r2", 0) / sum(shares_ns.values()) == pytest.approx(of_r2, abs=1e-3)
    assert of_cause(bench.of(1), "prefill_interference")["r2"] > 0


@pytest.mark.parametrize("is_cut_ms", [None, 20])
def test_of_steps_that_overlap_only_the_rest_of_the_later_one_is_blamed(
    is_cut_ms: int | None,
) -> None:
    bench = Bench(model=model_of(fixed_ns=1.0 * MS, per_token_ns=0.1 * MS))
    for slot in (1, 2, 3, 4):
        bench.begin(slot, 0, RUNNING)
    bench.step([1, 4], 0, 50 * MS)
    bench.step([1, 2], 1 * MS, 60 * MS, tokens=[1, 1_000], prefills=[1])
    bench.step([4, 3], 2 * MS, 80 * MS, tokens=[1, 1_000], prefills=[1])
    if is_cut_ms is not None:  # before its part of the second step
        bench.ledger.note(1, PREEMPTED, is_cut_ms * MS)
        bench.admit(1, 61 * MS)
    bench.step([1, 4, 3], 80 * MS, 140 * MS, tokens=[1, 1, 1_000], prefills=[2])
    shares_ns = of_cause(bench.of(1), "decode_interference")
    assert shares_ns.get("r2", 0) / sum(shares_ns.values()) == (
        pytest.approx(10 / 70, abs=1e-3) if is_cut_ms is None else 0
    )
    assert set(of_cause(bench.of(4), "decode_interference")) == {"r3"}
    assert "r2" not in of_cause(bench.of(3), "prefill_interference")


def test_what_several_forgotten_culprits_are_blamed_for_is_taken_back_of_each() -> None:
    bench = Bench(model=model_of(fixed_ns=1.0 * MS, per_token_ns=0.1 * MS))
    for slot in (1, 2, 3, 4):
        bench.begin(slot, 0, RUNNING)
    bench.step([1, 2, 3, 4], 0, 100 * MS)
    bench.ledger.replicas.fold()
    blame = bench.ledger.replicas.by_rank[0].blame
    rows = [blame._holds.names.index(name) for name in ("r2", "r3")]
    blame._forget(rows)
    for row in rows:
        blame._holds.names[row] = None
    bench.finish(1, 50 * MS)
    shares_ns = of_cause(bench.of(1), "decode_co_batched")
    assert shares_ns["r4"] == pytest.approx(sum(shares_ns.values()) / 3, rel=1e-3)


def test_one_does_not_answer_for_what_came_before_or_after_one() -> None:
    bench = Bench(model=model_of(per_token_ns=100_000.0, fixed_ns=1_000_000.0))
    for slot in (1, 2, 3):
        bench.begin(slot, 0, RUNNING)
    bench.step([1, 2], 0, 1_200_000)
    bench.finish(2, 1_200_000)
    bench.step([1, 3], 1_200_000, 2_400_000)
    assert of_cause(bench.of(1), "decode_co_batched") == {"r2": 100_000, "r3": 100_000}
    assert of_cause(bench.of(3), "decode_co_batched") == {"r1": 100_000}


def test_a_request_on_another_rank_is_not_blamed() -> None:
    bench = Bench(model=model_of(per_token_ns=100_000.0, fixed_ns=1_000_000.0))
    for slot in (1, 2, 3, 4):
        bench.begin(slot, 0, RUNNING, dp_rank=slot // 3)
    for at in range(3):
        bench.step([1, 2], 6_000_000 * at, 6_000_000 * at + 1_200_000)
        bench.step([3, 4], 6_000_000 * at + 300_000, 6_000_000 * at + 1_500_000, dp_rank=1)
    assert of_cause(bench.of(1), "decode_co_batched") == {"r2": 300_000}
    assert of_cause(bench.of(4), "decode_co_batched") == {"r3": 300_000}


def test_a_preempted_request_blames_the_block_holders_of_that_time() -> None:
    bench = Bench()
    for slot in (1, 2, 3):
        bench.begin(slot, 0, RUNNING)
    bench.step([1, 2, 3], 0, 1_000, contexts=[15, 47, 100])
    bench.ledger.note(3, PREEMPTED, 1_000)
    bench.step([1, 2], 1_000, 2_000)
    assert bench.ledger.replicas.blame_of(3, {"preempted": 400}, at_ns=1_400) == (
        BlameShare("preempted", "r2", 300),
        BlameShare("preempted", "r1", 100),
    )
    bench.admit(3, 9_000)
    assert of_cause(bench.of(3), "preempted") == {"r1": 2_000, "r2": 6_000}


@pytest.mark.parametrize("last_step", [[1, 3], [1], [2, 3]])
def test_all_that_hold_blocks_are_blamed_though_some_are_in_no_step_now(
    last_step: list[int],
) -> None:
    bench = Bench()
    for slot in (1, 2, 3):
        bench.begin(slot, 0, RUNNING)
    bench.begin(4, 1_000)
    bench.step([1, 2, 3], 0, 1_000, contexts=[15, 47, 100])
    contexts = [{1: 12, 2: 40, 3: 101}[slot] for slot in last_step]  # as many blocks as before
    bench.step(last_step, 1_000, 12_000, contexts=contexts, binding="blocks")
    bench.ledger.note(3, PREEMPTED, 12_000)
    bench.admit(4, 12_000)
    assert of_cause(bench.of(4), "queue") == {"r1": 1_000, "r2": 3_000, "r3": 7_000}
    bench.admit(3, 16_000)
    assert of_cause(bench.of(3), "preempted") == {"r1": 1_000, "r2": 3_000}


def test_a_request_that_lost_its_blocks_holds_none_before_its_next_step() -> None:
    bench = Bench()
    for slot in (1, 2, 3):
        bench.begin(slot, 0, RUNNING)
    bench.step([1, 2, 3], 0, 1_000, contexts=[15, 15, 15])
    bench.ledger.note(1, PREEMPTED, 1_000)
    bench.admit(1, 2_000)
    bench.ledger.note(3, PREEMPTED, 2_000)
    bench.admit(3, 5_000)
    assert of_cause(bench.of(3), "preempted") == {"r2": 3_000}


def test_a_preempted_request_has_no_culprits_for_a_pause() -> None:
    bench = Bench()
    for slot in (1, 2, 3):
        bench.begin(slot, 0, RUNNING)
    bench.step([1, 2], 0, 1_000)
    bench.ledger.note(1, PREEMPTED, 1_000)
    bench.ledger.pause(1_500)
    bench.finish(2, 2_000)
    bench.ledger.unpause(9_000)
    bench.admit(1, 9_000)
    bench.step([1, 3], 9_000, 10_000)
    bench.ledger.note(1, PREEMPTED, 10_000)
    bench.admit(1, 11_500)
    assert bench.row(1)["preempted"] == 2_000
    assert of_cause(bench.of(1), "preempted") == {"r2": 500, "r3": 1_500}


# --- any order ------------------------------------------------------------------------------------


@pytest.mark.thorough
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
                    slots, start, start + took, delay=delay, prefills=prefills,
                    binding=draw.choice(["slots", "blocks", "budget", "none", "new"]),
                )  # fmt: skip
            case "move" if slot in alive:
                match draw.choice(
                    ["queued", "moved", "admitted", "admitted", "preempted", "finished"]
                ):
                    case "moved":
                        since_ns = max(1, at_ns - draw.randint(0, 50))
                        ledger.note(slot, TRANSFERRED, at_ns, since_ns=since_ns)
                    case "queued":
                        ledger.note(slot, QUEUED, at_ns)
                    case "admitted":
                        bench.admit(slot, at_ns)
                    case "preempted":
                        ledger.note(slot, PREEMPTED, at_ns)
                    case _:
                        bench.finish(slot, at_ns)
            case "free" if slot in alive:
                ledger.fold(None)
                ledger.free(slot)
                alive.remove(slot)
        for slot in draw.sample(sorted(alive), min(1, len(alive))):
            row_ns = bench.row(slot)
            rows = bench.of(slot, now)
            sums = Counter[str]()
            for cause, name, ns in rows:
                assert ns > 0
                assert name != f"r{slot}"
                sums[cause] += ns
            assert dict(sums) == {cause: ns for cause, ns in row_ns.items() if cause in BLAMED}
            assert len(set(rows)) == len({(cause, name) for cause, name, _ in rows}) == len(rows)


# --- memory ---------------------------------------------------------------------------------------


def num_cells(blame: Blame) -> int:
    """Count the numbers that are kept of times gone by."""
    return sum(sums.size for _, sums in blame._holds._marks._kept)


@pytest.mark.thorough
def test_a_hundred_thousand_may_wait() -> None:
    num = 100_000
    bench = Bench(num + 10)
    bench.begin(1, 0, RUNNING)
    bench.begin(2, 0, RUNNING)
    for at in range(100):
        start = 10_000 * at
        bench.step([1, 2], start, start + 10_000, binding=["slots", "blocks"][at % 2])
        for slot in range(3 + at * num // 100, 3 + (at + 1) * num // 100):
            bench.begin(slot, start + (slot % 100) * 100)
    blame = bench.ledger.replicas.by_rank[0].blame
    assert blame.num_waiting == num
    assert num_cells(blame) <= holds.MOST_CELLS
    assert blame._holds.num_rows == holds.FIRST_ROWS
    for slot in (3, num // 2, num):
        bench.admit(slot, 1_000_000)
        shares_ns = of_cause(bench.of(slot), "queue")
        ns = bench.row(slot)["queue"]
        assert sum(shares_ns.values()) == ns
        assert shares_ns["r1"] == pytest.approx(shares_ns["r2"], abs=1)
        assert shares_ns.get(None, 0) <= ns / 50  # old marks are thinned out


@pytest.mark.thorough
def test_the_largest_holder_is_kept_for_any_number_of_later_requests() -> None:
    bench = Bench()
    bench.begin(1, 0, RUNNING)
    bench.begin(63, 0)
    bench.begin(60, 0, RUNNING)
    bench.step([1, 60], 0, 10_000_000, binding="slots")
    now = 10_000_000
    for at in range(2_000):
        slot = 1 + at % 50
        bench.finish(slot, now)
        bench.ledger.fold(None)
        bench.ledger.free(slot)
        bench.begin(slot + 1, now, RUNNING)
        bench.ledger.replicas.by_rank[0].blame._names[slot + 1] = f"small-{at}"
        bench.step([slot + 1, 60], now, now + 1_000, binding="slots")
        now += 1_000
    blame = bench.ledger.replicas.by_rank[0].blame
    assert blame._holds.num_rows == holds.FIRST_ROWS
    bench.admit(63, now)
    shares_ns = of_cause(bench.of(63), "queue")
    assert shares_ns["r1"] == 5_000_000
    assert sum(shares_ns.values()) == bench.row(63)["queue"] == now


def test_a_thousand_running_take_bounded_memory() -> None:
    bench = Bench(1_100)
    for slot in range(1, 1_025):
        bench.begin(slot, 0, RUNNING)
    for at in range(3):
        bench.step(list(range(1, 1_025)), at * 200_000, at * 200_000 + 100_000)
        bench.ledger.fold(None)
    cells = sum(
        pairs.size for pairs in bench.ledger.replicas.by_rank[0].blame._pairs if pairs is not None
    )
    assert cells <= 4 * 2_048 * 2_048
    assert of_cause(bench.of(1), "decode_co_batched")


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.lists(
            st.tuples(st.sampled_from([1, 1, 1, 40]), st.integers(0, 900)), min_size=1, max_size=6
        ),
        min_size=1,
        max_size=4,
    ),
    st.sampled_from([0.0, 3.0]),
)
def test_what_each_adds_is_what_the_model_predicts_the_others_take_less(
    batches: list[list[tuple[int, int]]], padded_ns: float
) -> None:
    model = replace(model_of(per_token_ns=100.0, context_ns=2.0), padded_ns=padded_ns)
    tokens, contexts = (
        np.array(column) for column in zip(*[row for rows in batches for row in rows], strict=True)
    )
    none, sizes = np.zeros(len(tokens), dtype=np.bool_), np.array([len(rows) for rows in batches])
    table = StepTable(tokens, contexts, np.ones(len(tokens), dtype=np.int64), none, sizes)
    found = marginal_ns(price(model, table)).tolist()
    expected = [
        but_for_ns(model, [n for n, _ in rows], [c for _, c in rows], at)
        for rows in batches
        for at in range(len(rows))
    ]
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-6)
