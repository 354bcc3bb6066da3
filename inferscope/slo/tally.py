"""What was decided, counted: one engine's numbers, and the budgets of all.

Every cause is there from the start, at 0: a series that first appears at a high value is missed by
whoever looks at its rate.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from inferscope.records import CAUSES
from inferscope.slo.objectives import Objective

SHED = "shed"
"""The cause of what was refused for want of capacity; no time is booked to it."""
UNKNOWN = "unknown"
"""In place of a cause where nobody can tell."""


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
    """Counts what one engine's judge decides."""

    def __init__(self, spend: Callable[[Objective, bool], None]) -> None:
        """Take what is told of each good and bad one, for the budget."""
        self._spend = spend
        # By name, as time series are: an objective that is changed goes on with its numbers.
        self._counts: dict[str, list[int]] = {}
        self._causes: dict[str, dict[str, int]] = {}

    def decided(self, objective: Objective, is_good: bool) -> None:
        """Count a request under an objective."""
        self._of(objective)[0 if is_good else 1] += 1
        self._spend(objective, is_good)

    def warmed_up(self, objective: Objective) -> None:
        """Count a request of a warm-up."""
        self._of(objective)[2] += 1

    def explained(self, objective: Objective, cause: str | None) -> None:
        """Count the cause of a bad one."""
        self._of(objective)
        self._causes[objective.name][cause or UNKNOWN] += 1

    def of(self, objectives: tuple[Objective, ...]) -> tuple[ObjectiveCount, ...]:
        """Return the numbers as they are now, of these objectives."""
        told = []
        for one in objectives:
            good, bad, warm_up = self._of(one)
            told.append(ObjectiveCount(one, good, bad, warm_up, dict(self._causes[one.name])))
        return tuple(told)

    def _of(self, objective: Objective) -> list[int]:
        counts = self._counts.get(objective.name)
        if counts is None:
            counts = self._counts[objective.name] = [0, 0, 0]
            self._causes[objective.name] = dict.fromkeys((*CAUSES, SHED, UNKNOWN), 0)
        return counts
