"""Laws of the division of a prompt's tokens, against a cache that is simulated block by block."""

from __future__ import annotations

import random
import sys
from collections import OrderedDict
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferscope.prefix import BlockHistory, Outcome, block_keys
from inferscope.prefix.generations import Generations
from inferscope.prefix.lookups import MOST_EVICTORS
from inferscope.records import LOOKUP_CLASSES

WIDTH = 4


def total(outcome: Outcome) -> int:
    return sum(getattr(outcome, name) for name in LOOKUP_CLASSES)


def classes(outcome: Outcome) -> dict[str, int]:
    return {name: num for name in LOOKUP_CLASSES if (num := getattr(outcome, name))}


def history(**options: int) -> BlockHistory:
    return BlockHistory(WIDTH, now=count(1).__next__, **options)  # type: ignore[arg-type]


def test_lost_pending_and_unmatched_blocks_are_told_apart() -> None:  # words: ok
    seen = history()
    keys = list("abcdef")
    seen.make_room_for(9)
    seen.evicted_blocks(["c"])
    seen.evicted_blocks(["b"])
    outcome = seen.account(27, 4, keys, pending=[(5, list("abcd"))])
    assert classes(outcome) == {
        "hit": 4, "evicted": 8, "pending": 4, "unmatched": 8, "rounding": 3
    }  # fmt: skip
    assert (outcome.evictor, outcome.twin) == (9, 5)


def test_each_allocation_has_its_own_time() -> None:
    seen = history()
    seen.make_room_for(1)
    seen.evicted_blocks(["a"])
    seen.make_room_for(1)
    seen.evicted_blocks(["b"])
    assert seen.account(9, 4, ["x", "b"]).evicted_ns == 2
    assert seen.account(9, 0, ["a", "b"]).evicted_ns == 1


def test_room_for_several_lists_them_and_is_inferred() -> None:
    seen = history()
    seen.make_room_for(1, *range(2, 12))
    seen.evicted_blocks(["a"])
    seen.make_room_for(20)
    seen.evicted_blocks(["b"])
    several, one = seen.account(9, 0, ["a", "b"]), seen.account(9, 4, ["a", "b"])
    assert (several.evictor, several.num_evictors, several.is_inferred) == (1, 11, True)
    assert several.evictors == tuple(range(1, 1 + MOST_EVICTORS))
    assert (one.evictor, one.num_evictors, one.is_inferred) == (20, 0, False)


def test_an_evicted_block_that_came_back_before_a_reset_is_cleared() -> None:
    seen = history(is_inferring=True)
    seen.remember(["a", "b"])
    seen.make_room_for(3)
    seen.evicted_blocks(["b"])
    seen.evicted_blocks(["a"])
    assert classes(seen.account(9, 0, ["a", "b"])) == {"evicted": 8, "rounding": 1}
    seen.remember(["a", "b"])
    seen.cleared()
    assert classes(seen.account(9, 0, ["a", "b"])) == {"cleared": 8, "rounding": 1}


def test_blocks_of_a_reset_cache_are_cleared() -> None:
    seen = history()
    seen.evicted_blocks(["c"])
    seen.cleared(["a", "b"])
    outcome = seen.account(13, 0, list("abc"))
    assert classes(outcome) == {"cleared": 8, "evicted": 4, "rounding": 1}
    assert outcome.evicted_ns == 1  # that of the eviction
    assert seen.account(9, 0, list("ab")).evicted_ns == 2


def test_blocks_of_a_reset_stay_cleared_however_many_were_evicted_since() -> None:
    seen = history()
    seen.cleared(["a", "b"])
    for index in range(20_000):  # the circumstances of the reset are forgotten, its blocks are not
        seen.make_room_for(index)
        seen.evicted_blocks([index])
    assert classes(seen.account(9, 0, ["a", "b"])) == {"cleared": 8, "rounding": 1}


def test_losses_before_a_reset_differ_from_those_since() -> None:
    seen = history()
    keys = list("abcdef")
    seen.make_room_for(1)
    seen.evicted_blocks(["f", "e"])
    seen.cleared(list("abcd"))
    seen.make_room_for(2)
    seen.evicted_blocks(["b", "a"])  # cached again before
    outcome = seen.account(7 * WIDTH, 0, keys)
    assert classes(outcome) == {"evicted": 4 * WIDTH, "cleared": 2 * WIDTH, "rule": WIDTH}
    assert outcome.evictor == 2


def test_pages_of_one_token_leave_no_rounding() -> None:
    seen = history(page_tokens=1)
    seen.evicted_blocks(["b"])
    assert classes(seen.account(10, 5, ["a", "b"])) == {
        "hit": 5,
        "evicted": 3,
        "unmatched": 1,
        "rule": 1,
    }
    assert classes(seen.account(10, 9, ["a", "b"])) == {"hit": 9, "rule": 1}
    assert classes(seen.account(3, 0, [])) == {"unmatched": 2, "rule": 1}
    assert classes(seen.account(8, 0, ["b", "b"])) == {"evicted": 7, "rule": 1}
    waiting = seen.account(8, 5, ["a", "a"], pending=[(3, ["a", "a"])])
    assert classes(waiting) == {"hit": 5, "pending": 2, "rule": 1}


def test_more_hits_than_the_rule_allows_are_believed() -> None:
    assert classes(history().account(8, 8, ["a", "b"])) == {"hit": 8}
    assert classes(history().account(8, 99, ["a", "b"])) == {"hit": 8}
    assert classes(history().account(0, 0, [])) == {}


