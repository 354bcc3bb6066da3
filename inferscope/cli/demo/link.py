"""Messages between the demo's two processes: settings down, stages and readiness up.

A module of its own, so that the screen's process does not import torch.
"""

from __future__ import annotations

import msgspec

from inferscope.engine import EngineOptions


class Settings(msgspec.Struct, frozen=True, tag=True):
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


class PlannedRun(msgspec.Struct, frozen=True):
    """One run of a comparison."""

    engine_id: str
    label: str
    """Text that reports its start."""
    options: EngineOptions
    seed: int
    """Seed of the load."""


class Rounds(msgspec.Struct, frozen=True, tag=True):
    """Settings of a comparison: runs of the same load with different engines, in their order."""

    model: str
    duration_s: float | None
    """Mean time in which the requests of one run arrive; None for a fixed number of requests."""
    load: float
    """Share of the first run's measured capacity."""
    rate_s: float | None
    """Arrivals per second; None derives the rate from `load`."""
    runs: tuple[PlannedRun, ...]


class Stage(msgspec.Struct, frozen=True, tag=True):
    """Message that names the current stage of the child's start, or its current run."""

    text: str


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Message that reports the begin of the load."""

    rate_s: float
    num_requests: int | None = None
    """Requests of each run of a comparison."""
