"""The explanation of a request never contradicts its ledger."""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferscope.attribution.blame import BLAMED
from inferscope.attribution.blame_shares import BlameShare
from inferscope.attribution.prompt_parts import PromptPart
from inferscope.cost.verdict import RESIDUAL_STEPS
from inferscope.fold.snapshots import RequestRow
from inferscope.insight.facts import Computing, Facts, PrefillLeg, RankSteps, Waiting
from inferscope.insight.request_observer import RequestObserver
from inferscope.readers.request_index import requests_in_recording
from inferscope.readers.source import RecordingSource
from inferscope.records import CAUSES, Record
from inferscope.text.evidence import sentence
from inferscope.text.explanation import NS_PER_TENTH_MS, why
from inferscope.text.labels import CAUSE_MEANINGS
from inferscope.text.plots import share
from inferscope.text.report import report_json, report_lines
from tests.fold.scripts import Finals

ROUNDING_NS = 1_000
"""Whole nanoseconds of a step are dealt out: a few go to causes that had no part in it."""
SAMPLE = Path(__file__).parents[2] / "samples" / "demo.isr"


@pytest.fixture(scope="module")
def everyone() -> list[tuple[Facts, dict[str, int]]]:
    """Every request of the sample, witnessed in one fold, with its ledger from the fold itself."""
    lives = requests_in_recording(SAMPLE)
    names = {life.request_id: life.external_id or life.request_id for life in lives}
    witnesses = [RequestObserver(life, names) for life in lives]

    def listen(ring: int, record: Record) -> None:
        for witness in witnesses:
            witness.on_record(ring, record)

    ledgers = _Ledgers()
    source = RecordingSource(SAMPLE, sinks=(*witnesses, ledgers), listen=listen)
    source.advance()
    source.close()
    found = []
    for life, witness in zip(lives, witnesses, strict=True):
        facts = witness.facts(source.collector)
        assert facts is not None
        found.append((facts, ledgers.by_id[life.request_id]))
    assert len(found) == 102
    return found


class _Ledgers:
    """Sink that keeps the facts of each request."""

    def __init__(self) -> None:
        self.by_id: dict[str, dict[str, int]] = {}

    def on_step(self, step: object) -> None:
        """Steps do not matter here."""

    def on_request(self, request: object) -> None:
        self.by_id[request.request_id] = request.ledger_ns  # type: ignore[attr-defined]


def test_the_rows_are_the_ledger_and_sum_to_the_life(
    everyone: list[tuple[Facts, dict[str, int]]],
) -> None:
    for facts, ledger_ns in everyone:
        report = why(facts)
        assert {row.cause: row.ns for row in report.rows} == ledger_ns
        assert report.sum_ns == report.life_ns == sum(row.ns for row in report.rows)
        assert "Every nanosecond is accounted for" in report.caveats[0]
        assert f"{report.life_ns:,} ns" in report.caveats[0]
        assert sorted((row.ns for row in report.rows), reverse=True) == [
            row.ns for row in report.rows
        ]


def test_blamed_causes_have_evidence(
    everyone: list[tuple[Facts, dict[str, int]]],
) -> None:
    counts = dict.fromkeys(CAUSES, 0)
    for facts, ledger_ns in everyone:
        for cause in ledger_ns:
            counts[cause] += 1
        assert len(facts.preemptions) == facts.row.num_preemptions
        assert facts.waiting is not None
        if ledger_ns.get("queue", 0) > ROUNDING_NS:
            assert facts.waiting.behind
        if ledger_ns.get("decode_interference", 0) > ROUNDING_NS:
            assert 0 < facts.decode.num_mixed <= facts.decode.num_steps
            assert facts.decode.other
        if ledger_ns.get("decode_co_batched", 0) > ROUNDING_NS:
            assert facts.decode.same
            assert facts.decode.most_same >= facts.decode.mean_same > 1
        if ledger_ns.get("prefill_interference", 0) > ROUNDING_NS:
            assert facts.prefill.other
        if ledger_ns.get("prefill_co_batched", 0) > ROUNDING_NS:
            assert facts.prefill.same
        if ledger_ns.get("recompute", 0) > ROUNDING_NS:
            assert facts.prefill.num_recomputed
        if ledger_ns.get("cold_start", 0) > ROUNDING_NS:
            assert facts.cold
        assert bool(facts.num_left_out) is (ledger_ns.get("not_scheduled", 0) > ROUNDING_NS)
        assert facts.row.request_id not in {one.name for one in facts.decode.same}
        computed = facts.prefill.num_tokens - facts.prefill.num_recomputed
        assert computed + facts.row.cached_tokens >= facts.row.prompt_tokens
    assert all(
        counts[cause]
        for cause in ("queue", "decode_interference", "recompute", "preempted", "cold_start")
    ), "the sample shows these causes"


