"""A finished request as it waits to become a trace: small, however many tokens it had."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from inferscope.collector.finals import FinalRequest
from inferscope_otlp.facts import RequestFacts
from inferscope_otlp.identity import Parent

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class EngineResource:
    """Who served the requests. Empty where the engine does not say."""

    engine_id: str
    kind: str = ""
    version: str = ""
    model: str = ""
    device: str = ""
    device_id: str = ""
    is_synthetic: bool = False


class GapStats(msgspec.Struct, frozen=True, gc=False):
    """The time between a request's tokens."""

    p50_ns: float
    p99_ns: float
    max_ns: int


class Finished(msgspec.Struct, frozen=True):
    """All that its trace is made of."""

    request: FinalRequest
    """Without its tokens' times."""
    gaps: GapStats | None
    facts: RequestFacts | None
    parent: Parent | None
    verdicts: dict[str, bool]
    cause: str | None = None
    """Why it missed a threshold; None where it did not, or nobody can tell."""
    offset_ns: int = 0
    """Wall clock less monotonic clock when it had finished; 0 if not known yet."""


def tbt_ns_of(request: FinalRequest) -> Ints | None:
    """Return a request's gaps between tokens, None where there are none or part was not seen."""
    if request.is_in_one_piece or len(request.token_times_ns) < 2 or request.joined_late:
        return None
    times_ns = np.frombuffer(request.token_times_ns, dtype=np.int64)
    return times_ns[1:] - times_ns[:-1]


def gaps_of(tbt_ns: Ints) -> GapStats:
    """Return their distribution."""
    ordered = np.sort(tbt_ns)
    return GapStats(_quantile(ordered, 0.5), _quantile(ordered, 0.99), int(ordered[-1]))


def _quantile(ordered: Ints, share: float) -> float:
    """Return a quantile as `numpy.percentile` does, which takes ten times as long for few values.

    Between two values it is interpolated.
    """
    at = share * (len(ordered) - 1)
    below = int(at)
    low, high = int(ordered[below]), int(ordered[min(below + 1, len(ordered) - 1)])
    return low + (high - low) * (at - below)