def test_an_inferred_eviction_lists_whoever_made_room_since() -> None:  # words: ok
    seen = history(page_tokens=1, is_inferring=True)
    seen.remember(["a", "b", "c"])
    for index, tokens in ((7, 10), (8, 50), (7, 10)):
        seen.make_room_for(index)
        seen.evicted_tokens(tokens)
    outcome = seen.account(12, 4, ["a", "b", "c"])
    assert classes(outcome) == {"hit": 4, "evicted": 7, "rule": 1}
    assert (outcome.evictor, outcome.evictors, outcome.num_evictors) == (8, (8, 7), 2)
    assert outcome.is_inferred
    seen.remember(["a", "b", "c"])
    seen.cleared()
    assert classes(seen.account(12, 0, ["a", "b", "c"])) == {"cleared": 11, "rule": 1}
    for index in range(2 * MOST_EVICTORS):
        seen.remember(["x"])
        seen.make_room_for(index)
    assert classes(seen.account(9, 0, ["y", "z"])) == {"unmatched": 8, "rule": 1}


def test_requests_of_a_batch_share_the_room_that_is_made_for_it() -> None:
    seen = history(page_tokens=1, is_inferring=True)
    seen.remember(["a", "b", "c"])
    for evictors in ((7, 8), (7, 8), (9,), (7, 8)):
        seen.evicted_tokens(5, evictors)
    assert seen.num_rounds == 3
    outcome = seen.account(12, 0, ["a", "b", "c"])
    assert (outcome.evictors, outcome.num_evictors) == ((7, 8, 9), 3)


def test_the_evictor_is_unknown_once_evictions_since_then_are_forgotten() -> None:
    seen = history(page_tokens=1, is_inferring=True)
    seen.remember(["a", "b", "c"])
    seen.evicted_tokens(12, (1,))  # the true one
    for batch in range(100):
        seen.remember([batch])
        seen.evicted_tokens(5, tuple(range(64 * batch + 2, 64 * batch + 66)))
    assert seen.num_rounds == 64
    outcome = seen.account(12, 0, ["a", "b", "c"])
    assert classes(outcome) == {"evicted": 11, "rule": 1}
    assert (outcome.evictor, outcome.evictors, outcome.num_evictors) == (-1, (), 0)
    assert outcome.evicted_ns is None
    assert seen.account(5, 0, [99]).evictors == tuple(range(6338, 6346))


class Cache:
    """A cache of blocks with LRU eviction, tail first, and the truth about each of its blocks."""

    def __init__(self, size: int, seen: BlockHistory) -> None:
        self.size = size
        self.seen = seen
        self.blocks: OrderedDict[int, None] = OrderedDict()
        self.evictor: dict[int, int] = {}

    def serve(self, index: int, keys: list[int], num_tokens: int) -> Outcome:
        most = max(0, num_tokens - 1) // WIDTH
        num_hit = next((at for at in range(most) if keys[at] not in self.blocks), most)
        self.seen.make_room_for(index)
        for key in reversed(keys):
            self.blocks[key] = None
            self.blocks.move_to_end(key)
        while len(self.blocks) > self.size:
            evicted, _ = self.blocks.popitem(last=False)
            self.evictor[evicted] = index
            self.seen.evicted_blocks([evicted])
        return self.seen.account(num_tokens, num_hit * WIDTH, keys)


@settings(max_examples=100)
@given(st.integers(0, 2**32), st.integers(14, 40))  # the longest prompt has 13 blocks
def test_classes_sum_and_every_eviction_is_named_with_its_evictor(seed: int, size: int) -> None:
    key = random.Random(seed)
    cache = Cache(size, BlockHistory(WIDTH))
    stems = [key.randbytes(key.randrange(40)) for _ in range(4)]
    known: set[int] = set()
    for index in range(30):
        raw = key.choice(stems) + key.randbytes(key.randrange(3)) * key.randrange(6)
        keys = block_keys(raw, WIDTH)
        evictors = dict(cache.evictor)
        outcome = cache.serve(index, keys, len(raw))
        assert total(outcome) == len(raw)
        lost = []
        for each in keys[outcome.hit // WIDTH : max(0, len(raw) - 1) // WIDTH]:
            if each not in known:
                break
            lost.append(each)
        assert outcome.evicted == WIDTH * len(lost)
        assert outcome.evictor == (evictors[lost[0]] if lost else -1)
        known.update(keys)


def test_no_eviction_is_named_in_a_cache_that_was_never_full() -> None:
    key = random.Random(1)
    cache = Cache(10_000, history())
    for index in range(200):
        raw = key.randbytes(key.randrange(4)) * key.randrange(1, 40)
        assert not cache.serve(index, block_keys(raw, WIDTH), len(raw)).evicted


@pytest.mark.parametrize("capacity", [1, 2, 7, 100])
def test_generations_hold_the_newest_half_and_never_more_than_all(capacity: int) -> None:
    held: Generations[int, int] = Generations(capacity)
    for number in range(1000):
        held.put(number, number + 1)
        assert len(held) <= max(2, capacity)
        for newest in range(max(0, number - capacity // 2 + 2), number + 1):
            assert held.get(newest) == newest + 1
    held.clear()
    assert (len(held), held.get(999)) == (0, None)


def test_wide_input_stays_within_the_bounds() -> None:
    seen = BlockHistory(WIDTH, most_ghosts=1000, is_inferring=True, most_seen=1000)
    for index in range(5000):
        seen.make_room_for(index)
        seen.evicted_blocks([index])
        seen.evicted_tokens(1)
        seen.remember(range(index * 100, index * 100 + 100))
    seen.remember(range(10**6))
    seen.cleared(range(10**6))
    assert seen.num_ghosts <= 1000
    assert seen.num_seen <= 1000
    assert seen.num_rounds <= 4096
    assert sys.getsizeof(seen) < 1000
