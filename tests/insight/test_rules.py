"""Each mistake is made on the real engine, found, and not found where it was not made."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from inferscope.engine import Engine, EngineOptions, Output
from inferscope.insight.findings.finding import Finding
from inferscope.insight.findings.latency import (
    large_batch_for_nothing,
    late_first_tokens,
    late_later_tokens,
    small_batch_with_queue,
)
from inferscope.insight.findings.rules import FEWEST_REQUESTS
from inferscope.insight.findings.run_summary import RunSummary
from inferscope.text.findings import findings_text
from tests.insight.runs import VOCAB, Ask, Judged, asks, serve

pytestmark = pytest.mark.thorough

Serve = Callable[..., Judged]

SHARED = [random.Random(0).randrange(VOCAB) for _ in range(300)]
ROOMY = EngineOptions(num_blocks=512)
SLEEP_S = 0.004
COLD_S = 0.3


def as_it_is(engine: Engine) -> None:
    """Change nothing."""


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Serve:
    def serve_here(
        asked: list[Ask],
        options: EngineOptions = ROOMY,
        change: Callable[[Engine], None] = as_it_is,
    ) -> Judged:
        return serve(tmp_path, monkeypatch, asked, options, change=change)

    return serve_here


def at_ease() -> list[Ask]:
    """Return requests that a roomy engine serves without any of them waiting."""
    return asks(40, every=9, prompt_tokens=40, max_tokens=32)


def the(judged: Judged, finding_id: str) -> Finding:
    assert judged.of_engine.findings is not None
    (found,) = [one for one in judged.of_engine.findings if one.id == finding_id]
    assert found.sentences
    assert found.advice
    assert found.evidence
    if found.counterfactual is not None:
        assert found.counterfactual.without_ns <= found.counterfactual.actual_ns
    return found


@pytest.mark.slow  # how long steps take decides it
def test_a_healthy_run_shows_nothing(served: Serve) -> None:
    judged = served(at_ease())
    assert judged.ids == set()
    text = findings_text((judged.of_engine,), width=100)
    assert "No findings" in text
    assert "TTFT without others' decodes" in text


def test_too_few_requests_are_not_judged(served: Serve) -> None:
    judged = served(asks(FEWEST_REQUESTS - 1, every=1, prompt_tokens=8, max_tokens=2))
    assert judged.of_engine.findings is None
    assert judged.of_engine.disaggregation is None
    assert "Not analyzed" in findings_text((judged.of_engine,), width=80)


def test_few_slots_make_first_tokens_late_and_the_device_has_room(served: Serve) -> None:
    options = EngineOptions(num_blocks=512, max_running=4)
    judged = served(asks(60, every=1, prompt_tokens=40, max_tokens=24), options)
    late = the(judged, "late_first_tokens")
    assert "`queue`" in late.sentences[0]
    assert "short_of_kv" not in judged.ids
    # The gain of batching is set here, since a fit on a busy machine is rough.
    steps = judged.run.steps
    steps.decode_alone_ns, steps.decode_together_ns = 400, 100
    slots = small_batch_with_queue(judged.run)
    assert slots is not None
    assert slots.counterfactual is not None
    assert slots.counterfactual.without_ns < 0.5 * slots.counterfactual.actual_ns
    steps.decode_alone_ns = 100
    assert small_batch_with_queue(judged.run) is None


@pytest.mark.parametrize(
    ("alone_ms", "queue_ms", "is_found"), [(2, 0, True), (12, 0, False), (2, 900, False)]
)
def test_a_batch_beyond_what_the_device_gives_is_found(
    alone_ms: int, queue_ms: int, is_found: bool
) -> None:
    """Thirty decodes take 40 ms together; judged by sums, for a fit on a busy machine is rough."""
    run = RunSummary("engine")
    run.requests.after_ns.update(decode_own=alone_ms * 100, decode_co_batched=3_800)
    run.requests.life_ns.update(decode_own=alone_ms * 100, decode_co_batched=3_800, queue=queue_ms)
    run.requests.num_tokens_after = 100
    steps = run.steps
    steps.num_decoding = steps.num_modelled = 10
    steps.decodes = steps.decodes_modelled = 300
    steps.decode_alone_ns, steps.decode_together_ns = 300 * alone_ms, 10 * 40
    found = large_batch_for_nothing(run)
    assert (found is not None) is is_found
    if found is not None and found.counterfactual is not None:
        assert found.counterfactual.without_ns < 0.6 * found.counterfactual.actual_ns


@pytest.mark.parametrize(
    ("cause", "advice"), [("queue", "Work on admission"), ("frontend", "the cause named above")]
)
def test_late_first_tokens_are_laid_to_their_own_cause(cause: str, advice: str) -> None:
    run = RunSummary("engine")
    requests = run.requests
    for _ in range(10):
        requests.ttft.add(100)
    requests.before_ns.update({cause: 800, "prefill_own": 200})
    requests.after_ns.update(decode_own=500)
    found = late_first_tokens(run)
    assert found is not None
    assert advice in found.advice
    assert found.counterfactual is not None
    assert (found.counterfactual.actual_ns, found.counterfactual.without_ns) == (100, 20)
    assert f"Without `{cause}`, the mean TTFT would be 20 ns" in found.counterfactual.sentence
    assert late_later_tokens(run) is None


def test_late_later_tokens_have_a_counterfactual() -> None:
    run = RunSummary("engine")
    requests = run.requests
    requests.ttft.add(100)
    requests.before_ns.update(prefill_own=100)
    requests.after_ns.update(cpu_gap=900, decode_own=300)
    requests.num_tokens_after = 12
    found = late_later_tokens(run)
    assert found is not None
    assert found.counterfactual is not None
    assert (found.counterfactual.actual_ns, found.counterfactual.without_ns) == (100, 25)
    assert late_first_tokens(run) is None


def test_a_small_kv_cache_is_named_with_its_preemptions(served: Serve) -> None:
    options = EngineOptions(num_blocks=24, max_model_tokens=128)
    judged = served(asks(40, every=3, prompt_tokens=60, max_tokens=40), options)
    found = the(judged, "short_of_kv")
    evidence = {number.name: number.value for number in found.evidence}
    assert evidence["preemptions"] == sum(r.num_preemptions for r in judged.finals.requests) > 0
    assert "small_batch_with_queue" not in judged.ids


@pytest.mark.slow  # how long steps take decides it
def test_long_prompts_starve_decodes(served: Serve) -> None:
    talkers = asks(20, every=12, prompt_tokens=20, max_tokens=60)
    readers = asks(20, every=12, prompt_tokens=500, max_tokens=2, seed=5)
    judged = served(talkers + readers, EngineOptions(num_blocks=512, prefix_cache=False))
    found = the(judged, "starved_decodes")
    assert found.counterfactual is not None
    assert "Without others' prefills, TBT p99 would be" in found.counterfactual.sentence
    apart = judged.of_engine.disaggregation
    assert apart is not None
    assert apart.tbt_without_interference.p99_ns == found.counterfactual.without_ns
    assert apart.ttft_without_interference.mean_ns < apart.ttft.mean_ns
    booked_ns = sum(r.ledger_ns.get("decode_interference", 0) for r in judged.finals.requests)
    removed_ns = apart.tbt.num * (apart.tbt.mean_ns - apart.tbt_without_interference.mean_ns)
    assert 0.9 * booked_ns <= removed_ns <= booked_ns + 1


def test_a_host_that_sleeps_between_steps_is_named(served: Serve) -> None:
    def sleep_in_scheduler(engine: Engine) -> None:
        plan = engine.scheduler.schedule

        def schedule() -> object:
            time.sleep(SLEEP_S)
            return plan()

        engine.scheduler.schedule = schedule  # type: ignore[assignment,method-assign]

    judged = served(at_ease(), change=sleep_in_scheduler)
    found = the(judged, "host_bound_decode")
    evidence = {number.name: number.value for number in found.evidence}
    assert evidence["cpu_gap_per_token_ns"] >= 1e9 * SLEEP_S
    assert found.counterfactual is not None


@pytest.mark.slow  # how long steps take decides it
def test_slow_first_uses_are_cold_starts(served: Serve) -> None:
    def sleep_when_cold(engine: Engine) -> None:
        runner = engine._runner
        execute = runner.execute  # type: ignore[attr-defined]

        def slowly(batch: object) -> object:
            if batch.is_cold:  # type: ignore[attr-defined]
                time.sleep(COLD_S)
            return execute(batch)

        runner.execute = slowly  # type: ignore[attr-defined]

    # A model that has learned from warm steps is what tells a cold one.
    later = [Ask(700, [7] * num_tokens, 2) for num_tokens in (100, 200, 400) for _ in range(2)]
    judged = served(
        asks(60, every=11, prompt_tokens=40, max_tokens=32) + later, change=sleep_when_cold
    )
    the(judged, "cold_starts")
    booked_ns = [request.ledger_ns.get("cold_start", 0) for request in judged.finals.requests]
    assert max(booked_ns) > 0.9e9 * COLD_S


def outputs_into(collected: dict[str, list[int]]) -> Callable[[Engine], None]:
    """Return a change of an engine that collects its output tokens by request."""

    def collect(engine: Engine) -> None:
        step = engine.step

        def collecting() -> list[Output]:
            outputs = step()
            for output in outputs:
                collected.setdefault(output.request.request_id, []).extend(output.tokens)
            return outputs

        engine.step = collecting  # type: ignore[method-assign]

    return collect


def test_reasoning_is_found_and_ends_with_the_configured_token(
    served: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = at_ease()
    without_end: dict[str, list[int]] = {}
    unsplit = served(asked, change=outputs_into(without_end))
    assert "mostly_reasoning" not in unsplit.ids
    assert {request.reasoning_tokens for request in unsplit.finals.requests} == {None}

    def reasoned(tokens: list[int], end: int) -> int:
        return tokens.index(end) + 1 if end in tokens else len(tokens)

    # Prompts hold the ids below VOCAB only: the tokens above end no reasoning before the output.
    ends = {token for tokens in without_end.values() for token in tokens if token >= VOCAB}
    share = {end: sum(reasoned(each, end) for each in without_end.values()) for end in ends}
    total = sum(map(len, without_end.values()))
    end = min(ends, key=lambda token: abs(share[token] - 0.75 * total))

    collected: dict[str, list[int]] = {}
    options = EngineOptions(num_blocks=512, end_of_thinking=end)
    change = outputs_into(collected)
    judged = serve(tmp_path / "split", monkeypatch, asked, options, change=change)
    found = the(judged, "mostly_reasoning")
    expected = {request_id: reasoned(tokens, end) for request_id, tokens in collected.items()}
    finals = judged.finals.requests
    assert {one.request_id: one.reasoning_tokens for one in finals} == expected
    told = {number.name: number.value for number in found.evidence}
    assert told["reasoning_tokens"] == sum(expected.values())
    answered = [one for one in finals if expected[one.request_id] < one.output_tokens]
    assert answered
    for one in answered:
        began_ns = one.token_times_ns[expected[one.request_id]]
        assert one.ttfot_ns == began_ns - one.arrived_ns
    assert len(answered) == sum(one.ttfot_ns is not None for one in finals)
    mean_ns = sum(one.ttfot_ns or 0 for one in answered) / len(answered)
    assert told["ttfot_mean_ns"] == pytest.approx(mean_ns, rel=0.05)


def test_the_text_of_prompts_is_in_no_ring(served: Serve, tmp_path: Path) -> None:
    served(asks(3, every=1, prompt_tokens=300, max_tokens=2, shared=SHARED))
    (ring,) = tmp_path.glob("**/*.ring")
    raw = ring.read_bytes()
    for width in (1, 2, 4, 8):
        raw_tokens = b"".join(token.to_bytes(width, "little") for token in SHARED[:16])
        assert raw_tokens not in raw
