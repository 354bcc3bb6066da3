"""Which KV blocks are free, which are shared, and which still hold a prefix worth finding.

A block is in exactly one of three states:

    free ──allocate──> owned (references > 0) ──release──> free, or cached if published
                          ^                                   │
                          └────────────acquire────────────────┘   (cached: evicted oldest first)

A published block is found again by (chain, its tokens), where the chain is the serial number of the
published block before it. Looking that pair up hashes and compares the tokens themselves, so two
prompts share a block only when everything before it is equal too; no hash collision, wanted or not,
can hand one request another's keys. Every operation is O(1) per block.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence
from typing import TypeAlias

import msgspec

ROOT = 0
"""The chain of a prompt's first block."""

_Key: TypeAlias = "tuple[int, tuple[int, ...]]"


class Match(msgspec.Struct, frozen=True, gc=False):
    """The longest published prefix of a prompt."""

    blocks: list[int]
    chain: int
    num_cached: int
    """Of the blocks, those nobody holds: acquiring them takes them from what is available."""


NO_MATCH = Match(blocks=[], chain=ROOT, num_cached=0)


class BlockPool:
    """Accounts for the blocks of a paged KV cache; the tensors are `attention.py`'s."""

    def __init__(self, num_blocks: int, *, block_tokens: int) -> None:
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self._references = [0] * num_blocks
        # A stack, lowest block on top: an empty pool hands out consecutive blocks, which attention
        # reads in place instead of gathering.
        self._free = list(range(num_blocks - 1, -1, -1))
        # Not a dict: taking the oldest key of a dict walks over every key deleted before it.
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._published: dict[_Key, tuple[int, int]] = {}
        self._key_by_block: list[_Key | None] = [None] * num_blocks
        self._serials = itertools.count(ROOT + 1)
        self._latest: Match | None = None
        """The match found last, as long as it would be found again."""
        self._latest_blocks: frozenset[int] = frozenset()
        self._latest_next: _Key | None = None
        """What would make the latest match longer, were it published; None: it is full."""

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` could hand out now, cached ones included."""
        return len(self._free) + len(self._cached)

    @property
    def num_used(self) -> int:
        """Blocks that some request holds."""
        return self.num_blocks - self.num_available

    @property
    def num_cached(self) -> int:
        """Blocks that nobody holds and whose content can still be found."""
        return len(self._cached)

    def references(self, block: int) -> int:
        """Return how many requests hold a block."""
        return self._references[block]

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold so many tokens."""
        return -(-num_tokens // self.block_tokens)

    def allocate(self, num: int) -> list[int]:
        """Hand out blocks with one reference each: free ones, then the least recently used."""
        assert num <= self.num_available, "allocate() beyond what is available"
        blocks = [self._free.pop() if self._free else self._evict() for _ in range(num)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """Give back one reference of each block of one request, in the order of its tokens."""
        # The tail first: it becomes the oldest, so a prefix loses its end before its beginning.
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

    def match(self, tokens: Sequence[int], *, max_blocks: int) -> Match:
        """Find the longest published prefix, without taking hold of it."""
        width = self.block_tokens
        blocks: list[int] = []
        chain = ROOT
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
        """Return whether `match`, if it is the latest, would be found again as it is; O(1)."""
        return match is self._latest

    def acquire(self, blocks: Sequence[int]) -> None:
        """Add one reference to each of the blocks of a match."""
        for block in blocks:
            if self._references[block] == 0:
                self._note_change(block)
                del self._cached[block]
            self._references[block] += 1

    def publish(self, block: int, *, chain: int, tokens: tuple[int, ...]) -> int:
        """Make a full block findable and return the chain of the block after it.

        Where an equal block is published already that one stays, and this one remains private.
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
        """Note that a block was evicted, or is now held or no longer held."""
        if block in self._latest_blocks:
            self._latest = None
