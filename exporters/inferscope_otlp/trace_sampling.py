"""Which requests become traces: whatever went wrong, what the client records, a share of the rest.

    failed, or beyond a threshold            kept
    the client's trace is recorded           kept: else its trace would have a hole; up to
                                             `client_traces_per_s`, beyond that as without one
    the client's trace is not recorded       not kept: ours would be a piece of nothing
    no trace of the client's                 kept by its trace id, at `keep_share`

The share is drawn from the trace id as OpenTelemetry's consistent probability sampling draws it
(trace SDK specification, TraceIdRatioBased: the rightmost 56 bits), so that a request exported
twice is kept twice or not at all.
"""

from __future__ import annotations

from inferscope.collector.finals import FinalRequest
from inferscope_otlp.finished import Ints
from inferscope_otlp.identity import Parent
from inferscope_otlp.settings import OtlpSettings

FAILURES = frozenset({"timeout", "server_abort", "rejected", "error", "engine_lost", "shed"})
"""Ends that the server answers for; a client's own leaving is none."""
_DRAWN_BITS = 56
_NS_PER_MS = 1e6


def verdicts(request: FinalRequest, tbt_ns: Ints | None, settings: OtlpSettings) -> dict[str, bool]:
    """Return, for each threshold that is set and can be decided, whether the request kept to it.

    TTFT is bad as soon as the deadline passes without a token, whatever the request's end. TBT is
    judged by the longest of the gaps. An answer in one piece has neither.
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
    """Rate limit of traces that are kept because the client records them.

    Its clock is that of the requests' ends. A second's number may come at once.
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
    """Decide whether a request becomes a trace.

    Args:
        request: what it was.
        found: its verdicts.
        parent: the client's span.
        drawn_id: a hash of the request, which the client cannot choose.
        share: of the unremarkable ones to keep, 0..1.
        limit: of what is kept because the client records it.
    """
    if request.finish in FAILURES or not all(found.values()):
        return True
    if parent is not None and (not parent.is_sampled or limit.take(request.delivered_ns)):
        return parent.is_sampled
    drawn = drawn_id & ((1 << _DRAWN_BITS) - 1)
    return drawn >= (1 - share) * (1 << _DRAWN_BITS)
