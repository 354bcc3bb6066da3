from __future__ import annotations

import random
from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferscope.fold.miss_ratio import LONGEST, SIZES, MissRatio, curve

BLOCK_TOKENS = 16
PROMPTS = st.lists(
    st.tuples(st.integers(0, 6), st.integers(1, 12), st.sampled_from(["a", "b"])), max_size=60
)


def digest(conversation: int, block: int) -> int:
    """Return a digest that is spread evenly over all 64-bit numbers."""
    return random.Random(conversation * 1000 + block).getrandbits(64)


def fold(
    prompts: list[tuple[int, int, str]],
    *,
    pool_blocks: int,
    rates: tuple[float, ...] = (1.0,),
    hit_tokens: int = 0,
) -> MissRatio:
    """Fold prompts of whole blocks (conversation, blocks, tenant); the rates follow each other."""
    ratio = MissRatio(pool_blocks)
    for at, (conversation, num, tenant) in enumerate(prompts):
        rate = rates[at * len(rates) // len(prompts)]
        digests = [digest(conversation, block) for block in range(num)]
        ratio.prompt(
            num * BLOCK_TOKENS + 1,
            [each for each in digests if each < rate * 2**64],
            num_blocks=num,
            block_tokens=BLOCK_TOKENS,
            rate=rate,
            tenant=tenant,
            hit_tokens=hit_tokens,
        )
    return ratio


def hits_of_lru(prompts: list[tuple[int, int, str]], size: int) -> int:
    """Return the blocks that an LRU cache of some blocks serves, one prompt at a time."""
    cached: OrderedDict[tuple[int, int], None] = OrderedDict()
    hits = 0
    for conversation, num, _ in prompts:
        blocks = [(conversation, block) for block in range(num)]
        hits += sum(block in cached for block in blocks)
        for block in reversed(blocks):
            cached.pop(block, None)
            cached[block] = None
        while len(cached) > size:
            cached.popitem(last=False)
    return hits


@given(PROMPTS, st.integers(1, 40))
def test_unsampled_curve_equals_an_lru_cache_of_each_size(
    prompts: list[tuple[int, int, str]], pool_blocks: int
) -> None:
    ratio = fold(prompts, pool_blocks=pool_blocks)
    sizes = [1.0, 2.0, 3.0, 5.0, 7.0]
    found = ratio.modelled_hit_tokens(sizes, None)
    assert found == pytest.approx(
        [hits_of_lru(prompts, int(size * pool_blocks)) * BLOCK_TOKENS for size in sizes]
    )


@given(PROMPTS, st.integers(1, 40), st.lists(st.floats(0.05, 1), min_size=1, max_size=3))
def test_curve_never_falls_with_the_size_and_tenants_sum_to_the_whole(
    prompts: list[tuple[int, int, str]], pool_blocks: int, rates: list[float]
) -> None:
    rates = sorted(rates, reverse=True)
    ratio = fold(prompts, pool_blocks=pool_blocks, rates=tuple(rates))
    found = curve([ratio], peak_blocks=0)
    assert (found is None) == (not prompts)
    if found is not None:
        ratios = [point.hit_share or 0.0 for point in found.points]
        assert ratios == sorted(ratios)
        assert 0 <= ratios[0] <= ratios[-1] <= 1
        assert found.prompt_tokens == sum(map(ratio.prompt_tokens, ratio.tenants))
        assert found.sampled == sum(map(ratio.num_sampled, ratio.tenants))


@pytest.mark.thorough
def test_sampled_curve_is_near_the_whole_one_also_after_the_rate_fell() -> None:
    draw = random.Random(5)
    prompts = [(int(draw.expovariate(1 / 300)), draw.randint(8, 40), "a") for _ in range(2000)]
    whole = fold(prompts, pool_blocks=4096)
    for rates in ((0.25,), (0.5, 0.25)):
        sampled = fold(prompts, pool_blocks=4096, rates=rates)
        tokens = whole.prompt_tokens(None)
        for size in (0.5, 1.0, 2.0, 4.0):
            want, got = (each.modelled_hit_tokens([size], None)[0] for each in (whole, sampled))
            assert got / tokens == pytest.approx(want / tokens, abs=0.02)


def test_sizes_below_the_peak_of_requests_in_flight_are_withheld_with_the_reason() -> None:
    ratio = fold([(1, 8, "a")] * 4, pool_blocks=100, hit_tokens=3 * 128 // 4)
    found = curve([ratio], peak_blocks=70)
    assert found is not None
    assert [point.size for point in found.points] == list(SIZES)
    half, whole = found.points[:2]
    assert (half.hit_share, whole.withheld) == (None, "")
    assert half.withheld == "requests held up to 70 blocks at once, more than 50"
    assert whole.hit_share == pytest.approx(3 * 128 / (4 * 129))


@pytest.mark.parametrize("hit_tokens", [0, 8, 96, 120])
def test_few_samples_without_a_capacity_miss_move_no_hits_that_the_engine_reports(
    hit_tokens: int,
) -> None:
    ratio = fold([(1, 8, "a")] * 4, pool_blocks=100, hit_tokens=hit_tokens)
    found = curve([ratio], peak_blocks=8)
    assert found is not None
    shares = [point.hit_share for point in found.points]
    assert shares == [pytest.approx(hit_tokens / 129)] * len(SIZES)


def test_no_more_blocks_are_kept_than_the_longest_curve_needs() -> None:
    ratio = fold([(number, 12, "a") for number in range(300)], pool_blocks=20)
    assert len(ratio._last) == len(ratio._times) == LONGEST * 20 + 1


def test_curve_meets_the_hits_that_the_engine_reports_at_its_own_size() -> None:
    draw = random.Random(3)
    prompts = [(int(draw.expovariate(1 / 30)), 20, "a") for _ in range(400)]
    (hits,) = fold(prompts, pool_blocks=256).modelled_hit_tokens([1.0], None)
    sampled = MissRatio(256)
    for conversation, num, _ in prompts:
        digests = [digest(conversation, block) for block in range(num)]
        sampled.prompt(
            321, [each for each in digests if each < 2**60], num_blocks=num, block_tokens=16,
            rate=1 / 16, tenant="a", hit_tokens=round(hits / 400) - 16, pending_tokens=16,
        )  # fmt: skip
    found = curve([sampled], peak_blocks=0)
    assert found is not None
    half, now, twice, _ = (point.hit_share or 0.0 for point in found.points)
    assert now == pytest.approx((round(hits / 400) - 16) / 321)
    assert half <= now <= twice <= 1 - 16 / 321
