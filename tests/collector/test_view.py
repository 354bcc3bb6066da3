"""What a view says of now."""

from __future__ import annotations

from inferscope.collector.snapshot import EngineView
from inferscope.collector.view import snapshot
from inferscope.records import QUEUED
from tests.collector.scripts import Script


def view_of(script: Script, *, until_ms: float) -> EngineView:
    collector, _ = script.play(until_ms=until_ms)
    (view,) = snapshot(collector, window_ns=10**10, mode="live").engines
    return view


def test_the_prompts_that_wait_are_those_nobody_computes() -> None:
    script = Script()
    core = script.ring()
    first = core.enter(QUEUED, "first", prompt_tokens=100)
    core.admitted(first)
    script.at(1)
    core.enter(QUEUED, "second", prompt_tokens=40)
    core.enter(QUEUED, "third", prompt_tokens=5)
    script.at(2)
    core.step(0, [(first, 100, 0)], start_ms=2, end_ms=9)
    script.at(10)
    core.preempted(first)
    assert view_of(script, until_ms=1.5).queued_prompt_tokens == 45
    # What lost its blocks computes its prompt again.
    assert view_of(script, until_ms=300).queued_prompt_tokens == 145


def test_a_length_that_nobody_tells_makes_the_sum_unknown() -> None:
    script = Script()
    core = script.ring()
    core.enter(QUEUED, "first", prompt_tokens=100)
    core.enter(QUEUED, "second", prompt_tokens=None)
    assert view_of(script, until_ms=300).queued_prompt_tokens is None


def test_before_its_prompt_is_tokenised_a_request_counts_for_nothing() -> None:
    script = Script()
    front = script.ring("frontend")
    front.received("first")
    assert view_of(script, until_ms=300).queued_prompt_tokens == 0
