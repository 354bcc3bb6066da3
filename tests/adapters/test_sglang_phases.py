from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferscope.adapters.sglang.phases import (
    Part,
    Rows,
    binding,
    finish_of_json,
    has_forward,
    phase_of,
    rows_of,
)
from inferscope.records import DECODE, DRAFT, FINISHES, LAST_CHUNK, PREFILL, RECOMPUTED, VERIFY

EXTENDING = ["EXTEND", "MIXED", "SPLIT_PREFILL", "DLLM_EXTEND"]


class Row(NamedTuple):
    index: int
    phase: int
    tokens: int
    context: int
    flags: int
    sampled: int
    proposed: int
    accepted: int
    number: int = 0


def rows(rows: Rows) -> list[Row]:
    columns = (getattr(rows, name) for name in rows.__struct_fields__)
    return [Row(*row) for row in zip(*columns, strict=True)]


parts = st.builds(
    Part,
    index=st.integers(0, 9),
    context=st.integers(0, 50),
    tokens=st.integers(0, 50),
    num_prompt=st.integers(1, 60),
    seen=st.integers(0, 80),
    sampled=st.integers(0, 3),
    is_decoding=st.booleans(),
)


@given(st.sampled_from([*EXTENDING, "DECODE", "TARGET_VERIFY"]), st.lists(parts, max_size=6))
def test_rows_cover_each_part_once_and_in_order(mode: str, given_parts: list[Part]) -> None:
    covered = rows(rows_of(mode, given_parts))
    for part in given_parts:
        position = part.context
        while position < part.context + part.tokens:
            row = covered.pop(0)
            assert (row.index, row.context) == (part.index, position)
            assert row.tokens > 0
            position += row.tokens
        assert position == part.context + part.tokens
    assert not covered


@given(st.sampled_from(EXTENDING), parts)
def test_what_was_seen_before_is_recomputed_and_nothing_else(mode: str, part: Part) -> None:
    for row in rows(rows_of(mode, [part])):
        is_repeated = row.context < part.seen and row.phase == PREFILL
        assert bool(row.flags & RECOMPUTED) == is_repeated
        if is_repeated:
            assert row.context + row.tokens <= part.seen


@given(st.sampled_from(EXTENDING), parts)
def test_the_last_chunk_is_the_one_that_restores_prompt_and_losses(mode: str, part: Part) -> None:
    found = rows(rows_of(mode, [part]))
    end = max(part.num_prompt, part.seen)
    is_over = not part.is_decoding and part.context < end <= part.context + part.tokens
    assert sum(bool(row.flags & LAST_CHUNK) for row in found) == is_over
    assert sum(row.sampled for row in found) == (part.sampled if found else 0)


@given(parts)
def test_in_a_batch_that_extends_only_named_requests_decode(part: Part) -> None:
    for mode in EXTENDING:
        phases = {row.phase for row in rows(rows_of(mode, [part]))}
        if part.is_decoding:
            assert phases <= {DECODE}
        elif part.context < part.num_prompt and part.tokens:
            assert PREFILL in phases


@given(parts)
def test_a_stale_list_of_decoding_requests_changes_nothing_in_a_batch_that_decodes(
    part: Part,
) -> None:
    assert {row.phase for row in rows(rows_of("DECODE", [part]))} <= {DECODE}


def test_a_verified_batch_reports_what_was_proposed_and_accepted() -> None:
    part = Part(3, 100, 4, 20, sampled=4, accepted=2)
    for batch in (rows_of("TARGET_VERIFY", [part]), rows_of("DECODE", [part], is_verified=True)):
        assert rows(batch) == [Row(3, VERIFY, 4, 100, 0, 4, 3, 2)]


@pytest.mark.parametrize("mode", ["IDLE", "PREBUILT"])
def test_batches_without_work_of_requests_have_no_rows(mode: str) -> None:
    assert not rows(rows_of(mode, [Part(0, 0, 5, 5)]))


def test_only_a_prebuilt_batch_runs_no_model() -> None:
    modes = [*EXTENDING, "DECODE", "IDLE", "PREBUILT", "TARGET_VERIFY"]
    assert [mode for mode in modes if not has_forward(mode)] == ["PREBUILT"]


