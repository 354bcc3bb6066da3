"""A finding: a problem that a run shows, with evidence, advice and a counterfactual."""

from __future__ import annotations

from typing import Literal

import msgspec

Provenance = Literal["measured", "apportioned", "modelled"]
Severity = Literal["high", "medium", "low"]

_HIGH, _MEDIUM = 0.25, 0.10
FEWEST_BAD = 10
"""Minimum number of bad requests; with fewer, no burn-rate rule pages (`inferscope slo rules`)."""
_PAGES, _TICKETS = 6.0, 3.0
"""Burn rates from which those rules page, and create a ticket within a day."""


class Number(msgspec.Struct, frozen=True):
    """One number that a finding rests on; its name ends in its unit."""

    name: str
    """Name of the number, with its unit."""
    value: float | int | str
    """Value; a string for a name or a cause."""
    provenance: Provenance
    """measured, apportioned or modelled."""


class NotJudged(msgspec.Struct, frozen=True):
    """One rule that the source cannot decide."""

    id: str
    """Name of the rule."""
    reason: str
    """What the source lacks."""


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
        """Return the severity of an alert at this burn rate; few bad requests are low."""
        if self.num_bad < FEWEST_BAD:
            return "low"
        return "high" if self.burn >= _PAGES else "medium" if self.burn >= _TICKETS else "low"


class Finding(msgspec.Struct, frozen=True):
    """One performance problem, or one missed objective."""

    id: str
    title: str
    lost_share: float
    """Share of all responses' time lost, roughly; findings are ranked by it."""
    sentences: tuple[str, ...]
    evidence: tuple[Number, ...]
    advice: str = msgspec.field(name="try")
    counterfactual: Counterfactual | None = None
    objective: ObjectiveMiss | None = None
    """Missed objective; None for a problem."""
    causes: tuple[str, ...] = ()
    """Ledger rows that the finding names."""

    @property
    def severity(self) -> Severity:
        """Return the severity by the time lost: a quarter, a tenth, or less."""
        if self.objective is not None:
            return self.objective.severity
        if self.lost_share >= _HIGH:
            return "high"
        return "medium" if self.lost_share >= _MEDIUM else "low"
