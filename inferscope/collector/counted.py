"""What samples say of one finished request, and how far that is to be believed."""

from __future__ import annotations

import msgspec

from inferscope.collector.accounts import (
    BUSY,
    BY,
    ENERGY,
    NUM_COUNTED,
    READ,
    SM_ACTIVE,
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
    of_prefill: dict[str, int] = {}
    of_decode: dict[str, int] = {}
    provenance = {}
    prefill, decode = left.given.reshape(2, NUM_COUNTED, 3).tolist()
    prefill_totals, decode_totals = left.totals
    for counted, name in NAMES.items():
        prefill_total, decode_total = prefill_totals[BY[counted]], decode_totals[BY[counted]]
        prefill_value, prefill_known, prefill_blurred = prefill[counted]
        decode_value, decode_known, decode_blurred = decode[counted]
        if (
            not (prefill_total or decode_total)
            or prefill_known < _LEAST_COVER * prefill_total
            or decode_known < _LEAST_COVER * decode_total
        ):
            continue
        of_prefill[name] = _whole(prefill_value, prefill_known, prefill_total)
        of_decode[name] = _whole(decode_value, decode_known, decode_total)
        value, blurred = prefill_value + decode_value, prefill_blurred + decode_blurred
        blur = blurred / value if value > 0 else 0.0
        source = sources.get(counted, "")
        if blur <= MOST_BLUR:
            provenance[name] = Provenance("measured", source, blur)
        else:
            provenance[name] = Provenance("apportioned", source, errors.get(counted))
    return RequestCounters(of_prefill, of_decode, provenance)


def _whole(value: float, known: float, total: int) -> int:
    """Return what all of a total takes, if the rest is like what is known of it."""
    return round(value * total / known) if known > 0 else 0