def test_an_unknown_mode_is_a_fault_and_not_a_guess() -> None:
    assert phase_of("DRAFT_EXTEND_V2") == DRAFT
    with pytest.raises(ValueError, match="TELEPORT"):
        phase_of("TELEPORT")


class _Simulated:
    """A request as SGLang would run it: chunks, decodes, retractions, results that are dropped."""

    def __init__(self, num_prompt: int, cached: int) -> None:
        self.num_prompt = num_prompt
        self.computed = cached
        self.seen = 0
        self.num_out = 0
        self.counts: Counter[str] = Counter()

    def run(self, mode: str, num: int) -> None:
        part = Part(0, self.computed, num, self.num_prompt, self.seen)
        for row in rows(rows_of(mode, [part])):
            self.counts["tokens"] += row.tokens
            self.counts["recomputed"] += row.tokens if row.flags & RECOMPUTED else 0
        self.computed += num
        self.seen = max(self.seen, self.computed)

    @property
    def known(self) -> int:
        """Positions whose tokens are known: the prompt and what came out."""
        return self.num_prompt + self.num_out

    def prefill(self, budgets: list[int]) -> None:
        while self.computed < self.known:
            left = self.known - self.computed
            self.run("EXTEND", min(left, budgets.pop() if budgets else left))
        self.num_out += 1

    def retract(self, kept: int, *, is_overlapped: bool) -> None:
        if is_overlapped:  # a step is under way, and its token will be dropped
            self.run("DECODE", 1)
        self.computed = min(kept, self.num_prompt - 1)


@given(
    num_prompt=st.integers(2, 40),
    cached=st.integers(0, 39),
    budgets=st.lists(st.integers(1, 12), max_size=20),
    bursts=st.lists(st.tuples(st.integers(0, 6), st.booleans(), st.integers(0, 40)), max_size=4),
)
def test_work_is_what_was_not_cached_plus_outputs_but_one_plus_recomputed(
    num_prompt: int, cached: int, budgets: list[int], bursts: list[tuple[int, bool, int]]
) -> None:
    cached = min(cached, num_prompt - 1)
    request = _Simulated(num_prompt, cached)
    request.prefill(budgets)
    for num_decodes, is_overlapped, kept in bursts:
        for _ in range(num_decodes):
            request.run("DECODE", 1)
            request.num_out += 1
        # What was cached when the request came was in the cache all along.
        request.retract(max(kept, cached), is_overlapped=is_overlapped)
        request.prefill(budgets)
    work = num_prompt - cached + request.num_out - 1 + request.counts["recomputed"]
    assert request.counts["tokens"] == work


@pytest.mark.parametrize(
    ("reason", "has_run", "finish"),
    [
        ({"type": "stop", "matched": 2}, True, "stop"),
        ({"type": "length", "length": 8}, True, "length"),
        (None, False, "client_cancel"),
        ({"type": "abort", "message": "Aborted", "status_code": None}, True, "client_cancel"),
        ({"type": "abort", "message": "The request queue is full.", "status_code": 503}, False,
         "shed"),
        ({"type": "abort", "message": "Retry later.", "status_code": 503}, True, "server_abort"),
        ({"type": "abort", "message": "Request running timeout reached.", "status_code": 503}, True,
         "timeout"),
        ({"type": "abort", "message": "too long", "status_code": 400}, False, "rejected"),
        ({"type": "abort", "message": "Out of memory", "status_code": 500}, True, "error"),
    ],
)  # fmt: skip
def test_ends_are_recorded_with_words_of_the_closed_list(
    reason: dict[str, object] | None, has_run: bool, finish: str
) -> None:
    assert finish in FINISHES
    assert finish_of_json(reason, has_run=has_run) == finish


def test_the_limit_is_named_only_when_a_request_waits() -> None:
    def which(
        *, waiting: int = 1, running: int = 3, full: bool = False, chunk: bool = False
    ) -> str:
        return binding(
            waiting=waiting, running=running, max_running=4, is_full=full, has_chunk=chunk
        )

    assert which(waiting=0, running=4, full=True, chunk=True) == "none"
    assert which(running=4, full=True, chunk=True) == "slots"
    assert which(full=True, chunk=True) == "budget"
    assert which(full=True) == "blocks"
    assert which() == "none"
