"""Use of the prefix cache: sums, sentences and findings, from final requests made by hand."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import msgspec
import numpy as np
import pytest

from inferscope.attribution.cache_misses import CacheSegment
from inferscope.fold.cache_use import CacheUse, PromptDifference, RequestName
from inferscope.fold.final_records import FinalRequest
from inferscope.fold.fold import Collector
from inferscope.insight.cache_tally import CacheReport, CacheTally, cache_reports
from inferscope.insight.findings.rules import findings_of
from inferscope.insight.findings.run_summary import RunSummary
from inferscope.records import CACHE_CLASSES, CacheLookup, CacheSample, StepPlan
from inferscope.text.cache import CacheDocument, cache_json, cache_lines
from inferscope.text.cache_misses import miss_sentences
from tests.fold.test_cache_records import evicted_and_queued

MS = 1_000_000
EARLIER = RequestName("9f2c", "chat-1", "batch")


@dataclass
class Prompt:
    """Tokens of a prompt by class; a token costs 1 ms of the device and of the wait."""

    tokens: dict[str, int]
    difference: PromptDifference | None = None
    more: dict[str, object] = field(default_factory=dict)
    block_tokens: int = 16

    @property
    def use(self) -> CacheUse:
        segments = tuple(
            CacheSegment(name, "", num, *([0] * 2 if name == "hit" else [num * MS] * 2))
            for name, num in self.tokens.items()
        )
        return CacheUse(
            segments,
            difference=self.difference,
            block_tokens=self.block_tokens,
            **self.more,  # type: ignore[arg-type]
        )

    @property
    def final(self) -> FinalRequest:
        """A response of one token, whose wait is its own prefill."""
        num = sum(self.tokens.values())
        took_ns = (num - self.tokens.get("hit", 0)) * MS
        ledger = {"prefill_own": took_ns}
        return FinalRequest(
            "e", "r", None, "", {}, num, self.tokens.get("hit", 0), 1, 0, 0, 0,
            took_ns, took_ns, took_ns, "http", "http", "stop", False, 0, ledger, ledger,
            array("q", [took_ns]), (1,), took_ns, 0, None, None, True, "", "host", cache=self.use,
        )  # fmt: skip


def differs(
    at: int, again: int | None, *spans: tuple[int, int], shift: int = 0, apart: tuple[str, ...] = ()
) -> PromptDifference:
    return PromptDifference(EARLIER, at, again, shift, spans, apart, "system")


PROMPTS = {
    "prompt_changes_early": Prompt(
        {"hit": 32, "rounding": 5, "new": 7, "changed": 3004}, differs(37, 44, (44, 3048))
    ),
    "cache_too_small": Prompt(
        {"evicted": 1536, "new": 64},
        more={"evictor": EARLIER, "at_ns": 50 * MS, "evicted_ns": 9 * MS},
    ),
    "prefix_below_block": Prompt(
        {"rounding": 250, "new": 60},
        differs(240, None),
        more={"below_block_tokens": 240},
        block_tokens=784,
    ),
    "namespace_splits": Prompt({"namespace": 512, "new": 88}, differs(520, None, apart=("salt",))),
    "duplicates_in_flight": Prompt({"pending": 512, "new": 88}, more={"twin": EARLIER}),
    "documents_reordered": Prompt(
        {"hit": 32, "changed": 900, "new": 68}, differs(32, 33, (33, 400), (400, 933), shift=-320)
    ),
}
"""A prompt that shows each finding."""
HEALTHY = Prompt({"hit": 900, "new": 90, "rounding": 10}, differs(903, None))


def run_of(*prompts: Prompt) -> RunSummary:
    run = RunSummary("e")
    for prompt in prompts:
        run.requests.add(prompt.final, np.zeros(0, dtype=np.int64))
        run.cache.add(prompt.final)
    return run


@pytest.mark.parametrize("finding_id", PROMPTS)
def test_each_cause_of_misses_is_found_and_no_other(finding_id: str) -> None:
    found = findings_of(run_of(*[PROMPTS[finding_id]] * 20))
    assert [finding.id for finding in found if finding.id in PROMPTS] == [finding_id]
    assert finding_id not in {finding.id for finding in findings_of(run_of(*[HEALTHY] * 20))}


@pytest.mark.parametrize("finding_id", PROMPTS)
def test_rare_cause_is_no_finding(finding_id: str) -> None:
    run = run_of(PROMPTS[finding_id], *[HEALTHY] * 60)
    assert finding_id not in {finding.id for finding in findings_of(run)}


def with_curve(run: RunSummary, *, prompts: int) -> RunSummary:
    """Add requests that take turns over prompts of 10 blocks, in a pool of 60."""
    run.cache_accounts.plan(10, 60)
    for number in range(60):
        run.look_up(1, CacheLookup(0, number, unmatched=161))
        first = number % prompts * 10
        digests = array("Q", range(first, first + 10)).tobytes()
        run.sample(1, CacheSample(0, number, 16, 10, 1.0, digests))
    return run


def test_too_small_cache_states_what_larger_ones_would_give() -> None:
    evicting = [PROMPTS["cache_too_small"]] * 20
    (found,) = (
        each for each in findings_of(with_curve(run_of(*evicting), prompts=12))
        if each.id == "cache_too_small"
    )  # fmt: skip
    hits = {number.name: number.value for number in found.evidence if "hit_share" in number.name}
    assert hits["hit_share_at_1x"] == 0
    assert (
        hits["hit_share_at_2x"] == hits["hit_share_at_4x"] == pytest.approx(48 * 160 / (60 * 161))
    )
    assert "KV now 0%; 2×: 80%" in " ".join(found.sentences)


def test_evictions_that_no_larger_cache_would_avoid_are_no_finding() -> None:
    """Nothing comes back within four pools: more memory would give nothing."""
    run = with_curve(run_of(*[PROMPTS["cache_too_small"]] * 20), prompts=60)
    assert "cache_too_small" not in {finding.id for finding in findings_of(run)}


SENTENCES = {
    "prompt_changes_early": "Nothing behind token 37 could be reused: tokens 37–43 (part `system`)"
    " differ from request chat-1 (tenant `batch`); the next 3,004 are the same again. 3.0 s of GPU"
    " time, 3.0 s of TTFT. Put what changes last.",
    "cache_too_small": "1,536 tokens were cached and evicted 41.0 ms before, for request chat-1"
    " (tenant `batch`). 1.5 s of GPU time, 1.5 s of TTFT. Give the KV cache more memory, or send"
    " the requests of one conversation to one replica.",
    "prefix_below_block": "240 tokens are shared, but a block here is 784. Use smaller KV blocks.",
    "namespace_splits": "512 tokens are the same as those of request chat-1 (tenant `batch`), which"
    " has another salt. 512.0 ms of GPU time, 512.0 ms of TTFT. Share one salt among requests that"
    " may see each other's timing.",
    "duplicates_in_flight": "512 tokens were being computed by request chat-1 (tenant `batch`) at"
    " the same time. 512.0 ms of GPU time, 512.0 ms of TTFT. Send the first of several requests"
    " with one prefix ahead of the others.",
    "documents_reordered": "Nothing behind token 32 could be reused: 900 tokens behind it were seen"
    " before (part `system`), in another order or in other prompts. 900.0 ms of GPU time, 900.0 ms"
    " of TTFT. Keep what is shared in a fixed order.",
}


@pytest.mark.parametrize("finding_id", PROMPTS)
def test_sentence_names_position_request_price_and_remedy(finding_id: str) -> None:
    assert miss_sentences(PROMPTS[finding_id].use) == [SENTENCES[finding_id]]


def test_prompt_without_avoidable_misses_has_no_sentence() -> None:
    assert miss_sentences(HEALTHY.use) == []


def test_derived_evictor_is_one_of_those_listed() -> None:
    use = msgspec.structs.replace(
        PROMPTS["cache_too_small"].use,
        is_inferred=True, num_evictors=7, evictors=(EARLIER, RequestName("b")),
    )  # fmt: skip
    (said,) = miss_sentences(use)
    assert "for one of 7 requests, most likely request chat-1 (tenant `batch`), request b" in said
    assert "(inferred)" in said


def reports() -> list[CacheReport]:
    collector, finals = evicted_and_queued()
    tally = CacheTally()
    for final in finals.requests:
        tally.on_request(final)
    return cache_reports(tally, collector)


@pytest.mark.parametrize("by", ["cause", "tenant", "part", "conversation"])
def test_every_grouping_sums_to_the_prompts_and_to_the_prefill(by: str) -> None:
    _, finals = evicted_and_queued()
    document = msgspec.json.decode(cache_json(reports(), by), type=CacheDocument)  # type: ignore[arg-type]
    (engine,) = document.engines
    prefill_ns = sum(final.prefill_ns for final in finals.requests)
    assert engine.prompt_tokens == sum(final.prompt_tokens or 0 for final in finals.requests) == 24
    assert sum(row.prompt_tokens for row in engine.classes) == 24
    assert sum(row.gpu_ns for row in engine.classes) == prefill_ns
    assert [row.cache for row in engine.classes] == sorted(
        (row.cache for row in engine.classes), key=CACHE_CLASSES.index
    )
    assert len(engine.groups) == {"cause": 0, "tenant": 2}.get(by, 1)
    if engine.groups:
        assert sum(row.prompt_tokens for g in engine.groups for row in g.classes) == 24
        assert sum(group.miss_gpu_ns for group in engine.groups) == prefill_ns


def test_page_shows_classes_prices_and_where_prompts_differ() -> None:
    page = cache_lines(reports(), "tenant", width=100, ascii=True)
    assert all(len(line) <= 125 for line in page.splitlines())
    assert "evicted" in page
    assert "batch" in page
    assert page.isascii()
    totals = next(line for line in page.splitlines() if line.startswith("prompts"))
    assert totals.split()[:3] == ["prompts", "24", "100.0%"]


def test_engine_without_records_of_its_cache_has_no_report() -> None:
    assert cache_reports(CacheTally(), Collector()) == []


def test_plan_of_another_engine_kind_without_blocks_gives_no_curve() -> None:
    run = run_of(HEALTHY)
    plan = StepPlan(0, 1, 0, 0, 0, 1, 0, 0, 0)
    run.cache_accounts.plan(plan.blocks_used, plan.blocks_total)
    run.look_up(1, CacheLookup(0, 1, unmatched=16))
    run.sample(1, CacheSample(0, 1, 16, 1, 1.0, b"\0" * 8))
    assert run.cache_accounts.curve() is None
