from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from inferscope.attribution.cache_misses import (
    CacheSegment,
    Chunk,
    Likeness,
    Span,
    cache_segments,
    cache_spans,
)
from inferscope.records import CACHE_CLASSES, LOOKUP_CLASSES

COUNTS = st.dictionaries(st.sampled_from(LOOKUP_CLASSES), st.integers(-5, 60))
POSITIONS = st.integers(-5, 200)
LIKENESSES = st.none() | st.builds(
    Likeness,
    POSITIONS,
    st.lists(st.tuples(POSITIONS, POSITIONS), max_size=8).map(tuple),
    st.booleans(),
)


def tokens_of(spans: list[Span]) -> dict[str, int]:
    found: dict[str, int] = {}
    at = 0
    for name, end in spans:
        assert end > at, "spans are in order, and none is empty"
        found[name] = found.get(name, 0) + end - at
        at = end
    return found


@given(st.integers(1, 200), COUNTS, LIKENESSES, st.integers(0, 64))
def test_classes_sum_to_the_prompt_for_any_records(
    prompt_tokens: int, counts: dict[str, int], likeness: Likeness | None, block_tokens: int
) -> None:
    found = tokens_of(cache_spans(prompt_tokens, counts, likeness, block_tokens=block_tokens))
    assert sum(found.values()) == prompt_tokens
    assert set(found) <= set(CACHE_CLASSES)


def spans_of(likeness: Likeness | None, **counts: int) -> dict[str, int]:
    return tokens_of(cache_spans(sum(counts.values()), counts, likeness, block_tokens=16))


def test_classes_of_the_core_are_kept_and_the_rest_is_new() -> None:
    found = spans_of(None, hit=32, evicted=16, pending=16, unmatched=32, rule=16, rounding=5)
    assert found == {
        "hit": 32, "evicted": 16, "pending": 16, "new": 32, "rule": 16, "rounding": 5,
    }  # fmt: skip


def test_text_seen_before_is_changed_from_the_first_whole_block_that_differs() -> None:
    # Equal up to 37, seen again from 44 on.
    found = spans_of(Likeness(37, ((44, 200),)), hit=32, unmatched=128, rounding=8)
    assert found == {"hit": 32, "rounding": 5 + 8, "new": 7, "changed": 160 - 44}


def test_equal_blocks_of_another_salt_are_in_another_namespace() -> None:
    found = spans_of(Likeness(60, (), is_other_namespace=True), unmatched=64, rounding=4)
    assert found == {"namespace": 48, "rounding": 12 + 4, "new": 4}


def test_equal_blocks_that_the_cache_does_not_know_are_unknown_not_evicted() -> None:
    assert spans_of(Likeness(48), unmatched=64) == {"unknown": 48, "new": 16}


@st.composite
def priced_cases(draw: st.DrawFn) -> tuple[list[Span], list[Chunk], list[tuple[str, int]], int]:
    """Any division, parts, and chunks behind the hit."""
    prompt_tokens = draw(st.integers(1, 200))
    counts, likeness = draw(COUNTS), draw(LIKENESSES)
    counts["hit"] = draw(st.integers(0, prompt_tokens - 1))
    spans = cache_spans(prompt_tokens, counts, likeness, block_tokens=16)
    at, chunks = counts["hit"], []
    while at < prompt_tokens:
        tokens = draw(st.integers(1, prompt_tokens - at))
        times = st.integers(0, 10**12)
        chunks.append(Chunk(tokens, at, draw(times), draw(times), draw(st.floats(0, 1))))
        at += tokens
    names = st.sampled_from(["system", "history", "user"])
    parts = draw(st.lists(st.tuples(names, st.integers(1, 90)), max_size=6))
    return spans, chunks, parts, draw(st.integers(0, 10**12))


def by_name(segments: tuple[CacheSegment, ...]) -> dict[str, tuple[int, int]]:
    sums: dict[str, tuple[int, int]] = {}
    for each in segments:
        assert each.gpu_ns is not None
        tokens, gpu_ns = sums.get(each.name, (0, 0))
        sums[each.name] = tokens + each.tokens, gpu_ns + each.gpu_ns
    return sums


@given(priced_cases())
def test_prices_sum_to_the_prefill_and_to_the_ledger_row(
    case: tuple[list[Span], list[Chunk], list[tuple[str, int]], int],
) -> None:
    spans, chunks, parts, own_ns = case
    prefill_ns = sum(chunk.share_ns for chunk in chunks)
    segments = cache_segments(
        spans, chunks, declared=parts, prefill_ns=prefill_ns, ttft_own_ns=own_ns
    )
    sums = by_name(segments)
    assert {name: tokens for name, (tokens, _) in sums.items()} == tokens_of(spans)
    assert sum(gpu_ns for _, gpu_ns in sums.values()) == prefill_ns
    assert sums.get("hit", (0, 0))[1] == 0, "what came from the cache costs nothing"
    assert min(gpu_ns for _, gpu_ns in sums.values()) >= 0
    waits_ns = [each.ttft_ns for each in segments if each.ttft_ns is not None]
    if sum(chunk.own_ns for chunk in chunks):
        assert sum(waits_ns) == own_ns
    else:
        assert not any(waits_ns)
    # Classes cost the same whether parts are declared or not, up to the rounding of each piece.
    plain = cache_segments(spans, chunks, declared=(), prefill_ns=prefill_ns, ttft_own_ns=own_ns)
    for name, (_, gpu_ns) in by_name(plain).items():
        assert abs(gpu_ns - sums[name][1]) <= 2 * len(segments) + prefill_ns * 1e-12


def test_chunk_is_cut_at_the_border_of_classes() -> None:
    spans = [("hit", 32), ("evicted", 80), ("rounding", 100)]
    chunks = [Chunk(48, 32, 4_000, 40, 0.0), Chunk(20, 80, 2_000, 60, 0.0)]
    segments = cache_segments(spans, chunks, declared=(), prefill_ns=6_000, ttft_own_ns=200)
    assert [(each.name, each.tokens, each.gpu_ns, each.ttft_ns) for each in segments] == [
        ("hit", 32, 0, 0),
        ("evicted", 48, 4_000, 80),
        ("rounding", 20, 2_000, 120),
    ]


def test_prices_are_unknown_if_a_chunk_was_not_seen() -> None:
    spans = [("hit", 32), ("new", 100)]
    (hit, new) = cache_segments(spans, [], declared=(), prefill_ns=5_000, ttft_own_ns=10)
    assert (hit.gpu_ns, new.gpu_ns, new.ttft_ns, new.tokens) == (None, None, None, 68)
