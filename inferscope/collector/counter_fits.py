"""Regressions that go on: over the last windows, made anew every few of them."""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from inferscope.attribution.regression import FEWEST_WINDOWS, Estimate, estimate

Floats = NDArray[np.float64]

_KEPT_WINDOWS = 600
_FIT_EVERY = 10


class RollingFit:
    """A regression over the last windows, made anew every few."""

    _DROPPED = (0, 1, 2)
    """How many of the last columns to do without, until the others can be told apart."""

    def __init__(self, columns: tuple[str, ...]) -> None:
        self._num_columns = len(columns)
        self._rows: deque[tuple[Floats, float]] = deque(maxlen=_KEPT_WINDOWS)
        self._num_new = 0
        self._estimate: Estimate | None = None

    def add(self, columns: Floats, sums: Floats) -> None:
        """Take windows: [windows, columns] and [windows]."""
        for row, total in zip(columns, sums.tolist(), strict=True):
            if row.any():
                self._rows.append((row, total))
                self._num_new += 1

    def now(self) -> Estimate | None:
        """Return the rates, None where they cannot be told."""
        is_first = self._estimate is None and self._num_new > 0
        if len(self._rows) >= FEWEST_WINDOWS and (is_first or self._num_new >= _FIT_EVERY):
            self._num_new = 0
            columns = np.array([row for row, _ in self._rows])
            sums = np.array([total for _, total in self._rows])
            self._estimate = None
            for num_dropped in self._DROPPED if self._num_columns > 2 else (0,):
                kept = columns[:, : self._num_columns - num_dropped]
                found = estimate(kept, sums)
                if found is not None:
                    none = (None,) * num_dropped
                    self._estimate = Estimate(
                        found.rates + none, found.errors + none, found.fit_error, found.num_windows
                    )
                    break
        return self._estimate

    def expected(self, columns: tuple[Floats, ...]) -> Floats | None:
        """Return each step's columns at these rates, None where they cannot be told."""
        found = self.now()
        if found is None:
            return None
        return np.stack([column * found.of(at) for at, column in enumerate(columns)], axis=1)

    def error(self) -> float | None:
        """Return the fit's error, relative to what it explains."""
        return None if self._estimate is None else self._estimate.fit_error
