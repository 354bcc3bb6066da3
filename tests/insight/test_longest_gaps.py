"""Causes of each request's longest gap, against its ledger and by their sums."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from inferscope.fold import FinalRequest, FinalStep
from inferscope.insight.compare.longest_gaps import GAP_CAUSES, LongestGaps
from inferscope.readers import catch_up, open_source
from tests.insight.test_compare import request
from tests.insight.test_slow_steps import step
from tests.slo.requests import MS

SAMPLE = Path(__file__).parents[2] / "samples" / "demo.isr"
DECODE, INTERFERENCE, SLOWDOWN, OUTSIDE = range(len(GAP_CAUSES))
AT_MOST_OFF_NS = 100_000
"""A step that ends with the token before the gap counts to either."""


class Sink:
    """Sink that keeps requests with their longest gaps."""

    def __init__(self) -> None:
        self.gaps = LongestGaps()
        self.requests: list[FinalRequest] = []

    def on_step(self, step: FinalStep) -> None:
        self.gaps.on_step(step)

    def on_request(self, request: FinalRequest) -> None:
        self.gaps.add(len(self.requests), request)
        self.gaps.forget(request)
        self.requests.append(request)


def row(
    steps: Sequence[FinalStep],
    times_ms: Sequence[float],
    *,
    preempted_ns: tuple[tuple[int, int], ...] = (),
) -> list[float]:
    """Return the causes of the longest gap of request `a`, in milliseconds."""
    sink = Sink()
    for each in steps:
        sink.on_step(each)
    one = replace(
        request(prefill_ns=MS, gaps_ns=[MS]),
        engine_id="e",
        request_id="a",
        token_times_ns=array("q", [round(at * MS) for at in times_ms]),
        preempted_ns=preempted_ns,
    )
    sink.on_request(one)
    (found,) = (sink.gaps.rows_ns(1) / MS).tolist()
    return [round(each, 6) for each in found]


def made(number: int, end_ms: float, *, decode_ms: float, prefill_ms: float = 0.0) -> FinalStep:
    """Return a step of two requests whose prefill delays the decodes, with 1 ms of excess."""
    base = step(
        round(end_ms * MS),
        explained_ms=decode_ms + prefill_ms,
        excess_ms=1.0,
        tokens=9,
        is_mixed=prefill_ms > 0,
    )
    assert base.delay is not None
    delay = replace(base.delay, decode_class_ns=round(decode_ms * MS))
    return replace(base, step=number, delay=delay)


def test_causes_are_those_of_the_steps_that_end_in_the_longest_gap() -> None:
    steps = [
        made(0, 10, decode_ms=4),
        made(1, 20, decode_ms=5, prefill_ms=7),
        made(2, 40, decode_ms=6, prefill_ms=8),
    ]
    assert row(steps, [10.5, 20.5, 41]) == [6, 8, 1, 5.5]
    assert row(steps, [10.5, 41]) == [11, 15, 2, 2.5]


def test_a_step_that_only_prefills_is_others_prompts() -> None:
    lone = made(1, 20, decode_ms=7)
    assert lone.delay is not None
    lone = replace(lone, delay=replace(lone.delay, prefills=[0, 1]))
    assert row([made(0, 10, decode_ms=4), lone], [10, 20]) == [0, 7, 1, 2]


def test_several_ranks_report_a_step_once() -> None:
    steps = [made(0, 10, decode_ms=4), made(1, 20, decode_ms=5, prefill_ms=3)]
    twice = [each for one in steps for each in (one, replace(one, rank=1))]
    assert row(twice, [10, 21]) == row(steps, [10, 21]) == [5, 3, 1, 2]


def test_steps_that_overlap_explain_no_more_than_the_gap() -> None:
    steps = [made(0, 10, decode_ms=4), made(1, 11, decode_ms=7), made(2, 12, decode_ms=7)]
    assert row(steps, [10, 12]) == [1.75, 0, 0.25, 0]


def test_what_follows_a_preemption_is_outside_the_steps_of_the_request() -> None:
    steps = [made(number, 10 * (number + 1), decode_ms=8, prefill_ms=1) for number in range(5)]
    preempted_ns = ((round(25 * MS), round(35 * MS)),)
    assert row(steps, [10, 50], preempted_ns=preempted_ns) == [8, 1, 1, 30]
    earlier_ns = ((round(9 * MS), round(35 * MS)),)
    assert row(steps, [10, 50], preempted_ns=earlier_ns) == [0, 0, 0, 40]


@pytest.mark.parametrize("times_ms", [[], [10]])
def test_a_request_without_a_gap_has_no_causes(times_ms: list[float]) -> None:
    assert row([made(0, 10, decode_ms=4)], times_ms) == [0, 0, 0, 0]


def test_without_its_steps_a_gap_is_unknown() -> None:
    assert row([], [10, 20]) == [0, 0, 0, 0]


def test_rows_sum_to_the_gap_and_are_no_larger_than_the_ledger() -> None:
    sink = Sink()
    source = open_source(SAMPLE, sinks=(sink,))
    catch_up(source)
    source.collector.end()
    rows_ns = sink.gaps.rows_ns(len(sink.requests))
    assert (rows_ns.sum(axis=1) > 0).sum() > 90
    for one, of_gap in zip(sink.requests, rows_ns, strict=True):
        gaps_ns = np.diff(np.frombuffer(one.token_times_ns, dtype=np.int64))
        if not of_gap.any():
            continue
        assert of_gap.sum() == pytest.approx(gaps_ns.max())
        assert of_gap.min() >= 0
        booked = one.ledger_ns
        decode_ns = booked.get("decode_own", 0) + booked.get("decode_co_batched", 0)
        assert of_gap[DECODE] <= decode_ns + AT_MOST_OFF_NS
        assert of_gap[INTERFERENCE] <= booked.get("decode_interference", 0) + AT_MOST_OFF_NS
