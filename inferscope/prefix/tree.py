"""Tree of the newest prefixes, each with a number such as a time, in bounded memory.

The keys of a prompt stand for all blocks before them too. A node holds the keys of a run of blocks,
and a lookup compares a run by its last key that both have. A prompt of 1,000 blocks is stored in
microseconds; a dictionary of its keys takes a fifth of a millisecond.

    system prompt ──┬── question 1          each node: its keys, and the value of the prefix
                    └── question 2          through it that was stored last
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Sequence
from typing import TypeAlias

import msgspec

Stretches: TypeAlias = "list[tuple[int, int]]"
"""Stretches of blocks in order: the number of the block at which each ends, and its value."""


class _Node(msgspec.Struct, eq=False):
    """A run of blocks; where prompts part, it is replaced by two."""

    keys: Sequence[Hashable]
    value: int
    next_by_key: dict[Hashable, _Node]
    """Runs behind it, by their first key."""


class PrefixTree:
    """Prefixes that were stored, each block with the value of the last one that had it.

    Prefixes are stored in the young tree. Once half of the capacity cannot hold one more it becomes
    the old one, which is dropped whole: forgetting costs nothing.
    """

    def __init__(self, capacity: int) -> None:
        """Hold at most `capacity` keys."""
        self._half = max(1, capacity // 2)
        self._young: dict[Hashable, _Node] = {}
        self._old: dict[Hashable, _Node] = {}
        self._num_young = self._num_old = 0

    def __len__(self) -> int:
        return self._num_young + self._num_old

    def store(self, keys: Sequence[Hashable], end: int, value: int, *, start: int = 0) -> None:
        """Store a prefix.

        Args:
            keys: key of each block of a prompt, from the first one on.
            end: number of the blocks of the prefix.
            value: its value, not 0.
            start: number of its first blocks that keep their value; it is 0 if they have none.
        """
        nodes, at, end = self._young, 0, min(end, len(keys), self._half)
        while at < end:
            is_kept = at < start
            stop = min(start, end) if is_kept else end
            node = nodes.get(keys[at])
            if node is None:
                if self._num_young + end - at > self._half:
                    self.turn()
                    self.store(keys, end, value, start=start)
                    return
                node = nodes[keys[at]] = _Node(keys[at:stop], 0 if is_kept else value, {})
                self._num_young += stop - at
            num = _num_common(node, keys, at, stop)
            if num < len(node.keys):
                rest = _Node(node.keys[num:], node.value, node.next_by_key)
                # In one assignment: another thread may be reading.
                node = _Node(node.keys[:num], node.value, {rest.keys[0]: rest})
                nodes[keys[at]] = node
            if not is_kept:
                node.value = value
            nodes, at = node.next_by_key, at + num

    def stretches(self, keys: Sequence[Hashable]) -> Stretches:
        """Return the stretches of a prompt's longest prefix that is stored."""
        young, old = _path(self._young, keys), _path(self._old, keys)
        end = young[-1][0] if young else 0
        return young + [stretch for stretch in old if stretch[0] > end]

    def turn(self) -> None:
        """Drop the old tree; the young one becomes old."""
        self._old, self._num_old = self._young, self._num_young
        self._young, self._num_young = {}, 0


def value_at(stretches: Stretches, number: int) -> int | None:
    """Return the value of a block, None if it is in no stretch."""
    return next((value for end, value in stretches if number < end), None)


def _path(nodes: dict[Hashable, _Node], keys: Sequence[Hashable]) -> Stretches:
    path, at = [], 0
    while at < len(keys) and (node := nodes.get(keys[at])) is not None:
        num = _num_common(node, keys, at, len(keys))
        at += num
        path.append((at, node.value))
        if num < len(node.keys):
            break
        nodes = node.next_by_key
    return path


def _num_common(node: _Node, keys: Sequence[Hashable], at: int, end: int) -> int:
    """Return how many keys of a run a prompt has up to `end`; the first is equal."""
    run = node.keys
    most = min(len(run), end - at)
    if run[most - 1] == keys[at + most - 1]:
        return most
    return bisect_left(range(most), True, key=lambda number: run[number] != keys[at + number])
