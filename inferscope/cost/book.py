"""The cost book: which model is in force, per execution mode, and how well it does.

A mode starts with the roofline of the model's shape and moves to the online fit when there is one.
Beside each model stands the ratio of measured to modelled time over its recent steps: the 20th
percentile is what a healthy step takes, the median less one is the residual that gets published.
Only a model that has learned from this engine can call a step slow. By the roofline, whole kinds of
steps take several times what they should; booked as slowness and kept from the fit, they would
never be learned.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from inferscope.cost.batch import Batch
from inferscope.cost.fit import OnlineFit, features
from inferscope.cost.model import StepModel, roofline
from inferscope.cost.peaks import peaks_of
from inferscope.records import EngineInfo

Floats = NDArray[np.float64]

_RATIOS = 256
_RATIOS_AGAIN = 16
_ENOUGH_RATIOS = 8
_SLOW = 1.5
"""Steps above this multiple of a healthy step do not enter the fit."""


class Price(msgspec.Struct, frozen=True, gc=False):
    """What a mode's steps are priced with now."""

    model: StepModel
    healthy_ratio: float | None
    """Measured over modelled time of a healthy step; None before there is a fit to tell."""


class _Mode:
    def __init__(self, name: str, model: StepModel) -> None:
        self.model = model
        self.price = Price(model, None)
        self.fit = OnlineFit(name)
        self._ratios = np.empty(_RATIOS)
        """The last ones; the oldest is written over first."""
        self._num_ratios = 0
        self.has_learned = False
        self.seen = 0
        self.healthy: float | None = None
        self.residual: float | None = None

    def note(self, ratio: float) -> None:
        """Take a step's ratio of measured to modelled time."""
        self._ratios[self._num_ratios % _RATIOS] = ratio
        self._num_ratios += 1

    def restart(self, ratios: Floats) -> None:
        """Go on with a new model, for which the last steps had these ratios."""
        self._num_ratios = len(ratios)
        self._ratios[: len(ratios)] = ratios

    def weigh(self) -> None:
        num = min(self._num_ratios, _RATIOS)
        healthy_at, median_at = num // 5, num // 2
        ordered = np.partition(self._ratios[:num], (healthy_at, median_at))
        self.healthy = ordered.item(healthy_at)
        self.residual = ordered.item(median_at) - 1.0
        self.price = Price(self.model, self.healthy if self.has_learned else None)


class CostBook:
    """Models by execution mode, for one engine."""

    def __init__(self) -> None:
        """Start with no shape known."""
        self._roofline = roofline(None, peaks_of(""))
        self._modes: dict[str, _Mode] = {}

    def describe(self, info: EngineInfo) -> None:
        """Take the model's shape and device from the engine's own words."""
        self._roofline = roofline(info.shape, peaks_of(info.device, info.num_threads))

    def price(self, mode: str) -> Price:
        """Return the model in force for a mode."""
        return self._entry(mode).price

    def residuals(self) -> dict[str, float | None]:
        """Return the median of measured/model - 1 over recent steps, by mode."""
        return {name: mode.residual for name, mode in self._modes.items()}

    def sources(self) -> dict[str, str]:
        """Return where each mode's coefficients come from."""
        return {name: mode.model.source for name, mode in self._modes.items()}

    def observe(self, mode: str, batch: Batch, *, measured_ns: int, modelled_ns: float) -> None:
        """Learn from a step that was not cold.

        Args:
            mode: in which it ran.
            batch: its requests.
            measured_ns: its time.
            modelled_ns: what the model in force said.
        """
        entry = self._entry(mode)
        ratio = measured_ns / modelled_ns if modelled_ns > 0 else 1.0
        entry.note(ratio)
        entry.seen += 1
        if entry.seen % _RATIOS_AGAIN == 0 or entry.seen == _ENOUGH_RATIOS:
            entry.weigh()
        if entry.has_learned and entry.healthy is not None and ratio > _SLOW * entry.healthy:
            return
        if measured_ns > 0 and entry.fit.observe(features(batch), measured_ns):
            model = entry.fit.solve()
            if model is not None:
                entry.model = model
                entry.has_learned = True
                entry.restart(entry.fit.ratios(_RATIOS))
                entry.weigh()

    def _entry(self, mode: str) -> _Mode:
        entry = self._modes.get(mode)
        if entry is None:
            entry = self._modes[mode] = _Mode(mode, self._roofline)
        return entry
