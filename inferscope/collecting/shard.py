"""Which engines of a host are a collector's, where several share them: a part of a hash.

    shard K of N has the engines with  SHA-256(engine_id)[:8] mod N = K - 1      (big-endian)

So each engine is in exactly one shard, every process finds the same one without asking, and anybody
can work it out. Which one it is changes with N alone.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from inferscope.errors import BadInput

MOST_SHARDS = 64
"""More processes than that have no host to run on."""


@dataclass(frozen=True)
class Shard:
    """A part of the engines.

    Attributes:
        number: from 1 on.
        total: how many parts there are.
    """

    number: int = 1
    total: int = 1

    def __str__(self) -> str:
        """Write it as it is given: K/N."""
        return f"{self.number}/{self.total}"

    @property
    def is_all(self) -> bool:
        """Tell whether nobody else has a part."""
        return self.total == 1

    @property
    def word(self) -> str:
        """Return it as a part of a file's name."""
        return f"{self.number}-of-{self.total}"

    def has(self, engine_id: str) -> bool:
        """Tell whether an engine is in it."""
        if self.is_all:
            return True
        digest = hashlib.sha256(engine_id.encode("utf-8", "surrogatepass")).digest()
        return int.from_bytes(digest[:8], "big") % self.total == self.number - 1

    def file(self, path: Path) -> Path:
        """Return this shard's own file beside one that all would write: `a-1-of-2.json`."""
        return path if self.is_all else path.with_name(f"{path.stem}-{self.word}{path.suffix}")


ALL = Shard()
"""Of a collector that shares with nobody."""


def read_shard(text: str) -> Shard:
    """Read `K/N`.

    Raises:
        BadInput: it is no such thing, or there is no shard of this number.
    """
    found = re.fullmatch(r"(\d{1,4})/(\d{1,4})", text)
    if found is None:
        raise BadInput(f"shard is {text!r}. Give K/N: 1/2 and 2/2 are the two halves of a host.")
    number, total = int(found[1]), int(found[2])
    if not 1 <= total <= MOST_SHARDS:
        raise BadInput(f"shard is {text}. Divide a host's engines by 1 to {MOST_SHARDS}.")
    if not 1 <= number <= total:
        raise BadInput(
            f"shard is {text}. Of {total} the first is 1/{total}, the last {total}/{total}."
        )
    return Shard(number, total)
