"""What each of several things took, from sums only: regression that is never negative.

A counter that is read every 100 ms tells one sum for all steps in between. Over many such windows,
in which the parts differ, the sums give the parts away:

    sm_active_ns[w] = Σ rate[p] · busy_ns[p, w]          p: prefill, decode

as long as the parts do differ. Where they rise and fall together no arithmetic can tell them apart,
and the answer is None: the condition index of the columns at unit length beyond 30 is the limit of
Belsley, Kuh and Welsch, "Regression Diagnostics" (1980), section 3.2.
"""

from __future__ import annotations

from itertools import combinations

import msgspec
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

FEWEST_WINDOWS = 50
HIGHEST_CONDITION = 30.0


class Estimate(msgspec.Struct, frozen=True):
    """What one unit of each column takes.

    Attributes:
        rates: [columns], None for a column that was 0 throughout.
        errors: [columns], one standard error each; of a rate held at 0, None.
        fit_error: root mean square of what is left over, over the mean of the sums.
        num_windows: that it comes from.
    """

    rates: tuple[float | None, ...]
    errors: tuple[float | None, ...]
    fit_error: float
    num_windows: int

    def of(self, column: int) -> float:
        """Return a column's rate, 0 where none was seen."""
        return self.rates[column] or 0.0


def estimate(columns: Floats, sums: Floats) -> Estimate | None:
    """Fit non-negative rates.

    Args:
        columns: [windows, columns], how much of each there was.
        sums: [windows], what all of it took.

    Returns:
        None where the windows are too few, or the columns too much alike.
    """
    num, num_columns = columns.shape
    lengths = np.sqrt(np.einsum("ij,ij->j", columns, columns))
    there = np.flatnonzero(lengths > 0)
    if num < FEWEST_WINDOWS or not len(there) or condition(columns) > HIGHEST_CONDITION:
        return None
    unit = columns[:, there] / lengths[there]
    scaled, in_use = _non_negative(unit.T @ unit, unit.T @ sums)
    left = sums - unit @ scaled
    spread = float(left @ left) / max(1, num - len(in_use))
    rates: list[float | None] = [None] * num_columns
    errors: list[float | None] = [None] * num_columns
    for at, column in enumerate(there.tolist()):
        rates[column] = float(scaled[at] / lengths[column])
    if in_use:
        active = unit[:, in_use]
        variances = spread * np.diagonal(np.linalg.inv(active.T @ active))
        for variance, at in zip(variances.tolist(), in_use, strict=True):
            column = int(there[at])
            errors[column] = float(max(variance, 0.0) ** 0.5 / lengths[column])
    mean = float(np.abs(sums).mean())
    fit_error = float(np.sqrt((left @ left) / num)) / mean if mean else 0.0
    return Estimate(tuple(rates), tuple(errors), fit_error, num)


def condition(columns: Floats) -> float:
    """Return how nearly the columns are multiples of each other; those of nothing but 0 are out."""
    lengths = np.sqrt(np.einsum("ij,ij->j", columns, columns))
    unit = columns[:, lengths > 0] / lengths[lengths > 0]
    if unit.shape[1] < 2:
        return 1.0
    largest, *_, smallest = np.linalg.svd(unit, compute_uv=False)
    return float(largest / smallest) if smallest > 0 else float("inf")


def _non_negative(gram: Floats, products: Floats) -> tuple[Floats, list[int]]:
    """Return the best non-negative solution of the normal equations, and the columns not at 0.

    All sets of columns are tried: there are five columns at most, and the answer is exact.
    """
    num = len(products)
    best, best_gain, best_set = np.zeros(num), 0.0, list[int]()
    for size in range(num, 0, -1):
        for chosen in combinations(range(num), size):
            at = list(chosen)
            try:
                part = np.linalg.solve(gram[np.ix_(at, at)], products[at])
            except np.linalg.LinAlgError:
                continue
            gain = float(part @ products[at])  # how much the sum of squares falls
            if part.min() >= 0 and gain > best_gain:
                best, best_gain, best_set = np.zeros(num), gain, at
                best[at] = part
        if best_set and size == num:
            break  # nothing can do better than all of them
    return best, best_set