def test_why_row_names_top_contributor_and_share(
    everyone: list[tuple[Facts, dict[str, int]]],
) -> None:
    num_named = Counter[str]()
    for facts, ledger_ns in everyone:
        names = {one.request_id for one in facts.blame}
        assert facts.row.request_id not in names
        sums = Counter[str]()
        for cause, _, ns in facts.blame:
            sums[cause] += ns
        assert sums == {cause: ns for cause, ns in ledger_ns.items() if cause in BLAMED}
        sentences = {row.cause: row.sentence for row in why(facts).rows}
        for cause in BLAMED:
            shares = [one for one in facts.blame if one.cause == cause]
            if ledger_ns.get(cause, 0) > ROUNDING_NS and shares[0].request_id is not None:
                part = share(shares[0].ns / ledger_ns[cause])
                assert f"{shares[0].request_id} ({part}" in sentences[cause]
                num_named[cause] += 1
    assert set(num_named) == set(BLAMED), "the sample shows these causes"


def test_queue_names_the_scarce_resource_and_its_holder() -> None:
    waiting = Waiting(
        since_ns=5, until_ns=15, num_running=1, num_waiting=2, bindings={"slots": 1.0},
        prefill_ns=0, decode_ns=0, behind=(),
    )  # fmt: skip
    blame = (
        BlameShare("queue", "req-17", 6),
        BlameShare("queue", "req-9", 3),
        BlameShare("queue", None, 1),
    )
    facts = replace(
        made({"queue": 10}, 0, is_over=True, joined_late=False), waiting=waiting, blame=blame
    )
    assert why(facts).rows[0].sentence == (
        "waiting for admission: behind 1 running request; all sequence slots taken in all of the"
        " scheduler's plans meanwhile; the slots were held by req-17 (60.0%), req-9 (30.0%) and"
        " others"
    )
    assert any(one.startswith("Apportioned: how each wait divides") for one in why(facts).caveats)


def test_reasoning_and_the_answer_s_beginning_are_said(
    everyone: list[tuple[Facts, dict[str, int]]],
) -> None:
    facts, _ = everyone[0]
    assert "reasoning" not in why(facts).summary
    row = replace(facts.row, reasoning_tokens=24, ttfot_ns=1_500_000_000)
    told = why(replace(facts, row=row)).summary
    assert told.endswith("24 tokens were reasoning, and the answer began after 1.5 s.")
    told = why(replace(facts, row=replace(row, ttfot_ns=None))).summary
    assert told.endswith("24 tokens were reasoning, and there was no answer.")


def test_a_longest_gap_is_the_longest(everyone: list[tuple[Facts, dict[str, int]]]) -> None:
    gaps = [facts.longest_gap for facts, _ in everyone if facts.longest_gap is not None]
    assert len(gaps) > 90
    for facts, _ in everyone:
        gap = facts.longest_gap
        if gap is None:
            assert facts.row.output_tokens < 2
            continue
        assert gap.gap_ns >= (facts.row.tbt_p99_ns or 0) - 1
        assert gap.into_life_ns + gap.gap_ns <= facts.row.age_ns
        assert 2 <= gap.before_token <= facts.row.output_tokens


