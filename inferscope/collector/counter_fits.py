"""Regressions that go on: over the last windows, made anew every few of them.

A fit follows from a few sums over its windows, so what it costs does not depend on how many these
are. A sum from which windows are taken away again would keep a trace of each: of a busy hour, for
ever. So nothing is taken away. The older windows' sums are kept from each of them on, and who goes
was the first of its sum only:

    older  [sum of all, of all but the first, ..., the last]  ◄─ all at once, when none is left
    newer   sum                                               ◄─ one by one

Windows wait until a fit is due. As long as none was found, one is tried whenever some come, and
first of all whether the fewest columns can be told apart: that takes fewer sums than a fit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from operator import add

from inferscope.attribution.regression import (
    FEWEST_WINDOWS,
    HIGHEST_CONDITION,
    Equations,
    Estimate,
    condition_of,
    products,
    squares,
)

Window = tuple[Sequence[float], float]
"""How much of each column was in it, and what all of it took."""

_KEPT_WINDOWS = 600
_FIT_EVERY = 10


class RollingFit:
    """A regression over the last windows, made anew every few."""

    def __init__(self, columns: tuple[str, ...]) -> None:
        num = len(columns)
        self._num_columns = num
        self._fewest_columns = max(num - 2, min(num, 2))
        """How many of the first to make do with, until the others can be told apart, too."""
        self._new: list[Window] = []
        """Of which nothing is known yet."""
        self._unsummed: deque[Window] = deque(maxlen=_KEPT_WINDOWS)
        """Not among the sums."""
        self._squares = _LastSums(len(squares([0.0] * self._fewest_columns)), _KEPT_WINDOWS)
        self._sums = _LastSums(len(products([0.0] * num, 0.0)), _KEPT_WINDOWS)
        self._estimate: Estimate | None = None

    def add(self, columns: Sequence[float], told: float) -> None:
        """Take a window: how much of each column was in it, and what all of it took."""
        if any(columns):
            self._new.append((columns, told))

    def take(
        self, columns: Sequence[Sequence[float]], told: Sequence[float]
    ) -> list[Estimate | None]:
        """Take windows that came together; return the rates that each is to be divided by.

        A fit is made anew as often however many come together. Where there is none yet, all of
        them make one, and are divided by it.
        """
        if self._estimate is None:
            for window in zip(columns, told, strict=True):
                self.add(*window)
            return [self.now()] * len(told)
        found = []
        for window in zip(columns, told, strict=True):
            self.add(*window)
            found.append(self.now())
        return found

    def now(self) -> Estimate | None:
        """Return the rates, None where they cannot be told."""
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
        """Return the fit's error, relative to what it explains."""
        return None if self._estimate is None else self._estimate.fit_error

    def _fit(self) -> Estimate | None:
        # More columns are never told apart where fewer are not (interlacing eigenvalues).
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
    """The sums of the last rows of numbers.

    Attributes:
        num: of the rows.
    """

    def __init__(self, num_columns: int, most: int) -> None:
        self._most = most
        self.num = 0
        self._newer: deque[list[float]] = deque()
        self._newer_sum = [0.0] * num_columns
        self._older_sums: list[list[float]] = []
        """The sum of the last of the older rows, of the last two, and so on."""
        self._none = [0.0] * num_columns

    def add(self, row: list[float]) -> None:
        """Take a row, in place of the oldest if there are as many as may be."""
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
        """Return the sums of all of them."""
        older = self._older_sums[-1] if self._older_sums else self._none
        return list(map(add, older, self._newer_sum))
