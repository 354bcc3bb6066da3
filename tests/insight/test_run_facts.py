"""Laws of a run's facts: bounded memory loses no request, no nanosecond and no gap."""

from __future__ import annotations

from array import array
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from inferscope.fold import FinalRequest
from inferscope.insight.findings import EngineFindings, Finding, ObjectiveMiss
from inferscope.insight.run.course import Course
from inferscope.insight.run.ledger_bands import BOUNDS, LedgerBands
from inferscope.insight.run.slowest import MOST_SLOWEST, SlowestRequests
from inferscope.insight.run.worst_second import TokenWaits
from inferscope.records import DECODE, PREFILL
from inferscope.slo import Objective, ObjectiveCount
from inferscope.text import run_verdict
from tests.exporters.finals import step

SECOND = 1_000_000_000


def request(name: str, arrived_ns: int, times_ns: list[int], *, late: bool = False) -> FinalRequest:
    """Return a finished request with these times of its tokens."""
    return FinalRequest(
        engine_id="engine", request_id=name, external_id=None, trace="", attributes={},
        prompt_tokens=8, cached_tokens=0, output_tokens=len(times_ns), arrived_ns=arrived_ns,
        queued_ns=arrived_ns, admitted_ns=arrived_ns, first_token_ns=times_ns[0],
        last_token_ns=times_ns[-1], delivered_ns=times_ns[-1], arrived_at="engine",
        delivered_at="engine", finish="stop", joined_late=late, num_preemptions=0, ledger_ns={},
        ttft_ledger_ns={}, token_times_ns=array("q", times_ns),
        tokens_per_event=(1,) * len(times_ns), prefill_ns=0, decode_ns=0, prefill_flops=None,
        decode_flops=None, is_alone=True, fit_id="", clock="host",
    )  # fmt: skip


@given(st.lists(st.tuples(st.integers(1, 10**12), st.integers(0, 10**9)), min_size=1, max_size=80))
def test_bands_hold_every_request_and_its_ledger_in_order(rows: list[tuple[int, int]]) -> None:
    bands = LedgerBands()
    for own_ns, queue_ns in rows:
        bands.add(own_ns + queue_ns, {"decode_own": own_ns, "queue": queue_ns})
    found = bands.bands()
    assert sum(band.num for band in found) == len(rows)
    assert sum(band.by_cause["queue"] for band in found) == sum(queue for _, queue in rows)
    for band in found:
        assert sum(band.by_cause.values()) == band.sum_ns
    for one, following in pairwise(found):
        assert one.slowest_ns < following.fastest_ns
        assert one.high == following.low
    assert (found[0].low, found[-1].high) == (0.0, 1.0)
    in_order = sorted(own + queue for own, queue in rows)
    slowest = [took for took in in_order if took >= found[-1].fastest_ns]
    assert sum(slowest) == found[-1].sum_ns


def test_bands_end_at_their_bounds_where_latencies_differ() -> None:
    bands = LedgerBands()
    for number in range(1000):
        bands.add(round(1e6 * 1.02**number), {"queue": 1})
    assert [band.high for band in bands.bands()] == [*BOUNDS, 1.0]


@given(st.lists(st.tuples(st.integers(0, 10_000), st.integers(1, 50)), min_size=1, max_size=30))
def test_a_long_course_keeps_every_request_and_gap(rows: list[tuple[int, int]]) -> None:
    course = Course()
    for number, (arrived_s, num) in enumerate(rows):
        times = [(arrived_s + 1 + at) * SECOND for at in range(num)]
        course.add_request(request(str(number), arrived_s * SECOND, times))
    bins = list(course.bins())
    assert len(bins) <= 240
    assert sum(each.num_finished for _, each in bins) == len(rows)
    assert sum(each.ttft.num for _, each in bins) == len(rows)
    assert sum(each.tbt.num for _, each in bins) == sum(num - 1 for _, num in rows)
    starts = [start for start, _ in bins]
    assert starts == list(range(starts[0], starts[-1] + 1, course.bin_ns))


