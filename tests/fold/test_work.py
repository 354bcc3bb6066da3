"""Computed, moved and saved amounts of requests, against each step's own count."""

from __future__ import annotations

import random
from array import array
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from inferscope_jsonl.exporter import request_row
from msgspec.structs import replace
from numpy.typing import NDArray

from inferscope.cost.counts import rates_of
from inferscope.cost.shape import kv_bytes_per_token
from inferscope.fold.final_records import CacheSavings, FinalRequest
from inferscope.fold.view import snapshot
from inferscope.fold.work_totals import NUM_COLUMNS, TOTALLED, Journal, WorkTotals
from inferscope.records import (
    ADMITTED,
    DECODE,
    DRAFT,
    PREFILL,
    RECOMPUTED,
    VERIFY,
    EngineInfo,
    Shape,
    StepSlices,
)
from tests.fold.scripts import Finals, Ring, Script, assert_all_closes

DENSE = Shape(2, 64, 4, 2, 16, 128, 512, 16, 8, 16)
WINDOWED = replace(DENSE, window_tokens=6, num_full_layers=1)
EXPERTS = replace(DENSE, num_experts=8, experts_per_token=2, num_shared_experts=1)
LATENT = replace(DENSE, latent_ranks=(32, 16))


@dataclass
class Row:
    """Row of a step, with the amounts its request accumulates."""

    index: int
    phase: int
    tokens: int
    context: int
    sampled: int = 1
    flags: int = 0
    proposed: int = 0
    accepted: int = 0


@dataclass
class Traffic:
    """Core that runs given steps one after the other."""

    shape: Shape | None
    ranks: int = 1
    script: Script = field(default_factory=Script)
    steps: list[list[Row]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.core: Ring = self.script.ring()
        info = EngineInfo(
            self.script.now_ns,
            "made-up",
            shape=self.shape,
            device="gpu",
            sizes=(self.ranks, 1, 1, 1),
        )
        self.core.write(info)

    def request(self, name: str, *, prompt_tokens: int = 8, cached_tokens: int = 0) -> int:
        index = self.core.queued(name)
        self.core.event(index, ADMITTED, cached_tokens=cached_tokens, prompt_tokens=prompt_tokens)
        return index

    def step(self, rows: list[Row]) -> None:
        n = len(self.steps)
        self.steps.append(rows)
        self.script.at(10 * n + 1)
        self.core.plan(n)
        self.script.at(10 * n + 9)
        self.core.span(n, 10 * n + 1, 10 * n + 9)

        def column(kind: str, name: str) -> bytes:
            return array(kind, [getattr(row, name) for row in rows]).tobytes()

        self.core.write(
            StepSlices(
                self.script.now_ns,
                n,
                0,
                column("I", "index"),
                column("B", "phase"),
                column("I", "tokens"),
                column("I", "context"),
                column("B", "flags"),
                column("H", "sampled"),
                column("H", "proposed") if any(row.proposed for row in rows) else b"",
                column("H", "accepted") if any(row.proposed for row in rows) else b"",
            )
        )
        self.core.emitted(sorted({row.index for row in rows}))

    def play(self) -> Finals:
        collector, finals = self.script.play(until_ms=10 * len(self.steps) + 600)
        assert_all_closes(collector, finals)
        return finals


def some_traffic(seed: int, shape: Shape | None) -> tuple[Traffic, Finals]:
    """Run requests that prefill in chunks, decode, draft, verify and are preempted."""
    draw = random.Random(seed)
    traffic = Traffic(shape)
    state: dict[int, list[int]] = {}  # context, prompt left, tokens left
    for n in range(30):
        while len(state) < draw.randint(1, 6):
            state[traffic.request(f"r{n}-{len(state)}")] = [
                0,
                draw.randint(1, 40),
                draw.randint(1, 9),
            ]
        has_drafts = draw.random() < 0.2
        rows = []
        for index, (context, left, _) in state.items():
            if left:
                tokens = min(left, draw.choice([1, 7, 16]))
                flags = RECOMPUTED if draw.random() < 0.2 else 0
                rows.append(Row(index, PREFILL, tokens, context, int(tokens == left), flags))
            elif has_drafts and draw.random() < 0.7:
                k = draw.randint(1, 4)
                rows.append(Row(index, DRAFT, k, context, 0))
                taken = draw.randint(0, k)
                rows.append(Row(index, VERIFY, k + 1, context, k + 1, 0, k, taken))
            else:
                rows.append(Row(index, DECODE, 1, context))
        traffic.step(rows)
        for row in rows:
            if row.phase != DRAFT:
                request = state[row.index]
                request[0] += row.tokens - row.proposed + row.accepted
                request[1] -= row.tokens if row.phase == PREFILL else 0
                request[2] -= row.phase != PREFILL
        for index in [index for index, request in state.items() if request[2] <= 0]:
            del state[index]
            traffic.core.finished(index)
    for index in state:
        traffic.core.finished(index, "server_abort")
    return traffic, traffic.play()


@pytest.mark.thorough
@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([DENSE, WINDOWED, EXPERTS]))
def test_requests_sum_to_what_their_steps_computed_and_moved(seed: int, shape: Shape) -> None:
    """Sum in integers: no FLOP and no byte is lost or counted twice."""
    traffic, finals = some_traffic(seed, shape)
    rates = rates_of(shape)
    assert rates is not None
    sums: Counter[str] = Counter()
    for final in finals.requests:
        for phase, flops, work in (
            ("prefill", final.prefill_flops, final.prefill_work),
            ("decode", final.decode_flops, final.decode_work),
        ):
            assert flops is not None
            assert work.hbm_read_bytes is not None
            assert work.hbm_write_bytes is not None
            sums[f"{phase} flops"] += flops
            sums[f"{phase} tokens"] += work.tokens
            sums[f"{phase} written"] += work.hbm_write_bytes
            sums["read"] += work.hbm_read_bytes
        sums["recomputed"] += final.recomputed.tokens
        sums["rejected"] += final.rejected.tokens
        sums["proposed"] += final.proposed_tokens
        sums["drafted"] += final.drafted.tokens

    expected: Counter[str] = Counter()
    for rows in traffic.steps:
        targets = [row for row in rows if row.phase != DRAFT]
        for row in targets:
            phase = "prefill" if row.phase == PREFILL else "decode"
            own = (row.tokens, row.context, row.sampled)
            expected[f"{phase} flops"] += rates.flops.of_slices(*own)
            expected[f"{phase} tokens"] += row.tokens
            expected[f"{phase} written"] += rates.hbm.writes(row.tokens, row.sampled)
            expected["read"] += rates.hbm.reads(*own)
            expected["recomputed"] += row.tokens if row.flags & RECOMPUTED else 0
            expected["rejected"] += row.proposed - row.accepted
            expected["proposed"] += row.proposed
        expected["drafted"] += sum(row.tokens for row in rows if row.phase == DRAFT)
        num_tokens = sum(row.tokens for row in targets)
        num_rows = sum(row.sampled for row in targets)
        expected["read"] += rates.hbm.weights.of_step(num_tokens, num_rows)
    assert +sums == +expected


