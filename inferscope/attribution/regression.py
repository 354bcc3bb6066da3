"""Rates of several activities from their sums, by non-negative regression.

A counter that is read every 100 ms tells one sum for all steps in between. Over many such windows,
in which the parts differ, the sums give the parts away:

    sm_active_ns[w] = Σ rate[p] · busy_ns[p, w]          p: prefill, decode

as long as the parts do differ. Where they rise and fall together no arithmetic can tell them apart,
and the answer is None: the condition index of the columns at unit length beyond 30 is the limit of
Belsley, Kuh and Welsch, "Regression Diagnostics" (1980), section 3.2.

All of it follows from few numbers, the sums over the windows of the products of two columns, which
are kept as windows come and go (`collector.counter_fits`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations
from operator import mul

import msgspec
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Rows = list[list[float]]

FEWEST_WINDOWS = 50
HIGHEST_CONDITION = 30.0
_LEAST_PIVOT = 1e-15


class Estimate(msgspec.Struct, frozen=True):
    """Rates per unit of each column.

    Attributes:
        rates: [columns], None for a column that was 0 throughout.
        errors: [columns], one standard error each; None for a rate held at 0.
        fit_error: root mean square of the residuals over the mean of the sums.
        num_windows: number of windows.
    """

    rates: tuple[float | None, ...]
    errors: tuple[float | None, ...]
    fit_error: float
    num_windows: int

    def of(self, column: int) -> float:
        """Return the rate of a column, 0 if none was found."""
        return self.rates[column] or 0.0


def estimate(columns: Floats, sums: Floats) -> Estimate | None:
    """Fit non-negative rates.

    Args:
        columns: [windows, columns], amount of each activity.
        sums: [windows], total of all.

    Returns:
        None if the windows are too few, or the columns too similar.
    """
    num, num_columns = columns.shape
    equations = Equations(_summed(columns, sums), num_columns, num_columns)
    return None if equations.condition() > HIGHEST_CONDITION else equations.estimate(num)


def condition(columns: Floats) -> float:
    """Return the condition index of the columns, without those that are all 0."""
    num, num_columns = columns.shape
    return Equations(_summed(columns, np.zeros(num)), num_columns, num_columns).condition()


def _summed(columns: Floats, sums: Floats) -> list[float]:
    windows = zip(columns.tolist(), sums.tolist(), strict=True)
    found = np.array([products(*window) for window in windows]).reshape(len(sums), -1)
    return [float(total) for total in np.add.reduce(found)]


def products(columns: Sequence[float], total: float) -> list[float]:
    """Return a window's contribution to the sums from which rates follow.

    Args:
        columns: amount of each activity.
        total: total of all.
    """
    return [abs(total), *squares([*columns, total])]


def squares(columns: Sequence[float]) -> list[float]:
    """Return a window's contribution to the sums from which the condition index follows."""
    found: list[float] = []
    for at, first in enumerate(columns):
        found += [first * second for second in columns[at:]]
    return found


def condition_of(sums: Sequence[float], num_columns: int) -> float:
    """Return the condition index of columns: how nearly they are multiples of each other.

    Args:
        sums: sums of `squares` over the windows.
        num_columns: number of columns; those that are all 0 are excluded.
    """
    lengths, at = [], 0
    for column in range(num_columns, 0, -1):
        lengths.append(math.sqrt(sums[at]))
        at += column
    cosines, at = list[float](), 0
    for one, length in enumerate(lengths):
        for two in range(one + 1, num_columns):
            if length > 0 and lengths[two] > 0:
                cosines.append(sums[at + two - one] / (length * lengths[two]))
        at += num_columns - one
    return _condition(cosines, num_columns - lengths.count(0.0))


