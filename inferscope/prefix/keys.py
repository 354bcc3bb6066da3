"""Keys of a prompt's blocks, for engines whose own hashes cannot be read.

A key stands for a block and all blocks before it. Python's hash of bytes and tuples is keyed per
process, unless PYTHONHASHSEED is set; the keys stay in the process in any case.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from struct import iter_unpack


def first_key(namespace: object = None) -> int:
    """Return the key of an empty prefix, apart for each salt, LoRA adapter and the like."""
    return hash((namespace, "prefix"))


def next_key(key: int, block: bytes) -> int:
    """Return the key of a block behind the prefix with a key."""
    return hash((key, block))


def block_keys(raw: bytes, block_bytes: int, key: int | None = None) -> list[int]:
    """Return the key of each whole block of a prompt.

    Args:
        raw: the prompt's tokens, in any encoding of a fixed width.
        block_bytes: length of a block in that encoding.
        key: key of the prefix before them; None for that of an empty one.
    """
    if key is None:
        key = first_key()
    whole = raw[: len(raw) // block_bytes * block_bytes]
    # `next_key`, without the call.
    return [key := hash((key, block)) for (block,) in iter_unpack(f"{block_bytes}s", whole)]


def packed(keys: Sequence[int]) -> bytes:
    """Return keys one after another, as `BlockSampler` takes them."""
    return array("q", keys).tobytes()