@given(
    st.lists(
        st.tuples(st.integers(0, 3 * SECOND), st.integers(1, 400 * SECOND), st.integers(0, 100)),
        min_size=1,
        max_size=20,
    )
)
def test_a_bin_of_a_course_holds_no_more_device_time_than_it_lasts(
    rows: list[tuple[int, int, int]],
) -> None:
    """A step that is longer than a bin lies in several."""
    course, now_ns, prefill_ns, decode_ns = Course(), 0, 0, 0
    for number, (gap_ns, lasted_ns, percent) in enumerate(rows):
        own_ns = lasted_ns * percent // 100
        shares_ns = np.array([own_ns, lasted_ns - own_ns])
        one = structs.replace(
            step(number, 0.0),
            start_ns=now_ns + gap_ns,
            end_ns=now_ns + gap_ns + lasted_ns,
            shares_ns=shares_ns,
            phases=np.array([PREFILL, DECODE], dtype=np.uint8),
        )
        course.add_step(one)
        now_ns, prefill_ns, decode_ns = one.end_ns, prefill_ns + own_ns, decode_ns + lasted_ns
    decode_ns -= prefill_ns
    bins = [each for _, each in course.bins()]
    assert sum(each.prefill_ns for each in bins) == prefill_ns
    assert sum(each.decode_ns for each in bins) == decode_ns
    slack_ns = 2 * len(rows)  # a whole nanosecond of each phase and step
    assert all(each.prefill_ns + each.decode_ns <= course.bin_ns + slack_ns for each in bins)


@given(st.lists(st.integers(1, 50), max_size=40))
def test_the_slowest_are_the_longest_and_the_earlier_of_equals(lives: list[int]) -> None:
    slowest = SlowestRequests()
    for number, life_ns in enumerate(lives):
        slowest.add(request(str(number), 0, [life_ns]))
    expected = sorted(range(len(lives)), key=lambda number: (-lives[number], number))
    found = [int(each.request_id) for each in slowest.requests()]
    assert found == expected[:MOST_SLOWEST]


def test_a_stall_of_all_requests_is_worse_than_one_of_a_single_one() -> None:
    waits = TokenWaits()
    tenth = SECOND // 10
    for number in range(8):  # in second 5 all wait for half a second; in second 8 one for 0.9 s
        times = [at * tenth for at in range(10, 120) if not 50 < at < 55]
        if number == 0:
            times = [at for at in times if not 80 * tenth < at < 89 * tenth]
        waits.add(request(str(number), 0, times))
    worst = waits.worst()
    assert worst is not None
    assert (worst.start_ns, worst.longest_gap_ns) == (5 * SECOND, 5 * tenth)
    gaps = Counter({5 * tenth: 8, tenth: 8 * 5})
    whole = sum(gap * num for gap, num in gaps.items())
    assert worst.num_gaps == gaps.total()
    assert worst.mean_wait_ns == round(sum(gap**2 * num for gap, num in gaps.items()) / whole)


def test_a_request_that_joined_late_counts_nowhere() -> None:
    waits, slowest = TokenWaits(), SlowestRequests()
    late = request("late", 0, [1, SECOND, 9 * SECOND], late=True)
    waits.add(late)
    slowest.add(late)
    assert waits.worst() is None
    assert slowest.requests() == ()


def findings(
    *found: Finding, counts: tuple[ObjectiveCount, ...] | None = None, num: int = 100
) -> EngineFindings:
    return EngineFindings(
        "engine", "m", num, 0, None if num < 20 else found, None, objectives=counts
    )


def count(name: str, *, bad: int, cause: str = "queue") -> ObjectiveCount:
    objective = Objective(name, "ttft", 500_000_000, 0.9, 30 * 86400 * SECOND)
    return ObjectiveCount(objective, 100 - bad, bad, 0, {cause: bad})


def missed(name: str, bad: int) -> Finding:
    miss = ObjectiveMiss(name, 0.9, 100 - bad, bad, bad / 10)
    return Finding("objective_missed", f"{name} is missed", 0.1, (), (), "", objective=miss)


SLOW = Finding("short_of_kv", "The KV cache is too small", 0.25, (), (), "")


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        (findings(num=3), "No verdict: 3 finished requests, fewer than 20."),
        (findings(), "The run shows none of the known performance problems."),
        (findings(SLOW), "The KV cache is too small (25.0% of the requests' time)."),
        (
            findings(missed("a", 20), SLOW, SLOW, counts=(count("a", bad=20), count("b", bad=1))),
            "1 of 2 objectives is missed: a (80.00% of 100 requests good, target 90%; of 20 bad"
            " ones 20 for queue). The KV cache is too small (25.0% of the requests' time), and 1"
            " more finding.",
        ),
        (
            findings(missed("a", 20), counts=(count("a", bad=20, cause="unknown"),)),
            "The objective is missed: a (80.00% of 100 requests good, target 90%). The run shows"
            " none of the known performance problems.",
        ),
        (
            findings(counts=(count("a", bad=2), count("b", bad=1))),
            "All 2 objectives are met. The run shows none of the known performance problems.",
        ),
    ],
)
def test_the_verdict_names_objectives_then_problems(found: EngineFindings, sentence: str) -> None:
    assert run_verdict(found) == sentence
