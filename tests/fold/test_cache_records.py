"""Records of the prefix cache, from the rings to final requests."""

from __future__ import annotations

import random
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferscope.fold.cache_use import CacheUse
from inferscope.fold.final_records import FinalRequest
from inferscope.fold.fold import Collector
from inferscope.probe.probe import digest64
from inferscope.records import (
    LORA,
    PREFILL,
    RECOMPUTED,
    SALT,
    CacheLookup,
    CacheSample,
    PromptLikeness,
    StepPlan,
    StepSlices,
)
from tests.fold.scripts import START_NS, Finals, Ring, Script, assert_all_closes

MS = 1_000_000
TOKENS = 8
"""Prompt tokens of a scripted request."""


def admit(core: Ring, request_id: str, *, at_ms: float, **lookup: object) -> int:
    """Queue and admit a request of 8 tokens with a lookup."""
    core.script.at(at_ms)
    index = core.queued(request_id)
    core.event(index, 3, cached_tokens=lookup.get("hit", 0))
    core.write(CacheLookup(core.now_ns, index, **lookup))  # type: ignore[arg-type]
    return index


def use_of(final: FinalRequest) -> CacheUse:
    assert final.cache is not None
    return final.cache


def by_id(finals: Finals) -> dict[str, FinalRequest]:
    return {final.request_id: final for final in finals.requests}


def assert_cache_closes(final: FinalRequest) -> None:
    """Check the laws of a final request's use of the cache."""
    use = use_of(final)
    assert sum(use.tokens.values()) == final.prompt_tokens
    assert use.gpu_ns is not None
    assert sum(use.gpu_ns.values()) + use.recomputed_ns == final.prefill_ns
    if final.first_token_ns is not None and use.ttft_ns is not None:
        assert sum(use.ttft_ns.values()) == final.ttft_ledger_ns.get("prefill_own", 0)
    if use.queue_evicted_ns is not None:
        assert 0 <= use.queue_evicted_ns <= final.ttft_ledger_ns.get("queue", 0)


def evicted_and_queued(order: str = "core first") -> tuple[Collector, Finals]:
    """Play an evictor, a request whose tokens were evicted, and one that waits behind it."""
    script = Script()
    core, front = script.ring(), script.ring("frontend")
    front_c = front.received("c", attributes={"tenant": "batch"}, external_id="client-c")
    evictor = admit(core, "c", at_ms=1, unmatched=8)
    core.step(0, [(evictor, 8, 0)], start_ms=2, end_ms=10)
    script.at(11)
    core.finished(evictor)
    front.last_byte(front_c)
    script.at(12)
    asked = front.received("a")
    counts = {"hit": 2, "evicted": 4, "rounding": 2, "evictor": evictor}
    lost = admit(core, "a", at_ms=12, evicted_ns=START_NS + 5 * MS, **counts)
    if order == "front end first":
        front.write(PromptLikeness(script.now_ns, asked, front_c, 3, differs=SALT | LORA))
    waiting = core.queued("b")
    core.step(1, [(lost, 6, 2)], start_ms=13, end_ms=19)
    front.emitted([asked])
    if order == "core first":
        front.write(PromptLikeness(script.now_ns, asked, front_c, 3, differs=SALT | LORA))
    core.event(waiting, 3, cached_tokens=0)
    core.write(CacheLookup(core.now_ns, waiting, unmatched=8))
    core.step(2, [(waiting, 8, 0), (lost, 1, 8)], start_ms=20, end_ms=28)
    script.at(29)
    core.finished(lost)
    core.finished(waiting)
    front.last_byte(asked)
    return script.play(until_ms=300)


def test_eviction_names_evictor_tenant_and_time_and_has_a_price() -> None:
    collector, finals = evicted_and_queued()
    final = by_id(finals)["a"]
    use = use_of(final)
    assert use.tokens == {"hit": 2, "evicted": 4, "rounding": 2}
    assert use.gpu_ns == {"hit": 0, "evicted": 4 * MS, "rounding": 2 * MS}
    assert use.evictor is not None
    assert (use.evictor.request_id, use.evictor.external_id) == ("c", "client-c")
    assert (use.evictor.tenant, use.evicted_ns) == ("batch", START_NS + 5 * MS)
    assert use.difference is not None
    assert (use.difference.diverged_at, use.difference.differs) == (3, ("salt", "lora"))
    for each in finals.requests:
        assert_cache_closes(each)
    assert_all_closes(collector, finals)


def test_queue_states_the_part_in_which_evicted_tokens_were_recomputed() -> None:
    _, finals = evicted_and_queued()
    waiting = use_of(by_id(finals)["b"])
    # It waited for the step of 13 to 19 ms, which recomputed 4 evicted tokens of 6.
    assert waiting.queue_evicted_ns == 4 * MS
    assert by_id(finals)["b"].ttft_ledger_ns["queue"] == 6 * MS
    assert use_of(by_id(finals)["a"]).queue_evicted_ns == 0


def test_order_in_which_the_two_processes_report_does_not_matter() -> None:
    core_first, front_first = (
        evicted_and_queued(order)[1].requests for order in ("core first", "front end first")
    )
    assert [final.cache for final in core_first] == [final.cache for final in front_first]


