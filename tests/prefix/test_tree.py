"""Laws of the tree of prefixes, against a dictionary of all their keys."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from inferscope.prefix.tree import PrefixTree, time_at


def keys_of(text: str) -> list[str]:
    return [text[:end] for end in range(1, len(text) + 1)]


def times_of(tree: PrefixTree, keys: list[str]) -> list[int]:
    """Return the time of each key of the prefix that is stored."""
    times: list[int] = []
    for end, at_ns in tree.runs(keys):
        times += [at_ns] * (end - len(times))
    return times


texts = st.text("ab", max_size=12)


numbers = st.integers(0, 12)


@settings(max_examples=300)
@given(st.lists(st.tuples(texts, numbers), max_size=30))
def test_each_block_has_the_time_at_which_a_prefix_with_it_was_stored_last(
    prompts: list[tuple[str, int]],
) -> None:
    tree, times = PrefixTree(10_000), dict[str, int]()
    for now, (text, end) in enumerate(prompts):
        keys = keys_of(text)
        tree.store(keys, end, now)
        times |= dict.fromkeys(keys[:end], now)
        for other, _ in prompts:
            known = [times[key] for key in keys_of(other) if key in times]
            assert times_of(tree, keys_of(other)) == known


@given(st.lists(texts, max_size=60), st.integers(2, 40))
def test_the_newest_half_is_held_and_never_more_than_all(prompts: list[str], most: int) -> None:
    tree, times = PrefixTree(most), dict[str, int]()
    for now, text in enumerate(prompts):
        keys = keys_of(text)[: most // 2]
        tree.store(keys, len(keys), now)
        for key in keys:
            times.pop(key, None)
        times |= dict.fromkeys(keys, now)
        assert len(tree) <= most
        # What is held has its true time; of the last prompts all is held.
        assert times_of(tree, keys) == [now] * len(keys)
        for other in prompts[:now]:
            found = times_of(tree, keys_of(other))
            expected = [times[key] for key in keys_of(other)[: len(found)]]
            assert found == expected


def test_a_long_prompt_is_held_up_to_the_bound() -> None:
    tree = PrefixTree(100)
    tree.store(range(10**6), 10**6, 7)
    assert tree.runs(range(200)) == [(50, 7)]
    assert len(tree) == 50


def test_wide_use_stays_within_the_bound() -> None:
    key, tree = random.Random(3), PrefixTree(1000)
    for now in range(3000):
        start = key.randrange(10**6)
        tree.store(range(start, start + key.randrange(300)), 300, now)
        assert len(tree) <= 1000


def test_a_conversation_is_one_run_however_often_it_goes_on() -> None:
    tree = PrefixTree(100_000)
    for end in range(1, 2000):
        tree.store(range(2000), end, end)
    assert tree.runs(range(2000)) == [(1999, 1999)]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=20), st.integers(0, 200))
def test_the_time_of_a_block_is_that_of_its_run(lengths: list[int], number: int) -> None:
    ends = [sum(lengths[: at + 1]) for at in range(len(lengths))]
    runs = [(end, 1000 + at) for at, end in enumerate(ends)]
    of_blocks = [1000 + at for at, num in enumerate(lengths) for _ in range(num)]
    assert time_at(runs, number) == (of_blocks[number] if number < len(of_blocks) else None)
