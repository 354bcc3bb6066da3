"""What samples say of one finished request, and how far that is to be believed."""

from __future__ import annotations

import msgspec
import numpy as np

from inferscope.collector.accounts import (
    BLURRED,
    BUSY,
    BY,
    ENERGY,
    KNOWN,
    READ,
    SM_ACTIVE,
    VALUE,
    WRITE,
    Left,
)

_LEAST_COVER = 0.9
"""Of a request's time or bytes, that samples must cover; the rest is taken to be like it."""
MOST_BLUR = 0.05
"""Of a measured value, that comes from samples two phases or requests share."""
NAMES = {
    SM_ACTIVE: "sm_active_ns",
    BUSY: "gpu_busy_ns",
    ENERGY: "energy_uj",
    READ: "hbm_read_bytes",
    WRITE: "hbm_write_bytes",
}


class Provenance(msgspec.Struct, frozen=True, gc=False):
    """How a number came about."""

    method: str
    """measured or apportioned."""
    source: str
    error: float | None = None
    """Relative: of the fit where there is one, else what was not measured for itself."""


class RequestCounters(msgspec.Struct, frozen=True, gc=False):
    """What samples say of a request, by NAMES; what they do not say is not there."""

    prefill: dict[str, int] = {}
    decode: dict[str, int] = {}
    provenance: dict[str, Provenance] = {}


NOT_COUNTED = RequestCounters()


def told(left: Left, sources: dict[int, str], errors: dict[int, float | None]) -> RequestCounters:
    """Return what is known of a request that has ended.

    Args:
        left: what it took along.
        sources: who told what is counted.
        errors: of the fits that divided it, None where there was none.
    """
    by_phase: tuple[dict[str, int], dict[str, int]] = ({}, {})
    provenance = {}
    for counted, name in NAMES.items():
        totals = np.array([phase[BY[counted]] for phase in left.totals], dtype=np.float64)
        given = left.given[:, counted]
        if not totals.any() or (given[:, KNOWN] < _LEAST_COVER * totals).any():
            continue
        for phase in (0, 1):
            known, value = given[phase, KNOWN], given[phase, VALUE]
            by_phase[phase][name] = round(value * totals[phase] / known) if known > 0 else 0
        value, blurred = given[:, VALUE].sum(), given[:, BLURRED].sum()
        blur = float(blurred / value) if value > 0 else 0.0
        is_measured = blur <= MOST_BLUR
        fit_error = None if is_measured else errors.get(counted)
        provenance[name] = Provenance(
            "measured" if is_measured else "apportioned",
            sources.get(counted, ""),
            blur if fit_error is None and is_measured else fit_error,
        )
    return RequestCounters(*by_phase, provenance)
