"""Counts of a request beside its time: FLOPs and bytes, or neither.

And what it did not need: the work that its cached tokens would have cost.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from inferscope.cost.flops import FlopRates, flop_rates
from inferscope.cost.hbm import HbmRates, hbm_rates
from inferscope.cost.model import BY_TOKENS, StepModel
from inferscope.cost.shape import is_counted
from inferscope.cost.step_table import StepTable
from inferscope.records import Shape


class Rates(NamedTuple):
    """FLOP and byte rates of a model's slices."""

    flops: FlopRates
    hbm: HbmRates

    def saved_flops(self, cached_tokens: int) -> int:
        """Return the FLOPs that a prompt's cached beginning would have taken."""
        return self.flops.of_slices(cached_tokens, 0, 0)


def rates_of(shape: Shape | None, num_ranks: int = 1) -> Rates | None:
    """Return the rates of a shape, None if only its time can be attributed.

    Args:
        shape: shape as the engine reports it.
        num_ranks: number of ranks that share each layer (tensor parallelism).
    """
    if shape is None or not is_counted(shape):
        return None
    try:
        return Rates(flop_rates(shape), hbm_rates(shape, num_ranks))
    except ValueError:  # no engine divides a model so: the report is wrong
        return None


def saved_ns(model: StepModel, *, prompt_tokens: int, cached_tokens: int) -> int | None:
    """Return the time that a prompt's cached beginning would have taken, by the model.

    As the prompt's prefill alone in one step, less the same with the cached tokens given: what
    chunks and companions would have changed is left out. None where the model knows no shape and
    has learned nothing yet.
    """
    if model.source == BY_TOKENS:
        return None
    whole_ns = _alone_ns(model, prompt_tokens, 0)
    return max(0, round(whole_ns - _alone_ns(model, prompt_tokens - cached_tokens, cached_tokens)))


def _alone_ns(model: StepModel, tokens: int, context: int) -> float:
    if tokens <= 0:
        return 0.0
    one = np.array([1])
    table = StepTable(np.array([tokens]), np.array([context]), one, one > 0, one)
    return model.steps_ns(table).item()
