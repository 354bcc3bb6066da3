"""What the demo's two processes say to each other: settings down, one word up.

Apart from both, so that the screen's process does not load the engine's torch.
"""

from __future__ import annotations

import msgspec

from inferscope.engine.config import EngineOptions


class Settings(msgspec.Struct, frozen=True):
    """What the parent wants."""

    model: str
    seed: int
    duration_s: float | None
    load: float
    """Share of the engine's measured capacity."""
    rate_s: float | None
    """Arrivals per second; None: by `load`."""
    client_times: str | None
    """Where to write the load generator's own timestamps."""
    options: EngineOptions
    says_stages: bool = False
    """Whether each stage of its start is a line before the one that it is ready."""


class Stage(msgspec.Struct, frozen=True, tag=True):
    """What the child does on its way to the load."""

    text: str


class Ready(msgspec.Struct, frozen=True, tag=True):
    """What the child says when the load begins."""

    rate_s: float
