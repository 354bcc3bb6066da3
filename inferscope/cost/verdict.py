"""Accuracy of the cost model on steps, and whether a split by it is reliable.

    residual = median over steps of measured / modelled, less one; not of cold steps

Modelled is the time by the model in force when the step was split, so that the residual is about
the split that is shown. Which steps, is named beside it: an engine's last ones, a request's own.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable

RESIDUAL_STEPS = 256
"""Number of an engine's last steps whose median is its residual."""
_ROUGH = 1.25
_UNRELIABLE = 2.0


def residual_of(residuals: Iterable[float]) -> float | None:
    """Return the median of steps' residuals, None without steps."""
    known = list(residuals)
    return statistics.median(known) if known else None


def times_off(residual: float) -> float:
    """Return how many times longer or shorter than modelled steps are, at least 1."""
    ratio = max(1.0 + residual, 1e-6)
    return max(ratio, 1.0 / ratio)


def split_verdict(residual: float | None, *, is_provisional: bool = False) -> str:
    """Return briefly why a split is unreliable; nothing if it is sound.

    Args:
        residual: of the steps that were split; None where it is not known.
        is_provisional: few steps have corrected the model, so it is still getting better.
    """
    off = 1.0 if residual is None else times_off(residual)
    if off < _ROUGH:
        return ""
    times = f"model {off:.1f}× off".replace(".0×", "×") if off < 100 else "model 100× off or more"
    if off < _UNRELIABLE:
        return f"{times}: split is rough"
    return f"{times}: split not reliable{' yet' if is_provisional else ''}"
