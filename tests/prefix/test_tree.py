"""Laws of the tree of prefixes, against a dictionary of all their keys."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from inferscope.prefix.tree import PrefixTree


def keys_of(text: str) -> list[str]:
    return [text[:end] for end in range(1, len(text) + 1)]


def values_of(tree: PrefixTree, keys: list[str]) -> list[int]:
    """Return the value of each key of the prefix that is stored."""
    values: list[int] = []
    for end, value in tree.stretches(keys):
        values += [value] * (end - len(values))
    return values


texts = st.text("ab", max_size=12)


numbers = st.integers(0, 12)


@settings(max_examples=300)
@given(st.lists(st.tuples(texts, numbers, numbers), max_size=30))
def test_each_block_has_the_value_of_the_prefix_with_it_that_was_stored_last(
    prompts: list[tuple[str, int, int]],
) -> None:
    tree, values = PrefixTree(10_000), dict[str, int]()
    for now, (text, start, end) in enumerate(prompts, 1):
        keys = keys_of(text)
        tree.store(keys, end, now, start=start)
        values = dict.fromkeys(keys[: min(start, end)], 0) | values
        values |= dict.fromkeys(keys[start:end], now)
        for other, _, _ in prompts:
            known = [values[key] for key in keys_of(other) if key in values]
            assert values_of(tree, keys_of(other)) == known


@given(st.lists(texts, max_size=60), st.integers(2, 40))
def test_the_newest_half_is_held_and_never_more_than_all(prompts: list[str], most: int) -> None:
    tree, values = PrefixTree(most), dict[str, int]()
    for now, text in enumerate(prompts):
        keys = keys_of(text)[: most // 2]
        tree.store(keys, len(keys), now)
        for key in keys:
            values.pop(key, None)
        values |= dict.fromkeys(keys, now)
        assert len(tree) <= most
        # What is held has its true value; of the last prompts all is held.
        assert values_of(tree, keys) == [now] * len(keys)
        for other in prompts[:now]:
            found = values_of(tree, keys_of(other))
            expected = [values[key] for key in keys_of(other)[: len(found)]]
            assert found == expected


def test_a_long_prompt_is_held_up_to_the_bound() -> None:
    tree = PrefixTree(100)
    tree.store(range(10**6), 10**6, 7)
    assert tree.stretches(range(200)) == [(50, 7)]
    assert len(tree) == 50


def test_wide_use_stays_within_the_bound() -> None:
    key, tree = random.Random(3), PrefixTree(1000)
    for now in range(3000):
        start = key.randrange(10**6)
        tree.store(range(start, start + key.randrange(300)), 300, now)
        assert len(tree) <= 1000