class Equations:
    """Normal equations of columns scaled to unit length, without those that are all 0.

    They are solved in plain Python: it is the fastest for a handful of numbers, and matrix
    libraries differ in the last digits between processors, which a replay must not.
    """

    def __init__(self, sums: Sequence[float], num_columns: int, num_kept: int) -> None:
        """Scale the first `num_kept` columns.

        Args:
            sums: sums of `products` over the windows.
            num_columns: number of columns.
            num_kept: number of columns to separate.
        """
        self._num_columns = num_columns
        self._whole, self._squares = sums[0], sums[-1]
        rows: Rows = []
        begin = 1
        for at in range(num_kept):
            end = begin + num_columns + 1 - at
            rows.append([0.0] * at + [*sums[begin:end]])
            begin = end
        self._there = there = [at for at in range(num_kept) if rows[at][at] > 0]
        """Indices of the columns that are not all 0; the attributes below follow them."""
        self._lengths = lengths = [math.sqrt(rows[at][at]) for at in there]
        self._aims = [rows[at][-1] / length for at, length in zip(there, lengths, strict=True)]
        self._gram: Rows = [[1.0] * len(there) for _ in there]
        for one, at in enumerate(there):
            for two in range(one):
                cosine = rows[there[two]][at] / (lengths[one] * lengths[two])
                self._gram[one][two] = self._gram[two][one] = cosine

    def condition(self) -> float:
        """Return the condition index of the columns."""
        gram, num = self._gram, len(self._there)
        return _condition([gram[at][two] for at in range(num) for two in range(at + 1, num)], num)

    def estimate(self, num_windows: int) -> Estimate | None:
        """Solve the equations.

        The residual follows from the sums too; below a ten-millionth of the total it is rounding.

        Args:
            num_windows: number of summed windows.

        Returns:
            None if the windows are too few or empty.
        """
        if num_windows < FEWEST_WINDOWS or not self._there:
            return None
        scaled, in_use = self._non_negative()
        left = max(self._squares - sum(map(mul, scaled, self._aims)), 0.0)
        spread = math.sqrt(left / max(1, num_windows - len(in_use)))
        rates: list[float | None] = [None] * self._num_columns
        errors: list[float | None] = [None] * self._num_columns
        for at, length, value in zip(self._there, self._lengths, scaled, strict=True):
            rates[at] = value / length
        root = _root(self._gram, in_use)
        for at, place in enumerate(in_use):
            unit = [float(other == at) for other in range(len(in_use))]
            forward = _forward(root, unit)
            error = math.sqrt(sum(map(mul, forward, forward)))
            errors[self._there[place]] = spread * error / self._lengths[place]
        fit_error = math.sqrt(left * num_windows) / self._whole if self._whole else 0.0
        return Estimate(tuple(rates), tuple(errors), fit_error, num_windows)

    def _non_negative(self) -> tuple[list[float], Sequence[int]]:
        """Return the best non-negative solution, and the columns that are not 0 in it.

        Sets of columns are tried, the largest first, until one is found that no other column would
        improve: there are five columns at most, and the answer is exact.
        """
        gram, aims, num = self._gram, self._aims, len(self._there)
        best, best_gain, best_set = [0.0] * num, 0.0, tuple[int, ...]()
        for size in range(num, 0, -1):
            for chosen in combinations(range(num), size):
                part = _solved(_root(gram, chosen), [aims[at] for at in chosen])
                if min(part) < 0:
                    continue
                solution = [0.0] * num
                for at, value in zip(chosen, part, strict=True):
                    solution[at] = value
                gain = sum(map(mul, solution, aims))  # how much the sum of squares falls
                if gain > best_gain:
                    best, best_gain, best_set = solution, gain, chosen
                    others = [at for at in range(num) if at not in chosen]
                    if all(aims[at] <= sum(map(mul, gram[at], solution)) for at in others):
                        return best, best_set
        return best, best_set


def _condition(cosines: list[float], num: int) -> float:
    """Return the condition index of columns.

    Args:
        cosines: cosines of the first and each later column, of the second and each later one, ….
        num: number of columns.
    """
    if num < 2:
        return 1.0
    if num == 2:
        cosine = abs(cosines[0])
        smallest, largest = 1 - cosine, 1 + cosine
    elif num == 3:
        smallest, largest = _extremes_of_three(*cosines)
    else:
        gram = np.eye(num)
        gram.T[np.triu_indices(num, 1)] = cosines
        smallest, *_, largest = np.linalg.eigvalsh(gram).tolist()  # which reads the lower half
    return math.sqrt(largest / smallest) if smallest > 0 else math.inf


def _extremes_of_three(first: float, second: float, third: float) -> tuple[float, float]:
    """Return the least and largest eigenvalue of three columns' cosines.

    By the angle that solves their cubic: O. K. Smith, "Eigenvalues of a symmetric 3 x 3 matrix"
    (Communications of the ACM 4, 1961).
    """
    wide = math.sqrt((first * first + second * second + third * third) / 3)
    if wide == 0:
        return 1.0, 1.0
    angle = math.acos(max(-1.0, min(1.0, first * second * third / wide**3))) / 3
    return 1 + 2 * wide * math.cos(angle + 2 * math.pi / 3), 1 + 2 * wide * math.cos(angle)


def _root(gram: Rows, chosen: Sequence[int]) -> Rows:
    """Return the Cholesky factor of the chosen columns' part of a matrix."""
    root: Rows = []
    for at in chosen:
        row: list[float] = []
        for above, other in zip(root, chosen, strict=False):
            row.append((gram[at][other] - sum(map(mul, row, above))) / above[-1])
        # Rounding may leave nothing or less for nearly identical columns.
        row.append(math.sqrt(max(gram[at][at] - sum(map(mul, row, row)), _LEAST_PIVOT)))
        root.append(row)
    return root


def _forward(root: Rows, aims: list[float]) -> list[float]:
    """Solve a lower triangular system."""
    found: list[float] = []
    for row, aim in zip(root, aims, strict=True):
        found.append((aim - sum(map(mul, row, found))) / row[-1])
    return found


def _solved(root: Rows, aims: list[float]) -> list[float]:
    """Solve a system by the Cholesky factor of its matrix."""
    found = _forward(root, aims)
    for at in range(len(found) - 1, -1, -1):
        for row, later in zip(root[at + 1 :], found[at + 1 :], strict=True):
            found[at] -= row[at] * later
        found[at] /= root[at][at]
    return found
