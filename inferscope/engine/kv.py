"""Accounting of KV blocks: free, shared, and cached as a prefix.

A block is in one of three states:

    free ──allocate──> owned (references > 0) ──release──> free, or cached if published
                          ^                                   │
                          └────────────acquire────────────────┘   (cached: evicted oldest first)

A published block is looked up by (chain, its tokens); the chain is the serial number of the
published block before it. A salt is the chain of a prompt's first block, which keeps its blocks
apart from those of other salts. The lookup compares salt and tokens themselves, so two prompts
share a block only if everything before it is equal too. A hash collision, accidental or crafted,
cannot give a request the keys of another. Every operation is O(1) per block.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol, TypeAlias

import msgspec

Chain: TypeAlias = "int | str"
ROOT = 0
"""Chain of the first block of a prompt without a salt."""

_Key: TypeAlias = "tuple[Chain, tuple[int, ...]]"


class Match(msgspec.Struct, frozen=True, gc=False):
    """Longest published prefix of a prompt."""

    blocks: list[int]
    chain: Chain
    num_cached: int
    """Number of the blocks that no request holds; acquiring them reduces `num_available`."""


NO_MATCH = Match(blocks=[], chain=ROOT, num_cached=0)


class PoolObserver(Protocol):
    """Interface of an observer of what a pool evicts (`forensics.py`)."""

    def make_room_for(self, index: int) -> None:
        """Note the request whose allocation begins."""

    def evicted(self, blocks: Sequence[int]) -> None:
        """Note that published blocks were evicted."""


class BlockPool:
    """Block accounting of a paged KV cache; `attention.py` holds the tensors.

    Attributes:
        observer: observer of evicted blocks; None for none.
    """

    def __init__(self, num_blocks: int, *, block_tokens: int) -> None:
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self._references = [0] * num_blocks
        # A stack with the lowest block on top: an unused pool allocates consecutive blocks, which
        # attention reads in place instead of gathering.
        self._free = list(range(num_blocks - 1, -1, -1))
        # Not a dict: finding the oldest key of a dict scans every key deleted before it.
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._published: dict[_Key, tuple[int, int]] = {}
        self._key_by_block: list[_Key | None] = [None] * num_blocks
        self._serials = itertools.count(ROOT + 1)
        self._latest: Match | None = None
        """Latest match; None once a new search could find another one."""
        self._latest_blocks: frozenset[int] = frozenset()
        self.observer: PoolObserver | None = None
        self._latest_next: _Key | None = None
        """Key whose publication would extend the latest match; None if it cannot be extended."""

    @property
    def num_available(self) -> int:
        """Number of blocks that `allocate` can return now, cached blocks included."""
        return len(self._free) + len(self._cached)

    @property
    def num_used(self) -> int:
        """Number of blocks that requests hold."""
        return self.num_blocks - self.num_available

    @property
    def num_cached(self) -> int:
        """Number of published blocks that no request holds."""
        return len(self._cached)

    def references(self, block: int) -> int:
        """Return the number of requests that hold a block."""
        return self._references[block]

    def blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks for `num_tokens` tokens."""
        return -(-num_tokens // self.block_tokens)

    def allocate(self, num: int, *, index: int = -1) -> list[int]:
        """Allocate blocks with one reference each: free blocks, then the least recently used.

        The observer learns the index of the request that they are for.
        """
        assert num <= self.num_available, "allocate() beyond num_available"
        if self.observer is not None:
            self.observer.make_room_for(index)
        num_free = min(num, len(self._free))
        blocks = [self._free.pop() for _ in range(num_free)]
        if num > num_free:
            evicted = [self._evict() for _ in range(num - num_free)]
            if self.observer is not None:
                self.observer.evicted(evicted)
            blocks += evicted
        for block in blocks:
            self._references[block] = 1
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """Release one reference of each block of a request, given in the order of its tokens."""
        # Tail first: the tail becomes the oldest, so a prefix is evicted from its end.
        for block in reversed(blocks):
            assert self._references[block] > 0, "a block is released more often than held"
            self._references[block] -= 1
            if self._references[block]:
                continue
            self._note_change(block)
            if self._key_by_block[block] is None:
                self._free.append(block)
            else:
                self._cached[block] = None

    def match(self, tokens: Sequence[int], *, max_blocks: int, root: Chain = ROOT) -> Match:
        """Return the longest published prefix under a root without acquiring its blocks."""
        width = self.block_tokens
        blocks: list[int] = []
        chain = root
        num_cached = 0
        self._latest_next = None
        for start in range(0, min(max_blocks, len(tokens) // width) * width, width):
            key = (chain, tuple(tokens[start : start + width]))
            found = self._published.get(key)
            if found is None:
                self._latest_next = key
                break
            block, chain = found
            blocks.append(block)
            num_cached += self._references[block] == 0
        self._latest = Match(blocks=blocks, chain=chain, num_cached=num_cached)
        self._latest_blocks = frozenset(blocks)
        return self._latest

    def is_current(self, match: Match) -> bool:
        """Return whether `match` is the latest and a new search would return the same; O(1)."""
        return match is self._latest

    def acquire(self, blocks: Sequence[int]) -> None:
        """Add one reference to each block of a match."""
        for block in blocks:
            if self._references[block] == 0:
                self._note_change(block)
                del self._cached[block]
            self._references[block] += 1

    def publish(self, block: int, *, chain: Chain, tokens: tuple[int, ...]) -> int:
        """Publish a full block and return the chain of the block after it.

        If an equal block is already published, that one stays and this one remains private.
        """
        assert len(tokens) == self.block_tokens, "only a full block can be shared"
        assert self._references[block] > 0, "only a held block can be published"
        key = (chain, tokens)
        known = self._published.get(key)
        if known is not None:
            return known[1]
        if key == self._latest_next:
            self._latest = None
        serial = next(self._serials)
        self._published[key] = (block, serial)
        self._key_by_block[block] = key
        return serial

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        self._note_change(block)
        key = self._key_by_block[block]
        assert key is not None, "a cached block has no key"
        del self._published[key]
        self._key_by_block[block] = None
        return block

    def _note_change(self, block: int) -> None:
        """Invalidate the latest match if a block of it is evicted, acquired or released."""
        if block in self._latest_blocks:
            self._latest = None
