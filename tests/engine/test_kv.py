from __future__ import annotations

import copy
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferscope.engine.kv import ROOT, BlockPool, Chain

WIDTH = 2


def publish_all(
    pool: BlockPool, blocks: list[int], tokens: list[int], *, root: Chain = ROOT
) -> None:
    chain = root
    for idx, block in enumerate(blocks):
        chain = pool.publish(
            block, chain=chain, tokens=tuple(tokens[idx * WIDTH : (idx + 1) * WIDTH])
        )


def hold(pool: BlockPool, tokens: list[int]) -> list[int]:
    """Acquire the cached prefix, allocate the remaining blocks and publish all of them."""
    match = pool.match(tokens, max_blocks=len(tokens) // WIDTH)
    pool.acquire(match.blocks)
    blocks = match.blocks + pool.allocate(len(tokens) // WIDTH - len(match.blocks))
    publish_all(pool, blocks, tokens)
    return blocks


def test_fresh_pool_hands_out_consecutive_blocks() -> None:
    assert BlockPool(8, block_tokens=16).allocate(3) == [0, 1, 2]


def test_published_prefix_is_found_while_held_and_after() -> None:
    pool = BlockPool(8, block_tokens=WIDTH)
    blocks = hold(pool, [1, 2, 3, 4])
    assert pool.match([1, 2, 3, 4, 5], max_blocks=2).blocks == blocks
    assert pool.match([1, 2, 3, 4, 5], max_blocks=2).num_cached == 0
    pool.release(blocks)
    match = pool.match([1, 2, 3, 4, 5], max_blocks=2)
    assert (match.blocks, match.num_cached) == (blocks, 2)


def test_block_is_not_found_behind_another_prefix() -> None:
    pool = BlockPool(8, block_tokens=WIDTH)
    hold(pool, [1, 2, 3, 4])
    assert pool.match([9, 9, 3, 4], max_blocks=2).blocks == []
    assert pool.match([3, 4], max_blocks=1).blocks == []


def test_equal_block_computed_twice_is_published_once() -> None:
    pool = BlockPool(8, block_tokens=WIDTH)
    first, second = pool.allocate(1), pool.allocate(1)
    chains = [pool.publish(block, chain=ROOT, tokens=(1, 2)) for block in (first[0], second[0])]
    assert chains[0] == chains[1]
    pool.release(first)
    pool.release(second)
    assert pool.num_cached == 1
    assert pool.match([1, 2], max_blocks=1).blocks == first


def test_least_recently_used_block_goes_first_and_tails_before_heads() -> None:
    pool = BlockPool(4, block_tokens=WIDTH)
    old, young = hold(pool, [1, 1, 2, 2]), hold(pool, [3, 3, 4, 4])
    pool.release(old)
    pool.release(young)
    pool.acquire(old)
    pool.release(old)
    assert pool.allocate(1) == [young[1]]
    assert pool.match([3, 3, 4, 4], max_blocks=2).blocks == young[:1]
    assert pool.allocate(3) == [young[0], old[1], old[0]]
    assert pool.match([1, 1], max_blocks=1).blocks == []


def test_releasing_twice_is_caught() -> None:
    pool = BlockPool(2, block_tokens=WIDTH)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="more often than held"):
        pool.release(blocks)


PROMPT = st.lists(st.integers(0, 1), min_size=WIDTH, max_size=4 * WIDTH)


@given(
    num_blocks=st.integers(4, 12),
    moves=st.lists(st.one_of(PROMPT, st.integers(0, 9)), max_size=40),
)
def test_pool_agrees_with_a_model_of_it(num_blocks: int, moves: list[list[int] | int]) -> None:
    """Each list is a prompt to hold; each number is the index of held blocks to release."""
    pool = BlockPool(num_blocks, block_tokens=WIDTH)
    holdings: list[tuple[list[int], list[int]]] = []
    for move in moves:
        if isinstance(move, int):
            if holdings:
                pool.release(holdings.pop(move % len(holdings))[1])
        else:
            match = pool.match(move, max_blocks=len(move) // WIDTH)
            fresh = len(move) // WIDTH - len(match.blocks)
            if fresh + match.num_cached <= pool.num_available:
                holdings.append((move, hold(pool, move)))

        counts = [0] * num_blocks
        content: dict[int, tuple[int, ...]] = {}
        for tokens, blocks in holdings:
            assert len(set(blocks)) == len(blocks)
            for idx, block in enumerate(blocks):
                counts[block] += 1
                prefix = tuple(tokens[: (idx + 1) * WIDTH])
                # Sharing a block means sharing every token up to its end.
                assert content.setdefault(block, prefix) == prefix
        assert counts == [pool.references(block) for block in range(num_blocks)]
        assert pool.num_used == sum(count > 0 for count in counts)
        assert pool.num_available + pool.num_used == num_blocks
        assert pool.num_cached <= pool.num_available
    for _, blocks in holdings:
        pool.release(blocks)
    assert pool.num_used == 0
    assert sorted(pool.allocate(num_blocks)) == list(range(num_blocks))


@given(
    num_blocks=st.integers(4, 12),
    sought=PROMPT,
    moves=st.lists(st.one_of(PROMPT, st.integers(0, 9)), max_size=40),
)
def test_current_match_is_what_a_new_search_finds(
    num_blocks: int, sought: list[int], moves: list[list[int] | int]
) -> None:
    """Each list is a prompt to hold; each number is the index of held blocks to release."""
    pool = BlockPool(num_blocks, block_tokens=WIDTH)
    match = pool.match(sought, max_blocks=len(sought) // WIDTH)
    holdings: list[list[int]] = []
    for move in moves:
        if isinstance(move, int):
            if holdings:
                pool.release(holdings.pop(move % len(holdings)))
        else:
            # Search in a copy: a search in the pool itself would replace its latest match.
            blocks = copy.deepcopy(pool).match(move, max_blocks=len(move) // WIDTH).blocks
            pool.acquire(blocks)
            blocks += pool.allocate(min(len(move) // WIDTH - len(blocks), pool.num_available))
            publish_all(pool, blocks, move)
            holdings.append(blocks)
        if pool.is_current(match):
            assert match == copy.deepcopy(pool).match(sought, max_blocks=len(sought) // WIDTH)
        else:
            match = pool.match(sought, max_blocks=len(sought) // WIDTH)
            assert pool.is_current(match)


def test_a_salt_shares_blocks_with_itself_alone() -> None:
    pool = BlockPool(12, block_tokens=WIDTH)
    held: dict[Chain, list[int]] = {}
    for root in (ROOT, "a", "b"):
        held[root] = pool.allocate(2)
        publish_all(pool, held[root], [1, 2, 3, 4], root=root)
    for root, blocks in held.items():
        assert pool.match([1, 2, 3, 4], max_blocks=2, root=root).blocks == blocks
    assert pool.match([1, 2, 3, 4], max_blocks=2, root="c").blocks == []
    pool.release(held["a"])
    assert pool.num_cached == 2
    pool.release(pool.allocate(pool.num_available))  # evicts those of "a"
    assert pool.match([1, 2], max_blocks=1, root="a").blocks == []
    assert pool.match([1, 2], max_blocks=1, root="b").blocks == held["b"][:1]


@given(order=st.permutations(range(6)))
def test_blocks_are_evicted_in_the_order_of_their_release(order: list[int]) -> None:
    pool = BlockPool(6, block_tokens=WIDTH)
    holdings = [hold(pool, [idx, idx]) for idx in range(6)]
    for idx in order:
        pool.release(holdings[idx])
    assert pool.allocate(6) == [holdings[idx][0] for idx in order]


def test_cost_of_an_operation_does_not_grow_with_the_pool() -> None:
    def churn_ns(num_blocks: int) -> int:
        pool = BlockPool(num_blocks, block_tokens=WIDTH)
        for idx in range(num_blocks):
            block = pool.allocate(1)
            pool.publish(block[0], chain=ROOT, tokens=(idx, idx))
            pool.release(block)
        best_ns = 1 << 62
        for _ in range(5):
            start_ns = time.monotonic_ns()
            for idx in range(500):
                held = pool.allocate(1)
                pool.publish(held[0], chain=ROOT, tokens=(-idx, start_ns))
                pool.release(held)
            best_ns = min(best_ns, time.monotonic_ns() - start_ns)
        return best_ns

    assert churn_ns(50_000) < 10 * churn_ns(50)
