"""A finding: a mistake that a run shows, with its numbers, what to try, and what would follow."""

from __future__ import annotations

from typing import Literal

import msgspec

Provenance = Literal["measured", "apportioned", "modelled"]
Severity = Literal["high", "medium", "low"]

_HIGH, _MEDIUM = 0.25, 0.10
FEWEST_BAD = 10
"""Bad requests; with fewer no rule of a budget wakes anybody (`inferscope slo rules`)."""
_PAGES, _TICKETS = 6.0, 3.0
"""Burn rates from which on those rules page, and write a ticket within a day."""


class Number(msgspec.Struct, frozen=True):
    """One number that a finding rests on; its name ends in its unit."""

    name: str
    """Name of the number, with its unit."""
    value: float | int | str
    """Value; a string for a name or a cause."""
    provenance: Provenance
    """measured, apportioned or modelled."""


class Counterfactual(msgspec.Struct, frozen=True):
    """Value of a metric without the cause, to first order."""

    sentence: str
    """Comparison in a sentence."""
    metric: str
    """Metric that changes."""
    actual_ns: int
    """Actual value."""
    without_ns: int
    """Value without the cause."""
    provenance: Provenance = "modelled"
    """modelled, or measured where it rests on measured times."""


class ObjectiveMiss(msgspec.Struct, frozen=True):
    """One objective that a run missed, counted from its first request to its last."""

    slo: str
    """Name of the objective."""
    promised_share: float
    """Target share of good requests."""
    num_good: int
    """Good requests."""
    num_bad: int
    """Bad requests."""
    burn: float
    """Bad requests over the number allowed for as many; above 1, as it is missed."""

    @property
    def severity(self) -> Severity:
        """Return what an alert would be at this pace; few bad requests are no pace."""
        if self.num_bad < FEWEST_BAD:
            return "low"
        return "high" if self.burn >= _PAGES else "medium" if self.burn >= _TICKETS else "low"


class Finding(msgspec.Struct, frozen=True):
    """One mistake, or one objective that was missed."""

    id: str
    title: str
    lost_share: float
    """How much of all answers' time it took, roughly: findings are ranked by it."""
    sentences: tuple[str, ...]
    evidence: tuple[Number, ...]
    advice: str = msgspec.field(name="try")
    counterfactual: Counterfactual | None = None
    objective: ObjectiveMiss | None = None
    """That was missed; None of a mistake."""
    causes: tuple[str, ...] = ()
    """Ledger rows that the finding names."""

    @property
    def severity(self) -> Severity:
        """Return how much of users' time is at stake: a quarter, a tenth, or less."""
        if self.objective is not None:
            return self.objective.severity
        if self.lost_share >= _HIGH:
            return "high"
        return "medium" if self.lost_share >= _MEDIUM else "low"
