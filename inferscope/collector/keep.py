"""What a fold keeps for those who look at it, beside the requests that are not final yet.

A screen shows quantiles of the last minutes and the requests of late. A collector hands on what is
final, and of the rest needs little: with a hundred engines what nobody looks at is not kept.
"""

from __future__ import annotations

from typing import NamedTuple

DURATIONS = ("ttft", "tbt", "e2e", "queue", "step", "host_gap")


class Keep(NamedTuple):
    """What to keep; without arguments all of it."""

    seconds: int = 320
    """That windows reach back, at most: a few kilobytes each."""
    durations: tuple[str, ...] = DURATIONS
    """Whose distributions windows have; the others' quantiles are unknown."""
    finished: int = 200
    """Requests that became final lately, at most."""
    in_flight: int = 65_536
    """Maximum of requests that are not final, of some 3 KB each; further ones are not followed."""
    digest: bool = True
    """Of all that is final, by which two folds of the same records are compared."""


ALL = Keep()
