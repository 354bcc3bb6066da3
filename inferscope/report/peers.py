"""The requests that one is compared with: those that ended lately, as many as are worth keeping."""

from __future__ import annotations

from collections import deque

from inferscope.collector.finals import FinalRequest, FinalStep

_MOST = 2_000
"""The median of more changes no sentence."""


class PeerSink:
    """Keeps the last final requests of an engine. It is a sink of the fold.

    Attributes:
        requests: oldest first.
    """

    def __init__(self, engine_id: str) -> None:
        self._engine_id = engine_id
        self.requests: deque[FinalRequest] = deque(maxlen=_MOST)

    def step(self, step: FinalStep) -> None:
        """Take a step, which says nothing of any one request."""

    def request(self, request: FinalRequest) -> None:
        """Take a request."""
        if request.engine_id == self._engine_id:
            self.requests.append(request)
