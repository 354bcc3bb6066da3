"""Spans of a finished request: a pure function, independent of libraries, deterministic.

    {operation} {model}        root    arrived → delivered
    ├─ inferscope.queue                queued → admitted
    ├─ inferscope.prefill              admitted → first token     an event per chunk
    ├─ inferscope.decode               first token → last token   sums only, nothing per token
    ├─ inferscope.preempted    0..n    preempted → resumed
    └─ inferscope.kv_transfer  0..n    KV blocks requested → complete   linked to the sender

An interrupted phase ends with the request. Children stay within their root. Unknown values are left
out, never zero. Requests with incomplete records (`joined_late`) have no sums.
"""

from __future__ import annotations

import msgspec

from inferscope.fold import KvTransfer
from inferscope_otlp import names
from inferscope_otlp.attributes import (
    Attributes,
    blame_attributes,
    decode_attributes,
    operation_of,
    prefill_attributes,
    root_attributes,
)
from inferscope_otlp.facts import PrefillChunk
from inferscope_otlp.finished import EngineResource, Finished
from inferscope_otlp.identity import Parent, span_id_of, span_ids_of, trace_id_of
from inferscope_otlp.trace_sampling import FAILURES

_NS_PER_S = 1e9
_MOST_PREEMPTED = 64
"""Maximum number of preemption spans; `inferscope.preemptions` counts all."""
_ROOT = "root"


class SpanEvent(msgspec.Struct, frozen=True):
    """Event of a span; time in nanoseconds of the wall clock."""

    name: str
    at_ns: int
    attributes: Attributes


class SpanLink(msgspec.Struct, frozen=True):
    """Link to a related span."""

    trace_id: int
    span_id: int


class TraceSpan(msgspec.Struct, frozen=True):
    """One span; times are nanoseconds of the wall clock."""

    name: str
    span_id: int
    start_ns: int
    end_ns: int
    attributes: Attributes
    events: tuple[SpanEvent, ...] = ()
    link: SpanLink | None = None


class Trace(msgspec.Struct, frozen=True):
    """Spans of one request."""

    trace_id: int
    parent: Parent | None
    root: TraceSpan
    children: tuple[TraceSpan, ...]
    failure: str | None
    """Failure of the request; None without one."""


def trace_of(
    finished: Finished, engine: EngineResource, offset_ns: int, *, residual: float | None = None
) -> Trace:
    """Return a request's trace.

    Args:
        finished: the request.
        engine: its engine.
        offset_ns: wall clock minus monotonic clock.
        residual: residual of the engine's cost model: measured/modelled - 1.
    """
    request, parent = finished.request, finished.parent
    builder = _Builder(finished, offset_ns)
    operation = operation_of(request)
    name = f"{operation} {engine.model}" if engine.model else operation
    return Trace(
        parent.trace_id if parent else trace_id_of(request.engine_id, request.request_id),
        parent,
        builder.root(name, root_attributes(finished, engine, operation, residual)),
        tuple(builder.children()),
        request.finish if request.finish in FAILURES else None,
    )


