"""Sample of a prompt's blocks, as keyed digests, for the miss-ratio curve.

Whether a block is sampled depends on its key alone (SHARDS: Waldspurger et al., FAST '15), so all
accesses of a sampled block are seen. The first two bytes of a digest are those of the block's key,
under a secret permutation each: they decide. The rest is a hash with a secret key: a digest cannot
be computed from a guessed text.
"""

from __future__ import annotations

import os
import random
from hashlib import blake2s

import msgspec

MOST_SAMPLED = 54
"""Most digests of one prompt; beyond it the rate falls for good, to one at which they fit."""
_LEAST_FALL = 8
"""The rate falls by an eighth or more, so a reader rarely has to drop blocks."""
_AIM = 8192
"""Sampled blocks among those of a cache eight times as large."""
_LARGER = 8
_STEPS = 1 << 16
_CANDIDATE = b"\1"
_REST_BYTES = 6


class Sample(msgspec.Struct, frozen=True, gc=False):
    """Fields of a `CacheSample` record."""

    num_blocks: int
    rate: float
    digests: bytes


class BlockSampler:
    """Sampler of blocks under keys of its own, which are made here and kept here."""

    def __init__(self, num_cache_blocks: int, *, most: int = MOST_SAMPLED) -> None:
        """Choose the rate for a cache of a number of blocks."""
        key = random.SystemRandom()
        self._first, self._second = (key.sample(range(256), 256) for _ in range(2))
        self._secret = os.urandom(32)
        self._most = most
        rate = _AIM / (_LARGER * max(1, num_cache_blocks))
        self._limit = min(_STEPS, max(1, round(rate * _STEPS)))
        self._make_table()

    @property
    def rate(self) -> float:
        """Share of blocks that is sampled; it only falls."""
        return self._limit / _STEPS

    def sample(self, raw_keys: bytes, num_blocks: int) -> Sample:
        """Return the sample of a prompt's blocks.

        Args:
            raw_keys: their keys one after another, of equal length, at least 2 bytes each.
            num_blocks: number of the keys.
        """
        if not num_blocks:
            return Sample(0, self.rate, b"")
        width = len(raw_keys) // num_blocks
        picked = self._pick(raw_keys, width)
        if len(picked) > self._most:
            fitting = sorted(rank for _, rank in picked)[self._most]
            self._limit = max(1, min(fitting, self._limit - self._limit // _LEAST_FALL))
            self._make_table()
            # The lowest rank is never left out: many blocks may have it.
            picked = self._pick(raw_keys, width)[: self._most]
        digests = []
        for number, rank in picked:
            block = raw_keys[number * width : (number + 1) * width]
            rest = blake2s(block, key=self._secret, digest_size=_REST_BYTES).digest()
            digests.append(rest + rank.to_bytes(2, "little"))
        return Sample(num_blocks, self.rate, b"".join(digests))

    def _pick(self, raw_keys: bytes, width: int) -> list[tuple[int, int]]:
        """Return number and rank of the sampled blocks; a rank is below the limit."""
        candidates = raw_keys[::width].translate(self._table)
        picked = []
        number = candidates.find(_CANDIDATE)
        while number >= 0:
            at = number * width
            rank = self._first[raw_keys[at]] << 8 | self._second[raw_keys[at + 1]]
            if rank < self._limit:
                picked.append((number, rank))
            number = candidates.find(_CANDIDATE, number + 1)
        return picked

    def _make_table(self) -> None:
        """Make the table that marks first bytes of which some blocks are sampled."""
        highest = (self._limit - 1) >> 8
        self._table = bytes(place <= highest for place in self._first)
