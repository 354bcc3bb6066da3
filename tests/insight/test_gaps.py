"""What a gap between tokens waited for others' prefills."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferscope.insight.findings import RunSummarizer
from inferscope.insight.findings.requests import by_gap
from inferscope.insight.findings.steps import StepStats
from inferscope.readers.source import RecordingSource
from tests.fold.scripts import Finals
from tests.insight.test_why import SAMPLE

moments = st.lists(st.integers(0, 10**6), min_size=0, max_size=30)


@given(
    moments,
    st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)), max_size=30),
    st.integers(0, 10**7),
)
def test_no_gap_waits_longer_than_it_is_and_all_no_longer_than_in_the_ledger(
    times: list[int], steps: list[tuple[int, int]], at_most_ns: int
) -> None:
    times_ns = array("q", sorted(times))
    ends, waits = (np.array([step[at] for step in steps], dtype=np.int64) for at in (0, 1))
    waited_ns = by_gap(times_ns, ends, waits, at_most_ns=at_most_ns)
    gaps_ns = np.diff(np.array(times_ns, dtype=np.int64))
    assert len(waited_ns) == len(gaps_ns)
    assert (waited_ns >= 0).all()
    assert (waited_ns <= gaps_ns).all()
    assert waited_ns.sum() <= min(at_most_ns, sum(wait for _, wait in steps))


def test_a_wait_belongs_to_the_gap_that_its_step_ended_in() -> None:
    times_ns = array("q", [100, 200, 300])
    ends, waits = np.array([100, 150, 200, 201, 301]), np.array([1, 2, 4, 8, 16])
    assert by_gap(times_ns, ends, waits, at_most_ns=99).tolist() == [6, 8]


@pytest.mark.thorough
def test_on_a_real_run_the_gaps_give_back_what_the_ledgers_booked() -> None:
    watch, finals, steps = RunSummarizer(), Finals(), StepStats()
    waited: dict[str, int] = {}

    class Waits:
        def on_step(self, step: object) -> None:
            steps.add(step)  # type: ignore[arg-type]

        def on_request(self, request: object) -> None:
            waited[request.request_id] = int(steps.end(request).sum())  # type: ignore

    source = RecordingSource(SAMPLE, sinks=(watch, finals, Waits()), listen=watch.on_record)
    source.advance()
    source.close()
    booked = {
        request.request_id: request.ledger_ns.get("decode_interference", 0)
        - request.ttft_ledger_ns.get("decode_interference", 0)
        for request in finals.requests
    }
    assert sum(booked.values()) > 10**9
    for request_id, booked_ns in booked.items():
        # A step that a token cuts is booked pro rata, and taken here as a whole.
        assert booked_ns >= waited[request_id] >= 0.95 * booked_ns
    assert sum(waited.values()) >= 0.99 * sum(booked.values())
    (run,) = watch.runs.values()
    apart = run.requests.tbt.sum_ns - run.requests.tbt_without_prefills.sum_ns
    assert apart == sum(waited.values())
    assert not run.steps._waits, "nothing is kept of those who are final"
