"""Short ways to make requests, and to run a client against them."""

from __future__ import annotations

import time

from inferscope.load.workload import PlannedRequest


def ask(
    at_s: float, name: str, *, prompt: str = "?", max_tokens: int = 3, seed: int = 0
) -> PlannedRequest:
    """Return a request of which only the time and the name matter."""
    return PlannedRequest(at_s, name, "chat", prompt, max_tokens, seed)


def now() -> int:
    """Return the client's clock."""
    return time.monotonic_ns()