def test_requests_of_an_engine_without_these_records_have_none() -> None:
    script = Script()
    core = script.ring()
    index = core.queued("a")
    core.admitted(index)
    core.step(0, [(index, 8, 0)], start_ms=1, end_ms=9)
    core.finished(index)
    _, finals = script.play(until_ms=300)
    assert finals.only().cache is None


def test_prefill_repeated_after_a_preemption_is_charged_to_no_class() -> None:
    script = Script()
    core = script.ring()
    index = admit(core, "a", at_ms=1, unmatched=8)
    core.step(0, [(index, 8, 0)], start_ms=2, end_ms=10)
    core.preempted(index)
    script.at(12)
    core.resumed(index)
    script.at(12)
    core.plan(1)
    script.at(20)
    core.span(1, 12, 20)
    indices, tokens = array("I", [index]).tobytes(), array("I", [8]).tobytes()
    core.write(
        StepSlices(
            core.now_ns, 1, digest64(indices, tokens), indices, bytes([PREFILL]), tokens,
            array("I", [0]).tobytes(), bytes([RECOMPUTED]), array("H", [1]).tobytes(),
        )
    )  # fmt: skip
    core.emitted([index])
    script.at(21)
    core.finished(index)
    _, finals = script.play(until_ms=300)
    use = use_of(finals.only())
    assert (use.gpu_ns, use.recomputed_ns) == ({"new": 8 * MS}, 8 * MS)
    assert_cache_closes(finals.only())


@st.composite
def runs(draw: st.DrawFn) -> list[tuple[dict[str, int], int | None, list[int]]]:
    """Requests one after the other: lookup, position of difference, and chunks."""
    found = []
    for _ in range(draw(st.integers(1, 6))):
        hit = draw(st.integers(0, TOKENS - 1))
        counts, left = {"hit": hit}, TOKENS - hit
        for name in draw(st.permutations(["evicted", "pending", "cleared", "unmatched"])):
            counts[name] = draw(st.integers(0, left))
            left -= counts[name]
        counts["rounding"] = left
        chunks, at = [], hit
        while at < TOKENS:
            chunks.append(draw(st.integers(1, TOKENS - at)))
            at += chunks[-1]
        found.append((counts, draw(st.none() | st.integers(0, TOKENS)), chunks))
    return found


@pytest.mark.thorough
@given(runs(), st.randoms(use_true_random=False))
def test_laws_hold_and_neither_report_order_nor_cuts_of_windows_matter(
    requests: list[tuple[dict[str, int], int | None, list[int]]], draw: random.Random
) -> None:
    script = Script()
    core, front = script.ring(), script.ring("frontend")
    step, at_ms = 0, 1.0
    for number, (counts, diverged_at, chunks) in enumerate(requests):
        script.at(at_ms)
        asked = front.received(f"{number}")
        index = admit(core, f"{number}", at_ms=at_ms, **counts)
        if diverged_at is not None:
            front.write(PromptLikeness(script.now_ns, asked, max(0, asked - 1), diverged_at))
        at = counts["hit"]
        for tokens in chunks:
            core.step(step, [(index, tokens, at)], start_ms=at_ms + 1, end_ms=at_ms + 9)
            step, at, at_ms = step + 1, at + tokens, at_ms + 10
        core.finished(index)
        front.last_byte(asked)
    _, finals = script.play(until_ms=at_ms + 300)
    assert len(finals.requests) == len(requests)
    for final in finals.requests:
        assert_cache_closes(final)
    # More Ticks cut other windows; the front end's ring arrives before the core's, or after it.
    items = script.items(until_ms=at_ms + 300)
    again = Finals()
    collector = Collector(again)
    for item in items:
        collector.fold(item.ring, item.record)
        if draw.random() < 0.3:
            next(iter(collector.engines.values()))._fold_window()
    collector.end()
    assert by_id(again).keys() == by_id(finals).keys()
    for final in finals.requests:
        assert by_id(again)[final.request_id].cache == final.cache


def test_curve_follows_the_samples_and_the_plans_of_the_engine() -> None:
    script = Script()
    core, front = script.ring(), script.ring("frontend")
    for number in range(4):
        script.at(10 * number + 1)
        asked = front.received(
            f"{number}", attributes={"tenant": "chat" if number % 2 else "batch"}
        )
        found_there = {"hit": 8} if number else {"unmatched": 8}
        index = admit(core, f"{number}", at_ms=10 * number + 1, **found_there)
        core.write(StepPlan(core.now_ns, number, core.now_ns, core.now_ns, 0, 1, 6, 0, 10))
        digests = array("Q", [2**63, 2**62]).tobytes()
        core.write(CacheSample(core.now_ns, index, 4, 2, 1.0, digests))
        script.at(10 * number + 5)
        core.span(number, 10 * number + 1, 10 * number + 5)
        core.slices(number, [(index, 8, 0)])
        core.finished(index)
        front.last_byte(asked)
    collector, _ = script.play(until_ms=300)
    cache = collector.engines["engine"].lives.table.cache
    found = cache.curve()
    assert found is not None
    assert [point.hit_share for point in found.points[1:]] == [pytest.approx(3 * 8 / 32)] * 3
    assert found.points[0].withheld, "half the pool is less than the 6 blocks in flight"
    assert (found.prompt_tokens, found.peak_blocks) == (32, 6)
    chat, batch = (cache.curves_by_tenant()[name] for name in ("chat", "batch"))
    assert (chat.points[1].hit_share, batch.points[1].hit_share) == (1.0, 0.5)
