"""Error budgets by model label: the number of labels is bounded, that of models is not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from inferscope.fold import BudgetView, SloState


def labelled(promised: SloState, label_of: Callable[[str], str]) -> SloState:
    """Return the state with a label for each model; models with one label share one budget.

    The remaining budget of several models is computed from their summed requests.
    """
    by_label: dict[tuple[str, str], list[BudgetView]] = {}
    for budget in promised.budgets:
        by_label.setdefault((label_of(budget.model), budget.objective.name), []).append(budget)
    return replace(
        promised, budgets=tuple(_as_one(model, same) for (model, _), same in by_label.items())
    )


def _as_one(model: str, budgets: Sequence[BudgetView]) -> BudgetView:
    first = budgets[0]
    if len(budgets) == 1:
        return replace(first, model=model)
    good, bad = (
        sum(nums) for nums in zip(*((b.num_good, b.num_bad) for b in budgets), strict=True)
    )
    may_be_bad = sum((b.num_good + b.num_bad) * b.objective.budget for b in budgets)
    return BudgetView(model, first.objective, good, bad, 1.0 - bad / may_be_bad if bad else 1.0)