class _Builder:
    """Builder of a request's spans on the wall clock, within the request and in sequence."""

    def __init__(self, finished: Finished, offset_ns: int) -> None:
        self._finished = finished
        self._offset_ns = offset_ns
        request = finished.request
        self._span_id = span_ids_of(request.engine_id, request.request_id)
        self._through_ns = request.arrived_ns
        """End of the last phase."""
        self._end_ns = max(request.delivered_ns, request.arrived_ns)

    def root(self, name: str, attributes: Attributes) -> TraceSpan:
        """Return the root span. A model name that arrives late does not change its ID."""
        since_ns, until_ns = self._finished.request.arrived_ns, self._end_ns
        return self._span(name, since_ns, until_ns, attributes, key=_ROOT)

    def children(self) -> list[TraceSpan]:
        """Return the phases in order, then the preemptions."""
        finished, request = self._finished, self._finished.request
        queued_ns, admitted_ns = request.queued_ns, request.admitted_ns
        first_ns, last_ns = request.first_token_ns, request.last_token_ns
        chunks = finished.facts.chunks if finished.facts else []
        found = []
        if queued_ns is not None:
            waited_for = blame_attributes(request, "queue")
            found.append(self._phase(names.SPAN_QUEUE, queued_ns, admitted_ns, waited_for))
        if admitted_ns is not None:
            attributes = prefill_attributes(finished)
            first = [chunk for chunk in chunks if first_ns is None or chunk.start_ns < first_ns]
            found.append(
                self._phase(names.SPAN_PREFILL, admitted_ns, first_ns, attributes, chunks=first)
            )
        if first_ns is not None and last_ns is not None:
            # A request that lost its cache recomputes chunks.
            again = [chunk for chunk in chunks if chunk.start_ns >= first_ns]
            attributes = decode_attributes(finished)
            if last_ns > first_ns or request.decode_ns:
                found.append(
                    self._phase(names.SPAN_DECODE, first_ns, last_ns, attributes, chunks=again)
                )
        for number, (since_ns, until_ns) in enumerate(request.preempted_ns[:_MOST_PREEMPTED]):
            key = f"{names.SPAN_PREEMPTED} {number}"
            since_ns, until_ns = self._within(since_ns, until_ns, request.arrived_ns)
            found.append(self._span(names.SPAN_PREEMPTED, since_ns, until_ns, {}, key=key))
        return found + [self._transfer(*each) for each in enumerate(request.transfers)]

    def _transfer(self, number: int, transfer: KvTransfer) -> TraceSpan:
        """Return a transfer's span, linked to the root span on the worker that sent the blocks.

        If a router gave both workers the client's traceparent, that span is in the same trace.
        """
        request, sender = self._finished.request, (transfer.peer, transfer.peer_request_id)
        since_ns, until_ns = self._within(transfer.start_ns, transfer.end_ns, request.arrived_ns)
        attributes: Attributes = {names.TRANSFER_BYTES: transfer.num_bytes}
        if transfer.peer:
            attributes[names.TRANSFER_PEER] = transfer.peer
        link = None
        if transfer.peer_request_id:
            parent = self._finished.parent
            trace_id = parent.trace_id if parent else trace_id_of(*sender)
            link = SpanLink(trace_id, span_id_of(*sender, _ROOT))
        key = f"{names.SPAN_KV_TRANSFER} {number}"
        return self._span(
            names.SPAN_KV_TRANSFER, since_ns, until_ns, attributes, key=key, link=link
        )

    def _phase(
        self,
        name: str,
        since_ns: int,
        until_ns: int | None,
        attributes: Attributes,
        *,
        chunks: list[PrefillChunk] | None = None,
    ) -> TraceSpan:
        """Return the next phase's span; an interrupted phase ends with the request."""
        until_ns = self._end_ns if until_ns is None else until_ns
        since_ns, self._through_ns = self._within(since_ns, until_ns, self._through_ns)
        events = tuple(self._event(chunk, since_ns, self._through_ns) for chunk in chunks or ())
        return self._span(name, since_ns, self._through_ns, attributes, events=events)

    def _within(self, since_ns: int, until_ns: int, least_ns: int) -> tuple[int, int]:
        since_ns = min(max(since_ns, least_ns), self._end_ns)
        return since_ns, min(max(until_ns, since_ns), self._end_ns)

    def _span(
        self,
        name: str,
        since_ns: int,
        until_ns: int,
        attributes: Attributes,
        *,
        events: tuple[SpanEvent, ...] = (),
        key: str = "",
        link: SpanLink | None = None,
    ) -> TraceSpan:
        offset_ns, span_id = self._offset_ns, self._span_id(key or name)
        times_ns = since_ns + offset_ns, until_ns + offset_ns
        return TraceSpan(name, span_id, *times_ns, attributes, events, link)

    def _event(self, chunk: PrefillChunk, since_ns: int, until_ns: int) -> SpanEvent:
        at_ns = min(max(chunk.start_ns, since_ns), until_ns)
        attributes: Attributes = {
            names.CHUNK_TOKENS: chunk.num_tokens,
            names.CHUNK_CONTEXT: chunk.num_context,
            names.CHUNK_DURATION: (chunk.end_ns - chunk.start_ns) / _NS_PER_S,
            names.GPU_SECONDS: chunk.share_ns / _NS_PER_S,
        }
        if chunk.is_recomputed:
            attributes[names.CHUNK_RECOMPUTED] = True
        return SpanEvent(names.EVENT_CHUNK, at_ns + self._offset_ns, attributes)
