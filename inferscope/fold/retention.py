"""Retention limits of a fold for its readers, besides the requests that are not final yet.

A screen shows quantiles of the last minutes and recent requests. A collector exports final records
and needs little else: with a hundred engines, data without a reader is not kept.
"""

from __future__ import annotations

from typing import NamedTuple

DURATIONS = ("ttft", "tbt", "e2e", "queue", "step", "host_gap")


class Retention(NamedTuple):
    """Limits on what a fold keeps; the defaults keep everything but steps."""

    seconds: int = 320
    """Maximum window length in seconds; each second costs a few kilobytes."""
    durations: tuple[str, ...] = DURATIONS
    """Names of the durations with distributions in windows; other quantiles are unknown."""
    finished: int = 200
    """Maximum number of recently finished requests."""
    in_flight: int = 65_536
    """Maximum number of requests in flight, about 3 KB each; further ones are not followed."""
    digest: bool = True
    """Whether to compute a digest of all final records, for comparing folds of the same records."""
    steps: int = 0
    """Maximum number of recent steps; with any, steps are also summed by kind and second."""


ALL = Retention()
FOR_SCREEN = Retention(steps=4096)
"""What a screen shows: all of it, and recent steps."""
