"""Counts of verdicts: one engine's counts, and the budgets of all engines.

Every cause exists from the start, at 0: the rate of a series misses the value at which it first
appears.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from inferscope.records import CAUSES
from inferscope.slo.objectives import Objective

SHED = "shed"
"""Cause of requests refused for lack of capacity; no time is booked to it."""
UNKNOWN = "unknown"
"""Cause of bad requests whose cause is unknown."""


class ObjectiveCount(msgspec.Struct, frozen=True):
    """One objective over one engine's requests."""

    objective: Objective
    """Objective that was counted."""
    num_good: int = 0
    """Good requests."""
    num_bad: int = 0
    """Bad requests."""
    num_warm_up: int = 0
    """Requests before the engine's first answer, neither good nor bad."""
    causes: dict[str, int] = {}
    """Bad requests by main cause, `shed` and `unknown` included; requests in flight follow
    later."""


class ObjectiveCounter:
    """Counter of one engine's verdicts."""

    def __init__(self, spend: Callable[[Objective, bool], None]) -> None:
        """Keep the callback that books each verdict to the budget."""
        self._spend = spend
        # By name, as time series are: a changed objective continues its counts.
        self._counts: dict[str, list[int]] = {}
        self._causes: dict[str, dict[str, int]] = {}

    def decided(self, objective: Objective, is_good: bool) -> None:
        """Count a verdict under an objective."""
        self._of(objective)[0 if is_good else 1] += 1
        self._spend(objective, is_good)

    def warmed_up(self, objective: Objective) -> None:
        """Count a warm-up request."""
        self._of(objective)[2] += 1

    def explained(self, objective: Objective, cause: str | None) -> None:
        """Count the cause of a bad request."""
        self._of(objective)
        self._causes[objective.name][cause or UNKNOWN] += 1

    def of(self, objectives: tuple[Objective, ...]) -> tuple[ObjectiveCount, ...]:
        """Return the current counts of these objectives."""
        counts = []
        for one in objectives:
            good, bad, warm_up = self._of(one)
            counts.append(ObjectiveCount(one, good, bad, warm_up, dict(self._causes[one.name])))
        return tuple(counts)

    def _of(self, objective: Objective) -> list[int]:
        counts = self._counts.get(objective.name)
        if counts is None:
            counts = self._counts[objective.name] = [0, 0, 0]
            self._causes[objective.name] = dict.fromkeys((*CAUSES, SHED, UNKNOWN), 0)
        return counts
