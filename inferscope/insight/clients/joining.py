"""Join of a client's requests with a recording's: the same request measured at both ends.

    client   sent ─────────────────────────────────────────► first token
    server         arrived ──── front end, queue, … ──► first token
             before                                              after

What the client measured beyond the server's time is spent before the server noticed the request
and after its token left: network, connection, and the client itself. The two parts are known where
both wall clocks agree; no part may be negative.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

import msgspec

from inferscope.fold import FinalRequest, FinalStep
from inferscope.insight.clients.files import ClientFile, ClientRequest
from inferscope.probe import digits

_CLOCKS_NS = 2_000_000
"""Maximum by which a part may be negative: error of the clocks' readings."""
_NUM_EXAMPLES = 3
_RESPONSE_ID = "response_id"
_NO_ID = "the client's file has no ID for it"
_NOT_RECORDED = "the recording has no request of this ID"
_SEVERAL = "the recording has several requests of this ID"
_WARM_UP = "warm-up, which the client leaves out of its own figures"
_NOT_SENT = "the client's file has no request of this ID"


class MetricPair(msgspec.Struct, frozen=True):
    """One latency of all matched requests, at both ends."""

    num: int
    """Requests for which both ends know it."""
    client_mean_ns: int
    """Mean at the client."""
    server_mean_ns: int
    """Mean at the server."""
    client_p50_ns: int
    """Median at the client."""
    server_p50_ns: int
    """Median at the server."""
    client_p99_ns: int
    """99th percentile at the client."""
    server_p99_ns: int
    """99th percentile at the server."""
    difference_mean_ns: int
    """Mean of client minus server."""
    difference_p50_ns: int
    """Median of client minus server."""
    difference_p99_ns: int
    """99th percentile of client minus server."""


class JoinedRequest(msgspec.Struct, frozen=True):
    """One matched request; unknown is None."""

    id: str
    """ID that both ends know."""
    request_id: str
    """Engine's own ID."""
    finish: str
    """Finish reason at the server."""
    client_ttft_ns: int | None
    """Time to first token at the client."""
    server_ttft_ns: int | None
    """Time to first token at the server."""
    before_ns: int | None
    """Time from the client's sending to the arrival at the server."""
    after_ns: int | None
    """Time from the server's first token to the client's."""
    frontend_ns: int | None
    """Part of the server's TTFT in its front end."""
    client_itl_ns: int | None
    """Mean time per token after the first at the client."""
    server_itl_ns: int | None
    """Mean time per token after the first at the server."""
    client_e2e_ns: int | None
    """Time to the last token at the client."""
    server_e2e_ns: int | None
    """Time to the last token at the server."""
    error: str
    """Reason why it did not finish at the client; empty if it did."""


class Unmatched(msgspec.Struct, frozen=True):
    """Requests of one end without a partner, by reason."""

    side: str
    """client or server."""
    reason: str
    """Reason for the missing partner."""
    num: int
    """Number of requests."""
    examples: tuple[str, ...]
    """First IDs."""


