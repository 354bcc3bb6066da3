"""The division of a host's engines among several collectors, by a hash of the engine ID.

    shard K of N has the engines with  SHA-256(engine_id)[:8] mod N = K - 1      (big-endian)

Each engine is in exactly one shard, and every process computes the same one without communication.
An engine's shard depends only on its ID and N.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from inferscope.errors import BadInput

MOST_SHARDS = 64
"""Maximum number of shards; no host has use for more collectors."""


@dataclass(frozen=True)
class Shard:
    """One part of the engines.

    Attributes:
        number: number of the part, from 1.
        total: number of parts.
    """

    number: int = 1
    total: int = 1

    def __str__(self) -> str:
        """Return K/N, the form of the configuration."""
        return f"{self.number}/{self.total}"

    @property
    def is_all(self) -> bool:
        """Return whether this is the only part."""
        return self.total == 1

    @property
    def name(self) -> str:
        """Return K-of-N, the form in file names."""
        return f"{self.number}-of-{self.total}"

    def has(self, engine_id: str) -> bool:
        """Return whether an engine belongs to this shard."""
        if self.is_all:
            return True
        digest = hashlib.sha256(engine_id.encode("utf-8", "surrogatepass")).digest()
        return int.from_bytes(digest[:8], "big") % self.total == self.number - 1

    def file(self, path: Path) -> Path:
        """Return this shard's variant of a file's path, such as `a-1-of-2.json` for `a.json`."""
        return path if self.is_all else path.with_name(f"{path.stem}-{self.name}{path.suffix}")


ALL = Shard()
"""Shard of a collector of all engines."""


def read_shard(text: str) -> Shard:
    """Read `K/N`.

    Raises:
        BadInput: the text has another form, or K is not between 1 and N.
    """
    found = re.fullmatch(r"(\d{1,4})/(\d{1,4})", text)
    if found is None:
        raise BadInput(f"shard is {text!r}. Give K/N: 1/2 and 2/2 are the two halves of a host.")
    number, total = int(found[1]), int(found[2])
    if not 1 <= total <= MOST_SHARDS:
        raise BadInput(f"shard is {text}. Divide a host's engines by 1 to {MOST_SHARDS}.")
    if not 1 <= number <= total:
        raise BadInput(f"shard is {text}. Give a number from 1/{total} to {total}/{total}.")
    return Shard(number, total)