@pytest.mark.thorough
@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32))
def test_without_a_shape_that_is_counted_there_are_tokens_and_time_alone(seed: int) -> None:
    for shape in (None, LATENT):
        _, finals = some_traffic(seed, shape)
        for final in finals.requests:
            assert final.prefill_flops is final.decode_flops is None
            assert final.prefill_work.hbm_read_bytes is final.decode_work.hbm_write_bytes is None
            assert final.saved.flops is None
            assert final.prefill_work.tokens > 0


def by_id(finals: Finals) -> dict[str, FinalRequest]:
    return {final.request_id: final for final in finals.requests}


def test_rejected_drafts_are_counted_in_tokens() -> None:
    """Verify 4, 2 and no drafts of three requests in one step; all of the second's pass."""
    traffic = Traffic(DENSE)
    a, b, c = (traffic.request(name) for name in "abc")
    traffic.step([Row(i, PREFILL, 8, 0) for i in (a, b, c)])
    traffic.step(
        [
            Row(a, VERIFY, 5, 8, 5, 0, 4, 1),
            Row(b, VERIFY, 3, 8, 3, 0, 2, 2),
            Row(c, VERIFY, 1, 8, 1, 0, 0, 0),
        ]
    )
    for index in (a, b, c):
        traffic.core.finished(index)
    finals = traffic.play()
    requests = by_id(finals)
    shares_ns = finals.steps[-1].shares_ns.tolist()
    assert [requests[name].rejected.tokens for name in "abc"] == [3, 0, 0]
    assert [requests[name].rejected.ns for name in "abc"] == [shares_ns[0] * 3 // 5, 0, 0]
    assert [requests[name].decode_work.tokens for name in "abc"] == [5, 3, 1]


def test_drafts_are_counted_by_second_and_by_request() -> None:
    traffic, _ = some_traffic(7, DENSE)
    collector, _ = traffic.script.play(until_ms=10 * len(traffic.steps) + 600)
    (view,) = snapshot(collector, window_ns=10**11, mode="live").engines
    rows = [row for step in traffic.steps for row in step if row.phase == VERIFY]
    proposed, accepted = (
        sum(getattr(row, name) for row in rows) for name in ("proposed", "accepted")
    )
    assert proposed > accepted > 0
    assert sum(view.series.proposed_tokens) == proposed
    assert sum(view.series.accepted_tokens) == accepted
    assert sum(row.proposed_tokens for row in view.requests) == proposed
    assert sum(row.accepted_tokens for row in view.requests) == accepted


def test_draft_model_time_is_separate_and_its_flops_are_unassigned() -> None:
    traffic = Traffic(DENSE)
    mine = traffic.request("a")
    traffic.step([Row(mine, PREFILL, 8, 0)])
    traffic.step([Row(mine, DRAFT, 4, 8, 0), Row(mine, VERIFY, 5, 8, 5, 0, 4, 4)])
    traffic.core.finished(mine)
    finals = traffic.play()
    final, rates = finals.only(), rates_of(DENSE)
    assert rates is not None
    assert final.decode_flops == rates.flops.of_slices(5, 8, 5)
    assert (final.decode_work.tokens, final.drafted.tokens) == (5, 4)
    assert final.drafted.ns == finals.steps[-1].shares_ns.item(0)
    assert final.rejected.ns == 0
    provenance = request_row(final)["provenance"]
    assert provenance["compute_ns"]["method"] == "measured", "it was alone"
    assert provenance["draft_ns"]["method"] == provenance["rejected_ns"]["method"] == "apportioned"


@pytest.mark.parametrize("num_others", [0, 2])
def test_recomputed_tokens_are_counted_with_their_time(num_others: int) -> None:
    """Book a step by batch and row by row, with the same result."""
    traffic = Traffic(DENSE)
    mine = traffic.request("a")
    others = [traffic.request(f"other-{n}") for n in range(num_others)]
    traffic.step([Row(i, PREFILL, 8, 0) for i in (mine, *others)])
    decodes = [Row(i, DECODE, 1, 8) for i in others]
    traffic.step([Row(mine, PREFILL, 8, 0, 1, RECOMPUTED), *decodes])
    for index in (mine, *others):
        traffic.core.finished(index)
    finals = traffic.play()
    final = by_id(finals)["a"]
    assert final.recomputed.tokens == 8
    assert final.recomputed.ns == finals.steps[-1].shares_ns.item(0)
    assert final.prefill_work.tokens == 16


def test_weight_reads_are_divided_equally_among_the_step_members() -> None:
    traffic = Traffic(DENSE)
    a, b = traffic.request("a"), traffic.request("b")
    traffic.step([Row(a, PREFILL, 8, 0)])
    traffic.step([Row(a, DECODE, 1, 8), Row(b, PREFILL, 8, 0, 0)])
    for index in (a, b):
        traffic.core.finished(index)
    requests, rates = by_id(traffic.play()), rates_of(DENSE)
    assert rates is not None
    weights = rates.hbm.weights
    own = rates.hbm.reads(8, 0, 0)  # a chunk does not sample: lm_head is read for the decode
    assert requests["b"].prefill_work.hbm_read_bytes == own + weights.layers // 2
    decode = rates.hbm.reads(1, 8, 1) + weights.layers - weights.layers // 2 + weights.head
    assert requests["a"].decode_work.hbm_read_bytes == decode


def test_ranks_that_share_a_model_move_what_they_hold_twice_but_compute_it_once() -> None:
    """Hold two KV heads on four ranks: each head is on two of them."""

    def run(ranks: int) -> FinalRequest:
        traffic = Traffic(DENSE, ranks)
        mine = traffic.request("a")
        traffic.step([Row(mine, PREFILL, 8, 0)])
        traffic.core.finished(mine)
        return traffic.play().only()

    one, four = run(1), run(4)
    assert four.prefill_flops == one.prefill_flops
    rates = rates_of(DENSE, 4)
    assert rates is not None
    assert rates.hbm.kv_per_token == 2 * kv_bytes_per_token(DENSE)
    read = rates.hbm.reads(8, 0, 1) + rates.hbm.weights.of_step(8, 1)
    assert four.prefill_work.hbm_read_bytes == read
    assert one.prefill_work.hbm_read_bytes is not None
    assert read > one.prefill_work.hbm_read_bytes


def test_what_the_prefix_cache_saved_is_what_a_prompt_without_it_costs_more() -> None:
    traffic = Traffic(DENSE)
    cold = traffic.request("cold", prompt_tokens=48)
    traffic.step([Row(cold, PREFILL, 48, 0)])
    warm = traffic.request("warm", prompt_tokens=48, cached_tokens=32)
    traffic.step([Row(warm, PREFILL, 16, 32)])
    for index in (cold, warm):
        traffic.core.finished(index)
    requests = by_id(traffic.play())
    without, with_it = requests["cold"], requests["warm"]
    assert without.saved.flops == without.saved.ns == 0
    assert with_it.saved.flops is not None
    assert without.prefill_flops is not None
    assert without.prefill_flops - with_it.saved.flops == with_it.prefill_flops
    assert with_it.saved.ns is not None
    assert with_it.saved.ns > 0
    assert with_it.saved.fit_id == "roofline+eager-2"


@pytest.mark.parametrize("cached_tokens", [-5, 49])
def test_a_prompt_cannot_be_cached_beyond_its_ends(cached_tokens: int) -> None:
    traffic = Traffic(DENSE)
    mine = traffic.request("a", prompt_tokens=48, cached_tokens=cached_tokens)
    traffic.step([Row(mine, PREFILL, 16, 32)])
    traffic.core.finished(mine)
    saved = traffic.play().only().saved
    assert (saved.flops, saved.ns) == (None, None)


def test_time_saved_by_a_fit_alone_is_modelled() -> None:
    traffic = Traffic(None)
    mine = traffic.request("a", prompt_tokens=48, cached_tokens=32)
    traffic.step([Row(mine, PREFILL, 16, 32)])
    traffic.core.finished(mine)
    unknown = traffic.play().only()
    assert request_row(unknown)["provenance"]["saved_by_cache"]["method"] is None
    known = request_row(replace(unknown, saved=CacheSavings(None, 5_000, "eager-64")))
    assert known["provenance"]["saved_by_cache"]["method"] == "modelled"
    assert known["provenance"]["flops"]["method"] is None


def test_ranks_reported_later_count_from_then_on() -> None:
    traffic = Traffic(DENSE, 1)
    info = traffic.script.entries[-1][1]
    traffic.script.at(0.5)
    traffic.core.write(replace(info, t_ns=traffic.script.now_ns, sizes=(4, 1, 1, 1)))
    mine = traffic.request("a")
    traffic.step([Row(mine, PREFILL, 8, 0)])
    traffic.core.finished(mine)
    rates = rates_of(DENSE, 4)
    assert rates is not None
    read = rates.hbm.reads(8, 0, 1) + rates.hbm.weights.of_step(8, 1)
    assert traffic.play().only().prefill_work.hbm_read_bytes == read


def test_a_model_without_a_shape_has_no_savings() -> None:
    traffic = Traffic(None)
    mine = traffic.request("a", prompt_tokens=48, cached_tokens=32)
    traffic.step([Row(mine, PREFILL, 16, 32)])
    traffic.core.finished(mine)
    saved = traffic.play().only().saved
    assert (saved.flops, saved.ns) == (None, None)


def test_a_team_s_windows_are_clipped_step_by_step() -> None:
    """Clip each step: clipping the sum of contexts would give another number."""
    traffic, rates = Traffic(WINDOWED), rates_of(WINDOWED)
    assert rates is not None
    mine = traffic.request("a")
    traffic.step([Row(mine, PREFILL, 3, 0)])
    for context in range(3, 12):
        traffic.step([Row(mine, DECODE, 1, context)])
    traffic.core.finished(mine)
    final = traffic.play().only()
    assert final.decode_flops == sum(rates.flops.of_slices(1, c, 1) for c in range(3, 12))
    assert np.diff([rates.flops.of_slices(1, c, 1) for c in (4, 5, 6, 7)]).tolist() == [
        2 * 4 * 64,
        4 * 64,
        4 * 64,
    ]


@given(st.integers(0, 2**32))
def test_the_journal_sums_up_what_requests_computed_between_its_ends(seed: int) -> None:
    """Sum up at any times: further reads do not change the result."""
    draw, num_slots = random.Random(seed), 9
    work = WorkTotals(num_slots)
    journal = work.journal = Journal()
    ends, after = [], [totals_of(work, num_slots)]
    for _ in range(12):
        num = draw.randint(1, 7)
        slots = np.array([draw.randint(1, 8) for _ in range(num)])
        phases = np.array([draw.randint(0, 1) for _ in range(num)])
        amounts = np.array([draw.randint(0, 99) for _ in range(num * NUM_COLUMNS)])
        work.computed(slots, phases, amounts.reshape(-1, num))
        if draw.random() < 0.3:
            work.of(draw.randrange(num_slots))
        if draw.random() < 0.3:
            ends.append(len(journal.rows))
            after.append(totals_of(work, num_slots))
    if not ends:
        return
    there, sums = journal.sum_up(ends, num_slots)
    computed = np.diff(after, axis=0)
    assert (sums == computed[:, there]).all()
    assert there.tolist() == computed.any(axis=(0, 2)).nonzero()[0].tolist()
    since = totals_of(work, num_slots) - after[-1]
    there, sums = journal.sum_up([len(journal.rows)], num_slots)
    assert (sums == since[there]).all()
    assert sums.sum() == since.sum()


def totals_of(work: WorkTotals, num_slots: int) -> NDArray[np.int64]:
    amounts = [work.of(slot) for slot in range(num_slots)]
    return np.array(amounts)[:, :, TOTALLED].reshape(num_slots, -1)
