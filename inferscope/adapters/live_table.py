"""Live requests by id, bounded: what an adapter remembers of each between two of its hooks.

An engine that never ends its requests, or ends them where no hook is, must not make its process
grow. So a table has a limit: where it is full, the oldest entry is dropped for a new one, or, with
`has_room`, the new one is refused. Both are counted.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

from inferscope.probe import MAX_LIVE, Probe, warn

Entry = TypeVar("Entry")


# Not a plain dict: to find its first key takes a walk over all those deleted since it last grew.
class LiveTable(OrderedDict[str, Entry]):
    """A dictionary with at most `most` entries, in the order in which they were put.

    Attributes:
        num_dropped: entries that were dropped or refused.
    """

    def __init__(self, probe: Probe, *, most: int = MAX_LIVE) -> None:
        """Start empty.

        Args:
            probe: reports that entries are dropped.
            most: entries, by default as many as the probe restates in its keyframes.
        """
        super().__init__()
        self.num_dropped = 0
        self._probe = probe
        self._most = most

    def put(self, request_id: str, entry: Entry) -> None:
        """Add an entry; drop the oldest one where there is no room."""
        self[request_id] = entry
        while len(self) > self._most:
            self.popitem(last=False)
            self._drop("oldest")

    def has_room(self) -> bool:
        """Return whether one more entry costs no other; count and report it where it does."""
        if len(self) < self._most:
            return True
        self._drop("newest")
        return False

    def _drop(self, which: str) -> None:
        self.num_dropped += 1
        if self.num_dropped == 1:
            feature = f"more than {self._most} live requests: the {which} are not followed"
            self._probe.unsupported(feature)
            warn("unsupported: %s", feature)
