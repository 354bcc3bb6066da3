"""Cost of speculation: steps that verify drafts, against one token for each request.

    with      Σ T(S)                     steps that verify or draft, as measured
    without   Σ T(S, one token each)     by the model in force, scaled to the same steps

A step with drafts yields each request one token plus the accepted ones; without drafts, one. So
speculation pays off as long as Σ with is below (1 + accepted a slice) Σ without.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from inferscope.attribution import Components
from inferscope.cost import StepTable
from inferscope.fold import FinalStep
from inferscope.records import COLUMNS, LAST_CHUNK, PREFILL, VERIFY, StepSlices

Ints = NDArray[np.int64]


class Speculation:
    """Steps of one engine that verify or draft.

    Attributes:
        num_steps: number of them.
        num_slices: number of verifying slices.
        proposed: draft tokens; `accepted` likewise.
        spent_ns: measured time of those steps.
        plain_ns: modelled time of the steps with one token each.
    """

    def __init__(self) -> None:
        self.num_steps = self.num_slices = self.proposed = self.accepted = 0
        self.spent_ns = 0
        self.plain_ns = 0.0

    def add_slices(self, slices: StepSlices) -> None:
        """Add a step's rows, for the proposed and accepted tokens."""
        if VERIFY not in slices.phases:
            return
        self.num_slices += slices.phases.count(VERIFY)
        self.proposed += _sum(slices.proposed, "proposed")
        self.accepted += _sum(slices.accepted, "accepted")

    def add(self, step: FinalStep) -> None:
        """Add a step, if it speculates."""
        if step.components is None or not (step.phases >= VERIFY).any():
            return
        self.num_steps += 1
        self.spent_ns += step.measured_ns
        self.plain_ns += step.measured_ns * _plain_ratio(step, step.components)

    @property
    def cost_ratio(self) -> float | None:
        """Return the time of a token with speculation over without; None if unknown."""
        if not self.num_slices or not self.plain_ns:
            return None
        return self.spent_ns / ((1 + self.accepted / self.num_slices) * self.plain_ns)


def _plain_ratio(step: FinalStep, used: Components) -> float:
    """Return a step's time without drafts over its time, both by the same model."""
    table = StepTable.of_steps([(used.table, used.at)])
    modelled_ns = used.model.steps_ns(table).item()
    is_kept = step.phases <= VERIFY
    # vLLM and the reference engine verify in a row after that of the request's known token.
    for row in (step.phases == VERIFY).nonzero()[0].tolist():
        if row and step.request_ids[row - 1] == step.request_ids[row]:
            is_kept[row] = False
    if modelled_ns <= 0 or not is_kept.any():
        return 0.0
    is_prefill = step.phases[is_kept] == PREFILL
    ends_prompt = (step.flags[is_kept] & LAST_CHUNK) > 0
    tokens = np.where(is_prefill, step.tokens[is_kept], 1)
    sampled = (~is_prefill | ends_prompt).astype(np.int64)
    plain = StepTable.of(tokens, step.contexts[is_kept], sampled)
    plain_ns: float = used.model.steps_ns(plain).item()
    return plain_ns / modelled_ns


def _sum(raw: bytes, name: str) -> int:
    width = np.dtype(COLUMNS[name]).itemsize
    usable = len(raw) - len(raw) % width
    return int(np.frombuffer(raw[:usable], dtype=COLUMNS[name]).sum())
