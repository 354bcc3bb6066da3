"""Recently finished requests of an engine, to compare one request with."""

from __future__ import annotations

from collections import deque

from inferscope.fold import FinalRequest, FinalStep

_MOST = 2_000
"""Maximum number kept; more would not change a median noticeably."""


class PeerSink:
    """Sink of the fold that keeps an engine's last final requests.

    Attributes:
        requests: final requests, oldest first.
    """

    def __init__(self, engine_id: str) -> None:
        self._engine_id = engine_id
        self.requests: deque[FinalRequest] = deque(maxlen=_MOST)

    def on_step(self, step: FinalStep) -> None:
        """Ignore a step: it describes no single request."""

    def on_request(self, request: FinalRequest) -> None:
        """Add a request."""
        if request.engine_id == self._engine_id:
            self.requests.append(request)
