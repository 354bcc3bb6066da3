from __future__ import annotations

import os
from itertools import pairwise

import pytest

from inferscope.prefix import BlockSampler
from inferscope.prefix.sampling import MOST_SAMPLED

KEY_BYTES = 32


def keys(num: int) -> bytes:
    return os.urandom(KEY_BYTES * num)


def digests(raw: bytes) -> list[int]:
    return memoryview(raw).cast("Q").tolist()


@pytest.mark.parametrize("num_blocks", [1, 1024, 5000, 40_000, 10**6, 10**9])
def test_the_rate_follows_from_the_pool_and_digests_lie_below_it(num_blocks: int) -> None:
    sampler = BlockSampler(num_blocks, most=10**9)
    rate = sampler.rate
    assert rate == pytest.approx(min(1.0, 1024 / num_blocks), rel=0.01, abs=2**-16)
    num = 20_000
    sample = sampler.sample(keys(num), num)
    found = digests(sample.digests)
    assert (sample.num_blocks, sample.rate) == (num, rate)
    assert all(digest < rate * 2**64 for digest in found)
    assert abs(len(found) - rate * num) < 6 * (rate * num) ** 0.5 + 1
    if rate == 1:  # evenly spread, so a reader may thin them by their value
        below = sum(digest < 2**62 for digest in found)
        assert below == pytest.approx(num / 4, rel=0.1)


def test_a_block_has_one_digest_wherever_it_stands() -> None:
    sampler = BlockSampler(100)
    raw = keys(40)
    whole = digests(sampler.sample(raw, 40).digests)
    assert len(set(whole)) == 40
    assert digests(sampler.sample(raw[: 10 * KEY_BYTES], 10).digests) == whole[:10]
    assert digests(sampler.sample(raw[10 * KEY_BYTES :], 30).digests) == whole[10:]


def test_a_long_prompt_lowers_the_rate_for_good_and_keeps_a_subset() -> None:
    sampler = BlockSampler(100)
    raw = keys(50)
    before = digests(sampler.sample(raw, 50).digests)
    long = sampler.sample(keys(2048), 2048)
    assert len(digests(long.digests)) <= MOST_SAMPLED
    assert long.rate < 1 / 16
    after = sampler.sample(raw, 50)
    assert after.rate == long.rate
    assert digests(after.digests) == [one for one in before if one < after.rate * 2**64]
    assert sampler.sample(b"", 0).digests == b""
    worst = BlockSampler(1, most=3).sample(bytes(KEY_BYTES) * 500, 500)
    assert len(worst.digests) <= 3 * 8


def test_the_rate_falls_to_one_at_which_the_prompt_fits_and_by_an_eighth_or_more() -> None:
    sampler = BlockSampler(1)
    fitting = sampler.sample(keys(2048), 2048)
    assert MOST_SAMPLED - 4 < len(digests(fitting.digests)) <= MOST_SAMPLED  # ranks may be equal
    rates = [fitting.rate]
    rates += [sampler.sample(keys(2048), 2048).rate for _ in range(200)]
    falls = [(old, new) for old, new in pairwise(rates) if new != old]
    assert falls
    assert all(new <= old * 7 / 8 + 2**-16 for old, new in falls)


def test_two_processes_share_no_digest() -> None:
    raw = keys(400)
    one, other = (BlockSampler(1, most=10**9).sample(raw, 400).digests for _ in range(2))
    assert not set(digests(one)) & set(digests(other))