def test_prompt_parts_are_listed_with_their_cost(
    everyone: list[tuple[Facts, dict[str, int]]],
) -> None:
    facts = next(facts for facts, _ in everyone if facts.row.ttft_ns)
    ttft_ns = facts.row.ttft_ns
    assert ttft_ns is not None
    parts = (
        PromptPart("system", 120, 120, 0, 0, 0, None),
        PromptPart("history", 1, 0, 0, 38, 0, None),
        PromptPart("retrieved", 3000, 1000, 40, 62, ttft_ns // 4, None),
    )
    assert not any("prompt's compute" in one for one in why(facts).conclusions)
    text = " ".join(why(replace(facts, parts=parts)).conclusions)
    assert (
        "Of its prompt's compute, 62.0% was retrieved (3,000 tokens, 1,000 of them cached, 40"
        " computed again), 38.0% history (1 token); system (120 tokens) came from the cache."
        " Computing retrieved was 25.0% of the wait for the first token."
    ) in text
    many = tuple(PromptPart(f"p{'x' * at}", 5, 0, 0, 10, None, None) for at in range(9))
    text = " ".join(why(replace(facts, parts=many)).conclusions)
    assert "the rest 5 other parts." in text
    assert any("over its parts" in one for one in why(replace(facts, parts=many)).caveats)
    assert why(replace(facts, parts=parts[:1])) == why(facts), "all of it is said by the ledger"


@pytest.mark.parametrize("width", [60, 80, 100, 140])
def test_no_line_is_wider_than_the_terminal(
    everyone: list[tuple[Facts, dict[str, int]]], width: int
) -> None:
    for facts, _ in everyone[::5]:
        lines = report_lines(why(facts), width=width).splitlines()
        assert max(map(len, lines)) <= width
        assert report_lines(why(facts), width=width, ascii=True).isascii()
        assert report_json(why(facts), facts).startswith('{"version":1,"report":{"title":')


def test_colour_changes_nothing_but_colour(everyone: list[tuple[Facts, dict[str, int]]]) -> None:
    import re

    facts, _ = everyone[0]
    coloured = report_lines(why(facts), colour=True)
    assert "\x1b[" in coloured
    assert re.sub(r"\x1b\[\d+m", "", coloured) == report_lines(why(facts))


def test_every_cause_has_words() -> None:
    assert set(CAUSE_MEANINGS) == set(CAUSES)


# --- generated ledgers ----------------------------------------------------------------------------

amounts = st.integers(min_value=1, max_value=10**13)
ledgers = st.dictionaries(st.sampled_from([*CAUSES, "of_a_newer_version"]), amounts, max_size=12)


def made(ledger_ns: dict[str, int], rest_ns: int, *, is_over: bool, joined_late: bool) -> Facts:
    """Build a request of which nothing is known but its ledger."""
    life_ns = sum(ledger_ns.values()) + rest_ns
    ttft_ns = {cause: ns // 2 for cause, ns in ledger_ns.items() if ns > 1}
    row = RequestRow(
        request_id="r", external_id=None, state="done" if is_over else "decode",
        finish="stop" if is_over else None, arrived_ns=5, age_ns=life_ns, prompt_tokens=None,
        cached_tokens=None, output_tokens=2, ttft_ns=sum(ttft_ns.values()) or None,
        tbt_mean_ns=None, tbt_p99_ns=None, e2e_ns=None, prefill_ns=0, decode_ns=0,
        interference_share=None, num_preemptions=0, ledger_ns=ledger_ns, ttft_ledger_ns=ttft_ns,
        joined_late=joined_late,
    )  # fmt: skip
    return Facts(
        row=row, engine_id="e", model="", arrived_real_ns=5, is_over=is_over,
        arrived_at="engine", delivered_at="engine", clock="host", fit_ids=(), residual=None,
        num_lost=0,
    )  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(
    ledgers,
    st.integers(min_value=0, max_value=10**12),
    st.booleans(),
    st.booleans(),
    st.integers(min_value=30, max_value=200),
)
def test_any_ledger_is_explained_and_closed(
    ledger_ns: dict[str, int], rest_ns: int, is_over: bool, joined_late: bool, width: int
) -> None:
    facts = made(ledger_ns, rest_ns, is_over=is_over, joined_late=joined_late)
    report = why(facts)
    whole_ns = sum(ledger_ns.values()) + rest_ns
    assert sum(row.ns for row in report.rows) == whole_ns == report.life_ns
    assert report.sum_ns == whole_ns - rest_ns
    assert sum(row.tenths_ms for row in report.rows) == round(whole_ns / NS_PER_TENTH_MS)
    assert sum(row.mills for row in report.rows) == (1000 if whole_ns else 0)
    assert (len(report.rows) > len(ledger_ns)) == (rest_ns > 0)
    closes = "Every nanosecond is accounted for" in report.caveats[0]
    assert closes == (rest_ns == 0)
    assert "InferScope bug" not in report.caveats[0] or (is_over and not joined_late)
    for row in report.rows:
        if row.cause in CAUSE_MEANINGS:
            assert row.sentence.startswith(CAUSE_MEANINGS[row.cause])
    text = report_lines(report, width=width)
    for row in report.rows:
        assert row.cause in text


def test_rejected_drafts_are_part_of_the_evidence_of_decode() -> None:
    known = made({"decode_own": 90_000_000}, 0, is_over=True, joined_late=False)
    known = replace(known, decode=Computing(num_steps=30))
    assert sentence("decode_own", 90_000_000, known).endswith(": 30 steps at 3.0 ms each")
    rejecting = replace(known, rejected_tokens=45, rejected_ns=20_000_000)
    assert sentence("decode_own", 90_000_000, rejecting).endswith(
        ": 30 steps at 3.0 ms each; 20.0 ms of its decode verified 45 draft tokens in vain"
    )


def test_acceptance_is_part_of_the_evidence_of_drafts_and_of_decode() -> None:
    known = made({"draft": 9_000_000, "decode_own": 90_000_000}, 0, is_over=True, joined_late=False)
    row = replace(known.row, proposed_tokens=40, accepted_tokens=10)
    known = replace(known, row=row, decode=Computing(num_steps=30))
    assert sentence("draft", 9_000_000, known).endswith(": 10 of 40 draft tokens accepted (25.0%)")
    assert sentence("decode_own", 90_000_000, known).endswith(
        ": 30 steps at 3.0 ms each; 10 of 40 draft tokens accepted (25.0%)"
    )


def test_wait_for_a_rank_names_the_rank() -> None:
    known = made({"rank_wait": 90_000_000}, 0, is_over=True, joined_late=False)
    ranks = (RankSteps(1, 30, 360_000_000), RankSteps(0, 30, 270_000_000))
    assert sentence("rank_wait", 90_000_000, replace(known, ranks=ranks)).endswith(
        ": rank 1 took 12.0 ms a step, rank 0 9.0 ms"
    )


def test_lost_records_and_a_late_start_are_owned_up_to() -> None:
    facts = made({"decode_own": 10}, 5, is_over=True, joined_late=True)
    caveats = " ".join(why(replace(facts, num_lost=7)).caveats)
    assert "Part of it was not observed: the rows sum to 10 of 15 ns" in caveats
    assert "7 records of this engine were lost" in caveats


def test_how_far_steps_were_off_their_model_is_stated_in_words() -> None:
    facts = replace(
        made({"decode_own": 10}, 0, is_over=True, joined_late=False), fit_ids=("eager-64",)
    )
    for residual, words in ((-0.09, "9% less than modelled"), (0.5, "50% more than modelled")):
        report = why(replace(facts, residual=residual, num_modelled=61))
        assert f"its 61 steps took {words}" in " ".join(report.caveats)


def test_a_line_above_the_ledger_states_when_its_split_is_not_reliable() -> None:
    facts = made({"decode_own": 10}, 0, is_over=True, joined_late=False)
    for residual, words in (
        (None, ""),
        (0.1, ""),
        (-0.1, ""),
        (0.347, "model 1.3× off: split is rough"),
        (4.0, "model 5× off: split not reliable"),
        (-0.8, "model 5× off: split not reliable"),
    ):
        report = why(replace(facts, residual=residual))
        assert report.split == words
        above, _, _ = report_lines(report).partition("decode_own")
        assert above.rstrip().endswith(f"▲ {words}" if words else "0 µs.")


@pytest.mark.thorough
def test_the_screen_and_why_mean_the_same_by_a_residual(
    everyone: list[tuple[Facts, dict[str, int]]],
) -> None:
    """Each is the median of the residuals published with its steps."""
    finals = Finals()
    source = RecordingSource(SAMPLE, sinks=(finals,))
    source.advance()
    (view,) = source.snapshot(60_000_000_000).engines
    source.close()
    warm = [step for step in finals.steps if not step.is_cold]
    last = [step.model_residual for step in warm[-RESIDUAL_STEPS:]]
    assert view.model_residual == pytest.approx(statistics.median(last))
    for facts, _ in everyone[:10]:
        mine = [step.model_residual for step in warm if facts.row.request_id in step.request_ids]
        assert facts.num_modelled == len(mine)
        assert facts.residual == (pytest.approx(statistics.median(mine)) if mine else None)


@pytest.mark.parametrize("is_over", [True, False])
def test_a_request_without_a_ledger_is_reported_without_one(is_over: bool) -> None:
    facts = made({}, 10**9, is_over=is_over, joined_late=False)
    missing = replace(facts.row, ledger_missing="core not observed", ttft_ns=10**8)
    report = why(replace(facts, row=missing))
    assert report.rows == ()
    assert report.conclusions == ()
    assert report.caveats[0].startswith("It has no ledger (core not observed): ")
    assert "InferScope bug" not in " ".join(report.caveats)
    text = report_lines(report, width=100)
    assert "frontend" not in text
    assert "its first token came after 100" in text


def test_kv_transfer_names_the_sender_and_its_largest_causes(
    everyone: list[tuple[Facts, dict[str, int]]],
) -> None:
    spent_ns = {"queue": 3_000_000, "prefill_own": 9_000_000, "output": 1_000_000, "cpu_gap": 5_000}
    legs = PrefillLeg("prefill-0", 2048, spent_ns), PrefillLeg("10.0.0.1:5600", 4096)
    facts = replace(everyone[0][0], prefill_legs=legs)
    assert sentence("kv_transfer", 20_000_000, facts).partition(": ")[2] == (
        "2,048 bytes from engine prefill-0, which took 13.0 ms (9.0 ms prefill_own, 3.0 ms queue, "
        "1.0 ms output); 4,096 bytes from engine 10.0.0.1:5600"
    )
    assert ":" not in sentence("kv_transfer", 20_000_000, everyone[0][0])
