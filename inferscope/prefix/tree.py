"""Tree of the newest prefixes, each with the time it was stored last, in bounded memory.

The keys of a prompt stand for all blocks before them too. A node holds the keys of a run of blocks,
and a lookup compares a run by its last key that both have. A prompt of 1,000 blocks is stored in
microseconds; a dictionary of its keys takes a fifth of a millisecond.

    system prompt ──┬── question 1          each node: its keys, and the time at which a prefix
                    └── question 2          through it was stored last
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Sequence
from typing import TypeAlias

import msgspec

Runs: TypeAlias = "list[tuple[int, int]]"
"""Runs of blocks in order: the number of the block at which each ends, and its time."""


# Unknown to the garbage collector, which would visit ten thousands of them; there is no cycle.
class _Node(msgspec.Struct, eq=False, gc=False):
    """A run of blocks; where prompts part, it is replaced by two."""

    keys: tuple[Hashable, ...]
    at_ns: int
    next_by_key: dict[Hashable, _Node]
    """Runs behind it, by their first key."""


class PrefixTree:
    """Prefixes that were stored, and when.

    Prefixes are stored in the young tree. Once half of the capacity cannot hold one more it becomes
    the old one, which is dropped whole.
    """

    def __init__(self, capacity: int) -> None:
        """Hold at most `capacity` keys."""
        self._half = max(1, capacity // 2)
        self._young: dict[Hashable, _Node] = {}
        self._old: dict[Hashable, _Node] = {}
        self._num_young = self._num_old = 0

    def __len__(self) -> int:
        return self._num_young + self._num_old

    def store(self, keys: Sequence[Hashable], end: int, at_ns: int) -> None:
        """Store a prefix.

        Args:
            keys: key of each block of a prompt, from the first one on.
            end: number of the blocks of the prefix.
            at_ns: time.
        """
        nodes, at, end = self._young, 0, min(end, len(keys), self._half)
        while at < end:
            node = nodes.get(keys[at])
            num = 0 if node is None else _num_common(node, keys, at, end)
            is_last = node is None or (num == len(node.keys) < end - at and not node.next_by_key)
            if is_last and self._num_young + end - at - num > self._half:
                self._old, self._num_old = self._young, self._num_young
                self._young, self._num_young = {}, 0
                self.store(keys, end, at_ns)
                return
            # Another thread may be reading: each change is one assignment.
            if is_last or node is None:  # a prompt that goes on where another ended extends its run
                nodes[keys[at]] = _Node(tuple(keys[at:end]), at_ns, {})
                self._num_young += end - at - num
                return
            if num < len(node.keys):
                rest = _Node(node.keys[num:], node.at_ns, node.next_by_key)
                nodes[keys[at]] = node = _Node(node.keys[:num], at_ns, {rest.keys[0]: rest})
            node.at_ns = at_ns
            nodes, at = node.next_by_key, at + num

    def runs(self, keys: Sequence[Hashable]) -> Runs:
        """Return the runs of a prompt's longest prefix that is stored."""
        young, old = _path(self._young, keys), _path(self._old, keys)
        end = young[-1][0] if young else 0
        return young + [run for run in old if run[0] > end]


def time_at(runs: Runs, number: int) -> int | None:
    """Return the time of a block, None if it is in no run."""
    at = bisect_right(runs, number, key=lambda run: run[0])
    return runs[at][1] if at < len(runs) else None


def _path(nodes: dict[Hashable, _Node], keys: Sequence[Hashable]) -> Runs:
    path, at = [], 0
    while at < len(keys) and (node := nodes.get(keys[at])) is not None:
        num = _num_common(node, keys, at, len(keys))
        at += num
        path.append((at, node.at_ns))
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
