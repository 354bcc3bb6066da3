"""Speculation on a made-up engine, whose steps take as long as the tokens in them."""

from __future__ import annotations

from array import array

import pytest

from inferscope.fold.fold import Collector
from inferscope.insight.findings import Finding, RunSummarizer, findings
from inferscope.probe.probe import digest64
from inferscope.records import DECODE, VERIFY, StepSlices
from tests.fold.scripts import Ring, Script

NUM_REQUESTS, NUM_STEPS, PROPOSED = 20, 10, 31


def took_ms(num_tokens: int) -> float:
    return 1 + 0.01 * num_tokens


ROWS = {
    "one row": ([VERIFY], [PROPOSED + 1], [PROPOSED]),
    "a row of the known token and one of the drafts": (
        [DECODE, VERIFY],
        [1, PROPOSED],
        [0, PROPOSED],
    ),
}
"""Phases, tokens and proposed tokens of a request that verifies, as adapters record them."""


def verify(core: Ring, step: int, index: int, context: int, accepted: int, rows: str) -> None:
    phases, tokens, proposed = ROWS[rows]
    num = len(phases)
    indices, counts = array("I", [index] * num).tobytes(), array("I", tokens).tobytes()
    contexts = [context, context + 1][:num]
    core.write(
        StepSlices(
            core.now_ns,
            step,
            digest64(indices, counts),
            indices,
            bytes(phases),
            counts,
            array("I", contexts).tobytes(),
            b"",
            array("H", tokens).tobytes(),
            array("H", proposed).tobytes(),
            array("H", [0, accepted][-num:]).tobytes(),
        )
    )


def run(accepted: int, rows: str) -> dict[str, Finding]:
    """Serve requests one by one; each step verifies drafts and accepts a fixed number."""
    script = Script()
    core = script.ring()
    step, at_ms = 0, 0.0
    for number in range(NUM_REQUESTS):
        script.at(at_ms)
        index = core.queued(f"r{number}")
        core.admitted(index)
        context = 8
        core.step(step, [(index, 8, 0)], start_ms=at_ms, end_ms=at_ms + took_ms(8))
        step, at_ms = step + 1, at_ms + took_ms(8)
        for _ in range(NUM_STEPS):
            end_ms = at_ms + took_ms(PROPOSED + 1)
            script.at(end_ms)
            core.span(step, at_ms, end_ms)
            verify(core, step, index, context, accepted, rows)
            core.emitted([index], [accepted + 1])
            step, at_ms, context = step + 1, end_ms, context + accepted + 1
        core.step(step, [(index, 1, context)], start_ms=at_ms, end_ms=at_ms + took_ms(1))
        step, at_ms = step + 1, at_ms + took_ms(1)
        core.finished(index)
    watch = RunSummarizer()
    collector = Collector(watch)
    for item in script.items(until_ms=at_ms + 2_000):
        collector.fold(item.ring, item.record)
        watch.on_record(item.ring, item.record)
    (found,) = findings(watch)
    assert found.num_requests == NUM_REQUESTS
    assert watch.runs["engine"].steps.speculation.num_slices == NUM_REQUESTS * NUM_STEPS
    assert found.findings is not None
    return {finding.id: finding for finding in found.findings}


@pytest.mark.parametrize("rows", ROWS)
def test_drafts_that_are_never_accepted_cost_what_verifying_costs(rows: str) -> None:
    found = run(0, rows)["costly_speculation"]
    evidence = {number.name: number.value for number in found.evidence}
    assert (evidence["proposed_tokens"], evidence["accepted_tokens"]) == (6200, 0)
    assert evidence["token_time_with_over_without"] == pytest.approx(
        took_ms(32) / took_ms(1), rel=0.05
    )
    assert found.counterfactual is not None
    assert found.counterfactual.without_ns == pytest.approx(took_ms(1) * 1e6, rel=0.05)


@pytest.mark.parametrize("rows", ROWS)
def test_drafts_that_are_accepted_pay(rows: str) -> None:
    assert "costly_speculation" not in run(1, rows)
