"""Statistics of the scheduler's plans."""

from __future__ import annotations

from collections import Counter

from inferscope.records import StepPlan


class PlanStats:
    """Statistics of one engine's scheduler plans.

    Attributes:
        num: number of plans.
        num_with_queue: plans made while requests waited.
        running_with_queue: running requests summed over those.
        bindings: number of those by binding constraint.
        peak_blocks_share: maximum share of KV blocks in use; None if blocks are not recorded.
        most_running: maximum number of running requests.
    """

    def __init__(self) -> None:
        self.num = self.num_with_queue = self.running_with_queue = self.most_running = 0
        self.bindings: Counter[str] = Counter()
        self.peak_blocks_share: float | None = None

    def add(self, plan: StepPlan) -> None:
        """Add a plan."""
        self.num += 1
        self.most_running = max(self.most_running, plan.running)
        if plan.waiting:
            self.num_with_queue += 1
            self.running_with_queue += plan.running
            self.bindings[plan.binding] += 1
        if plan.blocks_total:
            share = plan.blocks_used / plan.blocks_total
            self.peak_blocks_share = max(share, self.peak_blocks_share or 0.0)

    def bound_share(self, binding: str) -> float:
        """Return the share of plans with waiting requests that this constraint bound."""
        return self.bindings[binding] / self.num_with_queue if self.num_with_queue else 0.0

    @property
    def queue_share(self) -> float:
        """Return the share of plans with waiting requests."""
        return self.num_with_queue / self.num if self.num else 0.0
