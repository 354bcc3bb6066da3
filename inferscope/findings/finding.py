"""A finding: a mistake that a run shows, with its numbers, what to try, and what would follow."""

from __future__ import annotations

from typing import Literal

import msgspec

Provenance = Literal["measured", "apportioned", "modelled"]
Severity = Literal["high", "medium", "low"]

_HIGH, _MEDIUM = 0.25, 0.10


class Number(msgspec.Struct, frozen=True):
    """A figure that a finding rests on; its name ends in its unit."""

    name: str
    value: float | int | str
    provenance: Provenance


class Counterfactual(msgspec.Struct, frozen=True):
    """What a metric would have been, to first order: all that would have followed is left out."""

    sentence: str
    metric: str
    actual_ns: float
    without_ns: float
    provenance: Provenance = "modelled"


class Finding(msgspec.Struct, frozen=True):
    """One mistake."""

    id: str
    title: str
    lost_share: float
    """How much of all answers' time it took, roughly: findings are ranked by it."""
    sentences: tuple[str, ...]
    evidence: tuple[Number, ...]
    advice: str = msgspec.field(name="try")
    counterfactual: Counterfactual | None = None

    @property
    def severity(self) -> Severity:
        """Return how much of users' time is at stake: a quarter, a tenth, or less."""
        if self.lost_share >= _HIGH:
            return "high"
        return "medium" if self.lost_share >= _MEDIUM else "low"
