"""Facts from steps: equal to a plain count, and bounded in number."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from inferscope_otlp.facts import MAX_CHUNKS, FactTable

from inferscope.fold.final_records import FinalStep
from inferscope.records import DECODE, DRAFT, PREFILL, VERIFY

rows = st.lists(
    st.tuples(
        st.sampled_from("abcd"),
        st.sampled_from([PREFILL, DECODE, VERIFY, DRAFT]),
        st.integers(1, 9),
    ),
    max_size=6,
)
steps = st.lists(
    st.tuples(st.sampled_from(["x", "y"]), st.integers(0, 1), st.integers(1, 2), rows), max_size=30
)


def step(
    number: int,
    of: list[tuple[str, int, int]],
    *,
    engine_id: str = "x",
    dp_rank: int = 0,
    rank: int = 0,
) -> FinalStep:
    """Make a step that takes a millisecond per row."""
    tokens = np.array([row[2] for row in of], dtype=np.int64)
    return FinalStep(
        engine_id=engine_id,
        dp_rank=dp_rank,
        rank=rank,
        step=number,
        start_ns=10 * number,
        end_ns=10 * number + 9,
        measured_ns=9,
        clock="host",
        mode="eager",
        is_cold=False,
        fit_id="",
        request_ids=tuple(row[0] for row in of),
        phases=np.array([row[1] for row in of], dtype=np.uint8),
        tokens=tokens,
        contexts=tokens,
        flags=np.zeros(len(of), dtype=np.uint8),
        shares_ns=tokens,
        padding_ns=0,
        unattributed_ns=0,
        model_residual=0.0,
    )


@given(steps)
def test_sums_are_those_of_counting_each_step_by_itself(
    given_steps: list[tuple[str, int, int, list[tuple[str, int, int]]]],
) -> None:
    table = FactTable()
    num, size, tokens = Counter[object](), Counter[object](), Counter[object]()
    chunks, shares = Counter[object](), Counter[object]()
    for number, (engine_id, dp_rank, num_ranks, of) in enumerate(given_steps):
        for rank in range(num_ranks):
            table.add_step(step(number, of, engine_id=engine_id, dp_rank=dp_rank, rank=rank))
        for member in {(engine_id, name, phase == PREFILL) for name, phase, _ in of}:
            num[member] += 1
            size[member] += len({name for name, _, _ in of})
            tokens[member] += sum(count for _, _, count in of)
        for name, phase, count in of:
            chunks[engine_id, name] += phase == PREFILL
            shares[engine_id, name] += (phase == PREFILL) * count * num_ranks
    for engine_id in "xy":
        for name in "abcd":
            facts = table.pop(engine_id, name, since_ns=0)
            keys = [(engine_id, name, is_prefill) for is_prefill in (True, False)]
            if facts is None:
                assert not any(num[key] for key in keys)
                continue
            for key, mine in zip(keys, (facts.prefill, facts.decode), strict=True):
                assert mine.num_steps == num[key]
                assert mine.sum_requests == size[key]
                assert mine.sum_tokens == tokens[key]
            assert facts.num_chunks == len(facts.chunks) == chunks[engine_id, name]
            assert sum(chunk.share_ns for chunk in facts.chunks) == shares[engine_id, name]
    assert len(table) == 0


def test_requests_that_never_end_are_forgotten() -> None:
    table = FactTable(max_requests=10)
    for number in range(100):
        table.add_step(step(number, [(f"r{number}", PREFILL, 5)]))
    assert len(table) == 10
    assert table.pop("x", "r5", since_ns=0) is None
    newest = table.pop("x", "r99", since_ns=985)
    assert newest is not None
    assert newest.prefill.num_steps == 1


def test_partly_dropped_facts_are_not_returned() -> None:
    table = FactTable(max_requests=2)
    table.add_step(step(0, [("long", DECODE, 1)]))
    for number in (1, 2, 3):
        table.add_step(step(number, [(f"r{number}", DECODE, 1)]))
    table.add_step(step(4, [("long", DECODE, 1)]))
    table.add_step(step(5, [("new", DECODE, 1)]))
    assert table.pop("x", "long", since_ns=0) is None
    found = table.pop("x", "new", since_ns=50)
    assert found is not None
    assert found.decode.num_steps == 1


def test_a_request_in_use_is_not_the_one_forgotten() -> None:
    table = FactTable(max_requests=3)
    for number in range(50):
        table.add_step(step(number, [("busy", DECODE, 1), (f"r{number}", DECODE, 1)]))
    found = table.pop("x", "busy", since_ns=0)
    assert found is not None
    assert found.decode.num_steps == 50


def test_chunks_kept_are_bounded_and_all_are_counted() -> None:
    table = FactTable()
    for number in range(3 * MAX_CHUNKS):
        table.add_step(step(number, [("a", PREFILL, 5)]))
    found = table.pop("x", "a", since_ns=0)
    assert found is not None
    assert (len(found.chunks), found.num_chunks) == (MAX_CHUNKS, 3 * MAX_CHUNKS)
    assert found.prefill.num_steps == 3 * MAX_CHUNKS


def test_a_request_without_steps_has_no_facts() -> None:
    table = FactTable()
    table.add_step(step(0, []))
    assert table.pop("x", "a", since_ns=0) is None
    table.add_step(step(1, [("a", DECODE, 1)]))
    assert table.pop("x", "a", since_ns=None) is None


def test_an_engine_that_is_gone_leaves_nothing_behind() -> None:
    table = FactTable()
    for engine_id in ("x", "y"):
        table.add_step(step(0, [("a", DECODE, 1)], engine_id=engine_id))
    table.retain({"y"})
    assert table.pop("x", "a", since_ns=0) is None
    assert table.pop("y", "a", since_ns=0) is not None
