"""Messages between the demo's two processes: settings down, stages and readiness up.

A module of its own, so that the screen's process does not import torch.
"""

from __future__ import annotations

import msgspec

from inferscope.engine import EngineOptions


class Settings(msgspec.Struct, frozen=True):
    """Settings of the demo's engine and load."""

    model: str
    seed: int
    duration_s: float | None
    load: float
    """Share of the engine's measured capacity."""
    rate_s: float | None
    """Arrivals per second; None derives the rate from `load`."""
    client_times: str | None
    """File for the load generator's own timestamps; None for no file."""
    options: EngineOptions
    reports_stages: bool = False
    """Whether the child sends each stage of its start before it reports readiness."""


class Stage(msgspec.Struct, frozen=True, tag=True):
    """Message that names the current stage of the child's start."""

    text: str


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Message that reports the begin of the load."""

    rate_s: float
