"""Autoscaling signals from views of a real engine with another queue."""

from __future__ import annotations

from dataclasses import replace

import pytest
from inferscope_prometheus.demand import STALE_NS, demand_of

from inferscope.fold.snapshots import EngineView
from tests.exporters.otlp.conftest import Finals


@pytest.fixture
def busy(finals: Finals) -> EngineView:
    """Return an engine in the midst of its work."""
    assert finals.view is not None
    (view,) = finals.view.engines
    return replace(
        view,
        is_alive=True,
        health=replace(view.health, probe_state="on"),
        device_ns={"prefill": 3 * 10**9, "decode": 2 * 10**9, "idle_no_work": 5 * 10**9},
        window_ns=10**10,
        prefill_tok_s=1000.0,
        decode_tok_s=200.0,
        step=replace(view.step, num=100),
        max_running=64,
        token_budget=512,
        blocks_total=1000,
        blocks_used=100,
        num_running=16,
        num_waiting=3,
        num_held=1,
        queued_prompt_tokens=4000,
    )


def test_the_wait_is_the_queue_over_the_pace_of_seconds_with_work(busy: EngineView) -> None:
    demand = demand_of(busy, lag_ns=0)
    assert demand is not None
    assert demand.queued_prompt_tokens == 4000
    assert demand.predicted_queue_seconds == 2.0  # half of the window there was no work


def test_an_empty_queue_is_no_wait_and_an_unknown_pace_is_unknown(busy: EngineView) -> None:
    empty = replace(busy, num_waiting=0, num_held=0, queued_prompt_tokens=0, prefill_tok_s=None)
    demand = demand_of(empty, lag_ns=0)
    assert demand is not None
    assert demand.predicted_queue_seconds == 0.0
    for unknown in ({"prefill_tok_s": 0.0}, {"queued_prompt_tokens": None}, {"device_ns": {}}):
        demand = demand_of(replace(busy, **unknown), lag_ns=0)  # type: ignore[arg-type]
        assert demand is not None
        assert demand.predicted_queue_seconds is None


@pytest.mark.parametrize(
    ("changes", "left"),
    [
        ({}, 1 - 20 / 64),
        ({"blocks_used": 900}, 1 - 0.9),
        ({"prefill_tok_s": 9_000.0}, 1 - 92_000 / 100 / 512 * 0.5),
        ({"num_waiting": 80}, 1 - 97 / 64),
        ({"max_running": 0, "token_budget": 0}, 1 - 0.1),
        ({"max_running": 0, "token_budget": 0, "blocks_total": 0}, None),
    ],
)
def test_headroom_is_the_least_of_what_is_left(
    busy: EngineView, changes: dict[str, float], left: float | None
) -> None:
    demand = demand_of(replace(busy, **changes), lag_ns=0)  # type: ignore[arg-type]
    assert demand is not None
    assert demand.headroom_ratio == (None if left is None else pytest.approx(left))


def test_what_is_old_gone_or_switched_off_is_not_shown(busy: EngineView) -> None:
    assert demand_of(busy, lag_ns=STALE_NS) is not None
    assert demand_of(busy, lag_ns=STALE_NS + 1) is None
    assert demand_of(replace(busy, is_alive=False), lag_ns=0) is None
    off = replace(busy, health=replace(busy.health, probe_state="off"))
    assert demand_of(off, lag_ns=0) is None
