"""What samples say of one finished request, and how far that is to be believed."""

from __future__ import annotations

import msgspec

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
    given = left.given.tolist()
    for counted, name in NAMES.items():
        totals = [float(phase[BY[counted]]) for phase in left.totals]
        parts = [phase[counted] for phase in given]
        pairs = list(zip(parts, totals, strict=True))
        if not any(totals) or any(part[KNOWN] < _LEAST_COVER * total for part, total in pairs):
            continue
        for amounts, (part, total) in zip(by_phase, pairs, strict=True):
            known = part[KNOWN]
            amounts[name] = round(part[VALUE] * total / known) if known > 0 else 0
        value, blurred = (sum(part[of] for part in parts) for of in (VALUE, BLURRED))
        blur = blurred / value if value > 0 else 0.0
        is_measured = blur <= MOST_BLUR
        fit_error = None if is_measured else errors.get(counted)
        provenance[name] = Provenance(
            "measured" if is_measured else "apportioned",
            sources.get(counted, ""),
            blur if fit_error is None and is_measured else fit_error,
        )
    return RequestCounters(*by_phase, provenance)
