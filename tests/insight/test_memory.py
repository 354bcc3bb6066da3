"""What a watch keeps does not grow with the run."""

from __future__ import annotations

import numpy as np
import pytest

from inferscope.attribution.counterfactual import Delay
from inferscope.fold.final_records import FinalStep
from inferscope.insight.findings import steps
from inferscope.insight.findings.steps import StepStats
from inferscope.records import DECODE, PREFILL


def mixed(number: int) -> FinalStep:
    """Return a step in which one request prefills and one decodes that will never be final."""
    two = np.array([1, 1], dtype=np.int64)
    return FinalStep(
        engine_id="e", dp_rank=0, rank=0, step=number, start_ns=number, end_ns=number + 1,
        measured_ns=1, clock="host", mode="eager", is_cold=False, fit_id="",
        request_ids=("reader", f"lost-{number}"),
        phases=np.array([PREFILL, DECODE], dtype=np.uint8), tokens=two, contexts=two,
        flags=np.zeros(2, dtype=np.uint8), shares_ns=two, padding_ns=0, unattributed_ns=0,
        model_residual=0.0, delay=Delay(two, None, [0], 1, 1, 2, 0),
    )  # fmt: skip


def test_requests_without_an_observed_end_are_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(steps, "_MOST_WAITING", 64)
    watched = StepStats()
    for number in range(1_000):
        watched.add(mixed(number))
    assert watched.num_mixed == 1_000
    assert list(watched._waits) == [f"lost-{number}" for number in range(936, 1_000)]


def test_a_step_counts_once_however_many_ranks_report_it() -> None:
    watched = StepStats()
    for _ in range(4):
        watched.add(mixed(7))
    assert (watched.num, watched.decodes, watched.mixed_prefill_tokens) == (1, 1, 1)
