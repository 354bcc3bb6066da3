"""Counter values of one finished request, with their methods and errors."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from inferscope.fold.join.counter_shares import (
    BUSY,
    BY,
    ENERGY,
    NUM_BY,
    NUM_COUNTED,
    READ,
    SM_ACTIVE,
    WRITE,
)

_LEAST_COVER = 0.9
"""Least share of a request's time or bytes that samples must cover to extrapolate to the rest."""
MOST_BLUR = 0.05
"""Greatest share of a measured value from samples that two phases or requests share."""
NAMES = {
    SM_ACTIVE: "sm_active_ns",
    BUSY: "gpu_busy_ns",
    ENERGY: "energy_uj",
    READ: "hbm_read_bytes",
    WRITE: "hbm_write_bytes",
}


class Provenance(msgspec.Struct, frozen=True, gc=False):
    """Method of a number."""

    method: str
    """measured or apportioned."""
    source: str
    """Source of the samples."""
    error: float | None = None
    """Relative error: the fit's where there is one, else the share that was not measured
    separately."""


class RequestCounters(msgspec.Struct, frozen=True, gc=False):
    """Counter values of one request; values without a source are absent."""

    prefill: dict[str, int] = {}
    """Values of its prefill, by counter."""
    decode: dict[str, int] = {}
    """Values of its decode, by counter."""
    provenance: dict[str, Provenance] = {}
    """Method of each value, by counter."""


NOT_COUNTED = RequestCounters()


_PLACES = [
    (name, counted, 3 * counted, 3 * (NUM_COUNTED + counted), BY[counted], NUM_BY + BY[counted])
    for counted, name in NAMES.items()
]
"""Name and quantity, with their positions in the given values and the totals of each phase."""


class CounterReporter:
    """Reporter of the counter values of requests that end at one time."""

    def __init__(self, sources: dict[int, str], errors: dict[int, float | None]) -> None:
        """Set the sources and errors that all these requests share.

        Args:
            sources: source of each counted quantity.
            errors: errors of the fits that divided each quantity, None without a fit.
        """
        self._sources = sources
        self._places = [each for each in _PLACES if each[1] in sources]
        self._apportioned = {
            counted: Provenance("apportioned", sources.get(counted, ""), errors.get(counted))
            for counted in NAMES
        }

    def report(self, given: list[float], totals: Sequence[int]) -> RequestCounters:
        """Return the counter values of an ended request.

        Args:
            given: [phases · counted · 3], in the layout of `SettledBucket.rates`.
            totals: [phases · 3], all that the request computed.
        """
        of_prefill: dict[str, int] = {}
        of_decode: dict[str, int] = {}
        provenance = {}
        for name, counted, at_prefill, at_decode, by_prefill, by_decode in self._places:
            prefill_known, decode_known = given[at_prefill + 1], given[at_decode + 1]
            prefill_total, decode_total = totals[by_prefill], totals[by_decode]
            if (
                not (prefill_known or decode_known)
                or prefill_known < _LEAST_COVER * prefill_total
                or decode_known < _LEAST_COVER * decode_total
            ):
                continue
            prefill, decode = given[at_prefill], given[at_decode]
            of_prefill[name] = _whole(prefill, prefill_known, prefill_total)
            of_decode[name] = _whole(decode, decode_known, decode_total)
            value, blurred = prefill + decode, given[at_prefill + 2] + given[at_decode + 2]
            blur = blurred / value if value > 0 else 0.0
            provenance[name] = (
                Provenance("measured", self._sources.get(counted, ""), blur)
                if blur <= MOST_BLUR
                else self._apportioned[counted]
            )
        return RequestCounters(of_prefill, of_decode, provenance)


def _whole(value: float, known: float, total: int) -> int:
    """Return the value of the whole total, extrapolated from the covered part."""
    return round(value * total / known) if known > 0 else 0
