"""Load of the experts of a mixture, summed over steps and layers.

All experts of a layer compute at the same time where each is on its own device, so a layer takes as
long as its busiest expert. Three sums over the same layers show what that costs:

    mean       tokens routed / experts: the load of each expert if all had the same
    even       expected load of the busiest expert if each token chose its experts at random
    busiest    measured load of the busiest expert of each layer
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from inferscope.cost import even_busiest
from inferscope.records import COLUMNS, ExpertLoad

_MOST_CELLS = 1 << 18
"""Largest number of experts in all layers; a record beyond is not read."""


class Routing(NamedTuple):
    """One step's load of experts, summed over its layers, in tokens."""

    mean: float
    even: float
    busiest: int


class ExpertLoads:
    """Load of the experts of one model over all steps.

    Attributes:
        num_experts: number of experts of a layer; 0 before the first record.
        mean_tokens: sum of the mean loads; `even_tokens` and `busiest_tokens` likewise.
    """

    def __init__(self) -> None:
        self.num_experts = 0
        self.mean_tokens = self.even_tokens = 0.0
        self.busiest_tokens = 0
        self._busiest = np.zeros((0, 0), dtype=np.int64)
        """Tokens of each expert in the steps in which it was the busiest, [layers, experts]."""

    def add(self, record: ExpertLoad) -> Routing | None:
        """Add a step; return its load, or None if the record is inconsistent."""
        try:
            experts = np.frombuffer(record.experts, dtype=COLUMNS["experts"])
            busiest = np.frombuffer(record.busiest, dtype=COLUMNS["busiest"])
            which = np.frombuffer(record.busiest_experts, dtype=COLUMNS["busiest_experts"])
        except ValueError:
            return None
        num, num_layers = len(experts), record.first_layer + len(busiest)
        is_read = 0 < len(busiest) == len(which) and (which < num).all()
        if not is_read or num * num_layers > _MOST_CELLS or not 0 < record.per_token <= num:
            return None
        if self._busiest.shape[1] != num:  # the first record, or another model
            self.num_experts, self._busiest = num, np.zeros((0, num), dtype=np.int64)
        if len(self._busiest) < num_layers:
            more = np.zeros((num_layers - len(self._busiest), num), dtype=np.int64)
            self._busiest = np.concatenate([self._busiest, more])
        self._busiest[np.arange(record.first_layer, num_layers), which] += busiest
        step = Routing(
            experts.sum(dtype=np.int64).item() / num,
            len(busiest) * even_busiest(record.tokens, num, record.per_token),
            busiest.sum(dtype=np.int64).item(),
        )
        self.mean_tokens += step.mean
        self.even_tokens += step.even
        self.busiest_tokens += step.busiest
        return step

    @property
    def imbalance(self) -> float | None:
        """Return the busiest experts' load over the mean; None without tokens."""
        return self.busiest_tokens / self.mean_tokens if self.mean_tokens else None

    @property
    def even_imbalance(self) -> float | None:
        """Return the same ratio for an even router; None without tokens."""
        return self.even_tokens / self.mean_tokens if self.mean_tokens else None

    @property
    def hottest(self) -> tuple[int, int, float] | None:
        """Return the expert with most tokens while it was its layer's busiest; None without tokens.

        Returns:
            its layer, its index, and the share of the load of the layer's busiest experts that it
            had.
        """
        if not self.busiest_tokens:
            return None
        layer, expert = divmod(self._busiest.argmax().item(), self.num_experts)
        return layer, expert, (self._busiest[layer, expert] / self._busiest[layer].sum()).item()
