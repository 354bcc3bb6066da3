"""Rolling regressions over the last windows, refitted every few windows.

A fit needs a few sums over its windows, so its cost does not depend on their number. Subtracting
old windows from a sum would leave a rounding error of each for ever. So nothing is subtracted. For
the older windows there are suffix sums, and removing the oldest window drops one of them:

    older  [sum of all, of all but the first, ..., the last]  ◄─ rebuilt when none is left
    newer   sum                                               ◄─ window by window

Windows wait until a fit is due. Until a first fit succeeds, each batch of windows triggers an
attempt. It first checks whether the fewest columns are separable: that takes fewer sums than a fit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from operator import add

from inferscope.attribution import (
    FEWEST_WINDOWS,
    HIGHEST_CONDITION,
    Equations,
    Estimate,
    condition_of,
    products,
    squares,
)

Window = tuple[Sequence[float], float]
"""Amount of each column in a window, and the value that the window counted."""

_KEPT_WINDOWS = 600
_FIT_EVERY = 10


class RollingFit:
    """Regression over the last windows, refitted every few windows."""

    def __init__(self, columns: tuple[str, ...]) -> None:
        num = len(columns)
        self._num_columns = num
        self._fewest_columns = max(num - 2, min(num, 2))
        """Number of leading columns to fit until the others are separable too."""
        self._new: list[Window] = []
        """Windows since the last attempt to fit."""
        self._unsummed: deque[Window] = deque(maxlen=_KEPT_WINDOWS)
        """Windows that are not in the sums of products."""
        self._squares = _LastSums(len(squares([0.0] * self._fewest_columns)), _KEPT_WINDOWS)
        self._sums = _LastSums(len(products([0.0] * num, 0.0)), _KEPT_WINDOWS)
        self._estimate: Estimate | None = None

    def add(self, columns: Sequence[float], value: float) -> None:
        """Add a window: the amount of each column in it, and its counted value."""
        if any(columns):
            self._new.append((columns, value))

    def take(
        self, columns: Sequence[Sequence[float]], values: Sequence[float]
    ) -> list[Estimate | None]:
        """Add windows in order; return the rates by which to divide each window.

        The interval between fits does not depend on the number of windows per call. Before the
        first fit, all windows of the call contribute to it and are divided by it.
        """
        if self._estimate is None:
            for window in zip(columns, values, strict=True):
                self.add(*window)
            return [self.now()] * len(values)
        found = []
        for window in zip(columns, values, strict=True):
            self.add(*window)
            found.append(self.now())
        return found

    def now(self) -> Estimate | None:
        """Return the current rates, None while they are undetermined."""
        num_new = len(self._new)
        is_due = num_new >= (1 if self._estimate is None else _FIT_EVERY)
        if is_due and self._squares.num + num_new >= FEWEST_WINDOWS:
            for columns, _ in self._new:
                self._squares.add(squares(columns[: self._fewest_columns]))
            self._unsummed.extend(self._new)
            self._new.clear()
            self._estimate = self._fit()
        return self._estimate

    def error(self) -> float | None:
        """Return the error of the fit, relative to the values that it explains."""
        return None if self._estimate is None else self._estimate.fit_error

    def _fit(self) -> Estimate | None:
        # More columns are never separable where fewer are not (interlacing eigenvalues).
        if condition_of(self._squares.total(), self._fewest_columns) > HIGHEST_CONDITION:
            return None
        while self._unsummed:
            self._sums.add(products(*self._unsummed.popleft()))
        sums, num = self._sums.total(), self._sums.num
        for num_kept in range(self._num_columns, self._fewest_columns, -1):
            equations = Equations(sums, self._num_columns, num_kept)
            if equations.condition() <= HIGHEST_CONDITION:
                return equations.estimate(num)
        return Equations(sums, self._num_columns, self._fewest_columns).estimate(num)


class _LastSums:
    """Sums over the last rows of numbers.

    Attributes:
        num: number of rows in the sums.
    """

    def __init__(self, num_columns: int, most: int) -> None:
        self._most = most
        self.num = 0
        self._newer: deque[list[float]] = deque()
        self._newer_sum = [0.0] * num_columns
        self._older_sums: list[list[float]] = []
        """Sum of the last older row, of the last two, and so on."""
        self._none = [0.0] * num_columns

    def add(self, row: list[float]) -> None:
        """Add a row; it replaces the oldest one if the window is full."""
        if self.num == self._most:
            if not self._older_sums:
                sums = self._none
                while self._newer:
                    sums = list(map(add, self._newer.pop(), sums))
                    self._older_sums.append(sums)
                self._newer_sum = self._none
            self._older_sums.pop()
        else:
            self.num += 1
        self._newer.append(row)
        self._newer_sum = list(map(add, self._newer_sum, row))

    def total(self) -> list[float]:
        """Return the sums over all rows."""
        older = self._older_sums[-1] if self._older_sums else self._none
        return list(map(add, older, self._newer_sum))
