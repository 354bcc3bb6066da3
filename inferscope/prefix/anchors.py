"""Anchors of a prompt: positions chosen by content, so equal text has equal anchors.

A prompt is compared with thousands of earlier ones by looking up its anchors. Whether a position is
an anchor depends on the four tokens there; the anchor stands for a shingle of eight. Position 0
always is one. The first tokens of a prompt have denser anchors, for the sake of short prompts.

The whole prompt is mixed at once: its bytes are one large integer, whose shifts and XORs run in C.
A loop over the tokens of a 32k prompt takes 5 ms, this 0.4 ms, without numpy, which an API server
of the reference engine does not load.
"""

from __future__ import annotations

import random
import re
from itertools import islice

TOKEN_BYTES = 4
SHINGLE = 8
"""Number of tokens that an anchor stands for."""
_SHINGLE_BYTES = SHINGLE * TOKEN_BYTES
_BANDS = ((512, 32, b"[\1-\3]"), (8192, 8, b"[\2\3]"), (1 << 62, 4, b"\3"))
"""Position at which a band ends; of 256 values of a mixed byte the number that are anchors there;
the grades that these have. An anchor of a later band is one in an earlier band too."""
_FINDERS = tuple((end, re.compile(grades).finditer) for end, _, grades in _BANDS)
_LARGEST_SHARE = 4
"""At most one position in 4 of a band, and 64 more, is an anchor: in repeated text all may be."""
_LEAST_MOST = 64


class AnchorFinder:
    """Finder of anchors, under a key of its own."""

    def __init__(self, key: random.Random | None = None) -> None:
        """Draw the permutations of bytes that serve as the key."""
        key = key or random.SystemRandom()
        self._first, self._second, order = (_permutation(key) for _ in range(3))
        self._grades = bytes(sum(place < num for _, num, _ in _BANDS) for place in order)

    def positions(self, raw: bytes) -> list[int]:
        """Return the anchors of a prompt, given as little-endian unsigned 32-bit tokens."""
        num = len(raw) // TOKEN_BYTES
        if num < SHINGLE:
            return []
        # The low byte of each token.
        lanes = _integer(raw[::TOKEN_BYTES].translate(self._first))
        lanes = _integer((lanes ^ (lanes >> 8)).to_bytes(num, "little").translate(self._second))
        grades = (lanes ^ (lanes >> 16)).to_bytes(num, "little").translate(self._grades)
        found: list[int] = []
        start, last = 0, num - SHINGLE + 1
        for band_end, find in _FINDERS:
            end = min(band_end, last)
            if start >= end:
                break
            most = (end - start) // _LARGEST_SHARE + _LEAST_MOST
            found += [match.start() for match in islice(find(grades, start, end), most)]
            start = end
        if not found or found[0]:
            found.insert(0, 0)
        return found


def shingles(raw: bytes, positions: list[int]) -> list[int]:
    """Return a hash of the shingle at each position.

    Python's hash of bytes is keyed per process, unless PYTHONHASHSEED is set. These hashes stay in
    the process, and every match is confirmed by comparing the tokens.
    """
    return [hash(raw[at : at + _SHINGLE_BYTES]) for at in map(TOKEN_BYTES.__mul__, positions)]


def _permutation(key: random.Random) -> bytes:
    order = list(range(256))
    key.shuffle(order)
    return bytes(order)


def _integer(raw: bytes) -> int:
    return int.from_bytes(raw, "little")