class Joined(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of a join."""

    client: str
    """Name of the load generator."""
    num_client: int
    """Requests in the client's file."""
    num_server: int
    """Finished requests in the recording."""
    num_matched: int
    """Requests at both ends."""
    arrived_at: str | None
    """Edge at which the server's time begins, `http` or `engine`; null if it differs."""
    ttft: MetricPair | None
    """Time to first token; null where no request has it at both ends."""
    itl: MetricPair | None
    """Mean time per token after the first."""
    e2e: MetricPair | None
    """Time to the last token."""
    before_mean_ns: int | None
    """Mean time before the arrival at the server; null where the clocks differ."""
    after_mean_ns: int | None
    """Mean time from the server's first token to the client's; null likewise."""
    frontend_mean_ns: int | None
    """Mean time in the server's front end before the first token."""
    no_parts: str
    """Reason why the parts are unknown; empty where they are known."""
    unmatched: tuple[Unmatched, ...]
    """Requests without a partner."""
    requests: tuple[JoinedRequest, ...]
    """Matched requests, in the order of the client's file."""


class JoinSink:
    """Sink that keeps the final requests of all engines."""

    def __init__(self) -> None:
        self.requests: list[FinalRequest] = []

    def on_step(self, step: FinalStep) -> None:
        """Ignore a step."""

    def on_request(self, request: FinalRequest) -> None:
        """Keep a request."""
        self.requests.append(request)


def join(file: ClientFile, requests: Sequence[FinalRequest], offset_ns: int | None) -> Joined:
    """Return the matched requests, the sums over them, and those without a partner.

    Args:
        file: requests of the client.
        requests: final requests of the server.
        offset_ns: wall clock minus monotonic clock of the server; None if unknown.
    """
    by_name = _by_name(requests)
    pairs: list[tuple[ClientRequest, FinalRequest]] = []
    alone: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    matched: set[int] = set()
    for sent in file.requests:
        found = _named(by_name, sent.id)
        matched.update(map(id, found))
        if sent.is_warm_up:
            alone["client", _WARM_UP].append(sent.id or "")
            continue
        if len(found) == 1:
            pairs.append((sent, found[0]))
            continue
        reason = _NO_ID if sent.id is None else _SEVERAL if found else _NOT_RECORDED
        if sent.error:
            reason = f"{reason}; it failed at the client ({sent.error})"
        alone["client", reason].append(sent.id or "")
    for request in requests:
        if id(request) not in matched:
            alone["server", _NOT_SENT].append(request.external_id or request.request_id)
    no_parts = _why_no_parts(pairs, offset_ns)
    rows = tuple(_row(sent, seen, None if no_parts else offset_ns) for sent, seen in pairs)
    edges = {seen.arrived_at for _, seen in pairs}
    return Joined(
        client=file.client,
        num_client=len(file.requests),
        num_server=len(requests),
        num_matched=len(pairs),
        arrived_at=edges.pop() if len(edges) == 1 else None,
        ttft=_pair((row.client_ttft_ns, row.server_ttft_ns) for row in rows),
        itl=_pair((row.client_itl_ns, row.server_itl_ns) for row in rows),
        e2e=_pair((row.client_e2e_ns, row.server_e2e_ns) for row in rows),
        before_mean_ns=_mean(row.before_ns for row in rows),
        after_mean_ns=_mean(row.after_ns for row in rows),
        frontend_mean_ns=_mean(row.frontend_ns for row in rows),
        no_parts=no_parts,
        unmatched=tuple(
            Unmatched(side, reason, len(names), tuple(filter(None, names[:_NUM_EXAMPLES])))
            for (side, reason), names in alone.items()
        ),
        requests=rows,
    )


def _by_name(requests: Iterable[FinalRequest]) -> dict[str, list[FinalRequest]]:
    """Return the requests by each of their names."""
    found: dict[str, list[FinalRequest]] = {}
    for request in requests:
        names = (request.external_id, request.request_id, request.attributes.get(_RESPONSE_ID))
        for name in {name for name in names if name}:
            found.setdefault(name, []).append(request)
    return found


def _named(by_name: dict[str, list[FinalRequest]], name: str | None) -> list[FinalRequest]:
    """Return the requests of a name; the recording may hold its digits only."""
    if name is None:
        return []
    return by_name.get(name) or by_name.get(digits(name), [])


def _why_no_parts(
    pairs: Iterable[tuple[ClientRequest, FinalRequest]], offset_ns: int | None
) -> str:
    """Return why the time before and after the server is unknown; empty where it is known."""
    if offset_ns is None:
        return "the recording has no wall clock"
    least_ns = _CLOCKS_NS
    for sent, seen in pairs:
        row = _row(sent, seen, offset_ns)
        for part_ns in (row.before_ns, row.after_ns):
            least_ns = least_ns if part_ns is None else min(least_ns, part_ns)
    if least_ns < -_CLOCKS_NS:
        return f"the clocks of client and server differ by {-least_ns / 1e6:.0f} ms or more"
    return ""


def _row(sent: ClientRequest, seen: FinalRequest, offset_ns: int | None) -> JoinedRequest:
    first_ns, last_ns, tokens = seen.first_token_ns, seen.last_token_ns, seen.output_tokens
    ttft_ns = None if first_ns is None else first_ns - seen.arrived_ns
    e2e_ns = None if last_ns is None else last_ns - seen.arrived_ns
    before_ns = after_ns = itl_ns = None
    if offset_ns is not None and sent.start_real_ns is not None:
        before_ns = seen.arrived_ns + offset_ns - sent.start_real_ns
        if sent.ttft_ns is not None and ttft_ns is not None:
            after_ns = sent.ttft_ns - ttft_ns - before_ns
    if first_ns is not None and last_ns is not None and tokens > 1:
        itl_ns = round((last_ns - first_ns) / (tokens - 1))
    return JoinedRequest(
        id=sent.id or "",
        request_id=seen.request_id,
        finish=seen.finish,
        client_ttft_ns=sent.ttft_ns,
        server_ttft_ns=ttft_ns,
        before_ns=before_ns,
        after_ns=after_ns,
        frontend_ns=None if seen.ledger_missing else seen.ttft_ledger_ns.get("frontend", 0),
        client_itl_ns=sent.itl_ns,
        server_itl_ns=itl_ns,
        client_e2e_ns=sent.e2e_ns,
        server_e2e_ns=e2e_ns,
        error=sent.error,
    )


def _pair(both_ns: Iterable[tuple[int | None, int | None]]) -> MetricPair | None:
    known = [(ours, theirs) for ours, theirs in both_ns if ours is not None and theirs is not None]
    if not known:
        return None
    client, server = sorted(ours for ours, _ in known), sorted(theirs for _, theirs in known)
    apart = sorted(ours - theirs for ours, theirs in known)
    return MetricPair(
        num=len(known),
        client_mean_ns=round(sum(client) / len(known)),
        server_mean_ns=round(sum(server) / len(known)),
        client_p50_ns=_quantile(client, 0.5),
        server_p50_ns=_quantile(server, 0.5),
        client_p99_ns=_quantile(client, 0.99),
        server_p99_ns=_quantile(server, 0.99),
        difference_mean_ns=round(sum(apart) / len(known)),
        difference_p50_ns=_quantile(apart, 0.5),
        difference_p99_ns=_quantile(apart, 0.99),
    )


def _mean(values_ns: Iterable[int | None]) -> int | None:
    known = [value_ns for value_ns in values_ns if value_ns is not None]
    return round(sum(known) / len(known)) if known else None


def _quantile(ordered: Sequence[int], q: float) -> int:
    return ordered[max(0, math.ceil(q * len(ordered)) - 1)]
