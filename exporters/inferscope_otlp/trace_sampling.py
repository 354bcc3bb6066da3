"""Trace sampling: every failure or miss, the client's recorded traces, a share of the rest.

    failed, or beyond a threshold            kept
    the client's trace is recorded           kept, else its trace would have a gap; up to
                                             `client_traces_per_s`, beyond that as without one
    the client's trace is not recorded       not kept: ours would be a fragment
    no client trace                          kept by its trace ID, at `keep_share`

The share is drawn from the trace ID by OpenTelemetry's consistent probability sampling (trace SDK
specification, TraceIdRatioBased: the rightmost 56 bits), so that a request exported twice is kept
twice or never.
"""

from __future__ import annotations

from inferscope.fold import FinalRequest
from inferscope_otlp.finished import Ints
from inferscope_otlp.identity import Parent
from inferscope_otlp.settings import OtlpSettings

FAILURES = frozenset({"timeout", "server_abort", "rejected", "error", "engine_lost", "shed"})
"""Finish reasons that the server is responsible for; a client's cancellation is none."""
_DRAWN_BITS = 56
_NS_PER_MS = 1e6


def verdicts(request: FinalRequest, tbt_ns: Ints | None, settings: OtlpSettings) -> dict[str, bool]:
    """Return whether the request met each threshold that is set and decidable.

    TTFT is missed once the deadline passes without a token, for any finish reason. TBT is judged by
    the longest gap. A non-streamed response has neither.
    """
    found: dict[str, bool] = {}
    if request.is_in_one_piece:
        return found
    if settings.ttft_ms is not None:
        first_ns, limit_ns = request.first_token_ns, settings.ttft_ms * _NS_PER_MS
        if first_ns is not None:
            found["ttft"] = first_ns - request.arrived_ns <= limit_ns
        elif not request.joined_late and request.delivered_ns - request.arrived_ns > limit_ns:
            found["ttft"] = False
    if settings.tbt_ms is not None and tbt_ns is not None:
        found["tbt"] = int(tbt_ns.max()) <= settings.tbt_ms * _NS_PER_MS
    return found


class ClientTraces:
    """Rate limit of traces kept because the client records them.

    Its clock is the requests' end times. A second's number may arrive at once.
    """

    def __init__(self, per_s: float) -> None:
        """Start with a second's number."""
        self._per_s = self._left = per_s
        self._at_ns = 0

    def take(self, at_ns: int) -> bool:
        """Count a trace at a time; return whether it is within the limit."""
        passed_s = max(0, at_ns - self._at_ns) / 1e9
        self._at_ns = max(self._at_ns, at_ns)
        self._left = min(max(1.0, self._per_s), self._left + passed_s * self._per_s)
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True


def should_keep(
    request: FinalRequest,
    found: dict[str, bool],
    parent: Parent | None,
    drawn_id: int,
    share: float,
    limit: ClientTraces,
) -> bool:
    """Return whether a request becomes a trace.

    Args:
        request: the final request.
        found: its verdicts.
        parent: the client's span.
        drawn_id: hash of the request, which the client cannot choose.
        share: share of unremarkable requests to keep, 0..1.
        limit: rate limit of traces kept because the client records them.
    """
    if request.finish in FAILURES or not all(found.values()):
        return True
    if parent is not None and (not parent.is_sampled or limit.take(request.delivered_ns)):
        return parent.is_sampled
    drawn = drawn_id & ((1 << _DRAWN_BITS) - 1)
    return drawn >= (1 - share) * (1 << _DRAWN_BITS)
