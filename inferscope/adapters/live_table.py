"""Live requests by id, bounded: what an adapter remembers of each between two of its hooks.

An engine that never ends its requests, or ends them where no hook is, must not make its process
grow. So a table drops its oldest entries beyond a limit and counts them.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

from inferscope.probe import Probe
from inferscope.probe.requests import MAX_LIVE
from inferscope.probe.voice import warn

Entry = TypeVar("Entry")


# Not a plain dict: to find its first key takes a walk over all those deleted since it last grew.
class LiveTable(OrderedDict[str, Entry]):
    """A dictionary with at most `most` entries, in the order in which they were put.

    Attributes:
        num_dropped: entries that were dropped because others came.
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
            self.num_dropped += 1
            if self.num_dropped == 1:
                feature = f"more than {self._most} live requests: the oldest are not followed"
                self._probe.unsupported(feature)
                warn("unsupported: %s", feature)
