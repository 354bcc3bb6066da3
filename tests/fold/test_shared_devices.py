"""Division of a device's counters over the steps of all ranks that run on it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferscope.fold.join.counter_shares import ENERGY, SM_ACTIVE
from inferscope.fold.join.sample_allocation import AllocatedSamples, allocate_short
from inferscope.fold.join.step_buffer import NOTHING_MOVED, StepBuffer
from inferscope.fold.join.windows import Window
from inferscope.records import CounterSample
from tests.fold.scripts import MS, START_NS, assert_all_closes
from tests.fold.trains import DECODE, PREFILL, Train, counters_of, shares

Spans = list[tuple[int, int]]
"""Gap before a step, and its length."""
FIRST_MS = 200
"""Time of the sampler's first record, from which steps are joined."""

spans = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 40)), min_size=1, max_size=12)


def run_on_one_device(ranks: list[Spans]) -> Train:
    """Run each rank's steps, a prefill and decodes of one request."""
    train = Train()
    for replica, rank_steps in enumerate(ranks):
        if replica:
            train.beside(replica)
        at = FIRST_MS
        request = train.ask(f"of {replica}", at)
        for step, (gap, length) in enumerate(rank_steps):
            rows = [(request, 1, 63 + step)] if step else [(request, 64, 0)]
            begin, at = at + gap, at + gap + length
            train.run(step, rows, begin, at, DECODE if step else PREFILL)
        train.core.finished(request)
    return train


def touched_ns(train: Train, begin_ns: int, end_ns: int) -> int:
    """Return the time in which any step ran within a window."""
    edges = sorted(
        (max(begin_ns, START_NS + round(start * MS)), min(end_ns, START_NS + round(stop * MS)))
        for start, stop, _ in train.steps
    )
    busy_ns, until_ns = 0, begin_ns
    for start_ns, stop_ns in edges:
        busy_ns += max(0, stop_ns - max(start_ns, until_ns))
        until_ns = max(until_ns, stop_ns)
    return busy_ns


@pytest.mark.thorough
@settings(max_examples=40)
@given(ranks=st.lists(spans, min_size=1, max_size=3), seed=st.integers(0, 1 << 30))
def test_counted_amounts_are_assigned_exactly_once(ranks: list[Spans], seed: int) -> None:
    train, rng = run_on_one_device(ranks), np.random.default_rng(seed)
    until_ms = max(stop for _, stop, _ in train.steps)
    for at in np.arange(0, until_ms + 1, 0.5).tolist():
        share = float(rng.uniform(0.1, 1))
        train.count(at, at + 0.5, {"sm_active_share": share}, source="pm")
    collector, finals = train.play()
    counted_ns = sum(
        sample.values["sm_active_share"] * (sample.end_ns - sample.start_ns)
        for sample in train.samples
        if touched_ns(train, sample.start_ns, sample.end_ns)
    )
    totals = counters_of(collector).totals[:, SM_ACTIVE]
    assert totals.sum() == pytest.approx(counted_ns, rel=1e-9)
    counters = [final.counters for final in finals.requests]
    assert len(counters) == len(ranks)
    of_requests = sum(
        each.prefill["sm_active_ns"] + each.decode["sm_active_ns"] for each in counters
    )
    assert of_requests == pytest.approx(counted_ns, rel=1e-6, abs=10)
    assert_all_closes(collector, finals)


def test_ranks_in_turn_are_each_given_their_own() -> None:
    train = Train()
    request = train.ask("prompts", FIRST_MS)
    for step in range(30):
        begin = FIRST_MS + 30 * step
        train.run(step, [(request, 64, 64 * step)], begin, begin + 10, PREFILL)
    train.core.finished(request)
    train.beside(1)
    request = train.ask("answers", FIRST_MS)
    for step in range(30):
        begin = FIRST_MS + 15 + 30 * step
        train.run(step, [(request, 1, 64 + step)], begin, begin + 10, DECODE)
    train.core.finished(request)
    train.sample(0.5, "sm_active_share", (0.9, 0.3), source="pm")
    collector, finals = train.play()
    assert shares(collector) == (pytest.approx(0.9), pytest.approx(0.3))
    counters = {final.request_id: final.counters for final in finals.requests}
    assert counters["prompts"].prefill["sm_active_ns"] == pytest.approx(0.9 * 300 * MS)
    assert counters["answers"].decode["sm_active_ns"] == pytest.approx(0.3 * 300 * MS)


def test_while_two_ranks_run_at_once_the_device_is_idle_no_less() -> None:
    half = [(50, 50)] * 40
    train = run_on_one_device([half, half])  # busy for half of the time, both at once
    until_ms = max(stop for _, stop, _ in train.steps)
    for at in range(0, int(until_ms), 100):
        values = {"energy_uj": 100e3, "foreign_busy_share": 0.0}
        train.count(at, at + 100, values, source="nvml")
    for sample in train.samples:
        sample.values["foreign_busy_share"] = 0.2
    collector, finals = train.play()
    spent = [device.seconds_by_ns for device in collector.devices()]
    assert len(spent) == 2
    for each in spent:
        assert each["foreign"] == pytest.approx(0.2 * 4000 * MS, rel=0.1)
    assert not counters_of(collector).totals[:, ENERGY].any()
    assert_all_closes(collector, finals)


@given(ranks=st.lists(spans, min_size=1, max_size=4), period=st.integers(1, 90))
def test_busy_time_is_that_of_any_step(ranks: list[Spans], period: int) -> None:
    steps, is_busy = [StepBuffer() for _ in ranks], np.zeros(2000, dtype=bool)
    for each, rank_steps in zip(steps, ranks, strict=True):
        each.begin(0)
        at = 0
        for gap, length in rank_steps:
            begin, at = at + gap, at + gap + length
            is_busy[begin:at] = True
            each.add((begin, at, 0, length, *NOTHING_MOVED))
        each.read_in()
    edges = np.arange(0, 2001 - period, period, dtype=np.int64)
    busy_ns = [int(is_busy[at : at + period].sum()) for at in edges.tolist()]
    short = Window("pm", edges, edges + period, {})
    assert allocate_short(steps, short)[1].tolist() == busy_ns
    long = [CounterSample(0, "", at, at + period, "gpm", {}) for at in edges.tolist()]
    assert AllocatedSamples(steps, long).busy_ns == busy_ns


def test_a_device_without_steps_is_idle_in_every_window() -> None:
    edges = np.arange(0, 500, 100, dtype=np.int64)
    sums, busy_ns, parts = allocate_short([], Window("pm", edges, edges + 100, {}))
    assert not sums.any()
    assert not busy_ns.any()
    assert not parts
    samples = [CounterSample(0, "", at, at + 100, "gpm", {}) for at in edges.tolist()]
    long = AllocatedSamples([], samples)
    assert not any(any(of_sample) for of_sample in long.sums)
    assert not any(long.busy_ns)
