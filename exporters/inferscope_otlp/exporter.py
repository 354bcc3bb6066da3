"""OTLP exporter in the collector's process: a trace per finished request, optionally metrics.

The fold's thread only stores the request (`request` takes microseconds and never waits); the
threads of the delivery queues encode and send. They start with the first `look`, which has the wall
clock and the models' names.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import ClassVar, NamedTuple

from msgspec.structs import replace

import inferscope
from inferscope.attribution import LatencyLimit, top_cause
from inferscope.errors import BadInput
from inferscope.fold import EngineView, FinalRequest, FinalStep, Snapshot
from inferscope_otlp import names
from inferscope_otlp.delivery_queue import DeliveryQueue
from inferscope_otlp.device_metrics import device_metrics
from inferscope_otlp.facts import FactTable
from inferscope_otlp.finished import EngineResource, Finished, Ints, gaps_of, tbt_ns_of
from inferscope_otlp.identity import Parent, parent_of, trace_id_of
from inferscope_otlp.metrics import EngineMetrics
from inferscope_otlp.post import HttpPost, Post
from inferscope_otlp.resource import resource
from inferscope_otlp.settings import GRPC, OtlpSettings, read_settings
from inferscope_otlp.spans import trace_of
from inferscope_otlp.trace_sampling import ClientTraces, should_keep, verdicts
from inferscope_otlp.wire import (
    resource_bytes,
    resource_metrics,
    resource_spans,
    scope_bytes,
    trace_bytes,
)

_NO_TIMES = array("q")
_MAX_RESOURCES = 1024
"""Maximum number of engines: each has a resource and at most one waiting metrics batch."""
_SCOPE = scope_bytes(names.SCOPE, inferscope.__version__)


class MetricsBatch(NamedTuple):
    """Metrics of one engine, waiting for delivery."""

    engine: EngineResource
    encoded: list[bytes]


class _TraceDecision(NamedTuple):
    """Decision on a request's trace."""

    request: FinalRequest
    parent: Parent | None
    trace_id: int
    tbt_ns: Ints | None
    verdicts: dict[str, bool]
    should_keep: bool


class OtlpExporter:
    """Live exporter that sends traces, and optionally metrics, to an OTLP receiver.

    Attributes:
        num_left_out: requests not kept, according to the settings.
    """

    is_live: ClassVar[bool] = True
    path_settings: ClassVar[tuple[str, ...]] = ("certificate", "client_certificate", "client_key")

    def __init__(self, settings: Mapping[str, object]) -> None:
        """Check the settings; open nothing.

        Raises:
            BadInput: a setting is unknown, or its value is invalid.
        """
        self._settings = read_settings(settings)
        self._objectives = _objectives(self._settings)
        self.num_left_out = 0
        self._client_traces = ClientTraces(self._settings.client_traces_per_s)
        self._facts = FactTable()
        self._decided: _TraceDecision | None = None
        """Decision on the last request."""
        self._engines: dict[str, EngineResource] = {}
        self._residuals: dict[str, float | None] = {}
        self._offset_ns = self._real_ns = 0
        self._resource = lru_cache(_MAX_RESOURCES)(self._resource_of)
        self._traces: tuple[Post, DeliveryQueue[Finished]] | None = None
        self._metrics: tuple[Post, DeliveryQueue[MetricsBatch]] | None = None
        self._counted: dict[str, EngineMetrics] = {}
        self._views: Sequence[EngineView] = ()
        self._since_ns = 0
        """Wall time of the first snapshot in ns."""
        self._metrics_due_ns = 0

    def describe(self) -> str:
        """Return one line on signals and destination."""
        settings = self._settings
        what = "traces and metrics" if settings.metrics_interval_s else "traces"
        line = f"OTLP {what} to {settings.shown_endpoint}"
        if settings.protocol == GRPC:
            line += " by gRPC"
        if settings.keep_share < 1:
            line += f", {settings.keep_share:g} of the unremarkable requests"
        return line

    def check(self) -> None:
        """Create the clients; the receiver need not be up.

        Raises:
            BadInput: a package is missing, or a header or certificate cannot be used.
        """
        _post(self._settings, "TRACES").close()

    def open(self) -> None:
        """Create the clients and delivery queues.

        Raises:
            BadInput: a package is missing, or a header or certificate cannot be used.
        """
        settings = self._settings
        name = f"to {settings.shown_endpoint}"
        post = _post(settings, "TRACES")
        size = settings.queue_size
        queue = DeliveryQueue(self._deliver, post.stop, max_waiting=size, name=f"traces {name}")
        self._traces = (post, queue)
        if settings.metrics_interval_s:
            post = _post(settings, "METRICS")
            # Only an engine's latest metrics matter: they are cumulative.
            metrics_queue = DeliveryQueue(
                self._deliver_metrics, post.stop, max_waiting=_MAX_RESOURCES, name=f"metrics {name}"
            )
            self._metrics = (post, metrics_queue)

    def open_replacing(self, former: OtlpExporter) -> None:
        """Create the clients; nothing of the former exporter is needed.

        Raises:
            BadInput: a package is missing, or a header or certificate cannot be used.
        """
        self.open()

    def take_over(self, former: OtlpExporter) -> None:
        """Take over the former exporter's unsent traces and its counts."""
        self._facts, self._engines = former._facts, former._engines
        self._residuals = former._residuals
        self._offset_ns, self._real_ns = former._offset_ns, former._real_ns
        self._since_ns = former._since_ns
        self._views, former._views = former._views, ()
        self._counted, former._counted = former._counted, {}
        self.num_left_out = former.num_left_out
        if self._traces is not None and former._traces is not None:
            former._traces[1].transfer_to(self._traces[1])

    def on_step(self, step: FinalStep) -> None:
        """Record a step's facts about its requests."""
        self._facts.add_step(step)

    def on_request(self, request: FinalRequest) -> None:
        """Take a finished request; never waits."""
        assert self._traces is not None, "open() comes first"
        engine_id, request_id = request.engine_id, request.request_id
        facts = self._facts.pop(engine_id, request_id, since_ns=request.admitted_ns)
        if self._metrics is not None:
            self._metrics_of(engine_id).on_request(request)
        of, self._decided = self._decide(request), None
        if not of.should_keep:
            self.num_left_out += 1
            return
        parent, found = of.parent, of.verdicts
        gaps = None if of.tbt_ns is None else gaps_of(of.tbt_ns)
        cause = None if request.judged is None else request.judged.cause
        if cause is None and not all(found.values()):
            cause = top_cause(request, self._objectives)
        # A thousand waiting requests of 100,000 tokens each would fill the memory.
        small = replace(request, token_times_ns=_NO_TIMES, tokens_per_event=())
        self._traces[1].put(Finished(small, gaps, facts, parent, found, cause, self._offset_ns))

    def kept_trace(self, request: FinalRequest) -> str | None:
        """Return the ID of a request's trace; None if it is not kept."""
        of = self._decide(request)
        return f"{of.trace_id:032x}" if of.should_keep else None

    def on_snapshot(self, snapshot: Snapshot) -> None:
        """Take the engines' names and the wall clock; send metrics when due."""
        assert self._traces is not None, "open() comes first"
        self._views = snapshot.engines
        self._engines = {view.engine_id: _engine(view) for view in self._views}
        if not snapshot.real_ns:
            return
        self._real_ns = snapshot.real_ns
        self._since_ns = self._since_ns or snapshot.real_ns
        self._offset_ns = snapshot.real_ns - snapshot.mono_ns
        self._residuals = {view.engine_id: view.model_residual for view in snapshot.engines}
        self._traces[1].start()
        self._facts.retain(self._engines)
        for engine_id in self._counted.keys() - self._engines.keys():
            del self._counted[engine_id]
        if self._metrics is None or snapshot.mono_ns < self._metrics_due_ns:
            return
        self._metrics_due_ns = snapshot.mono_ns + round(self._settings.metrics_interval_s * 1e9)
        self._send_metrics(snapshot.real_ns)

    def close(self) -> None:
        """Send what is waiting, within five seconds; the rest is dropped and counted."""
        if self._metrics is not None:
            post, metrics_queue = self._metrics
            if self._real_ns:
                self._send_metrics(self._real_ns)
            metrics_queue.close()
            post.close()
        if self._traces is not None:
            post, queue = self._traces
            queue.close()
            post.close()

    @property
    def num_sent(self) -> int:
        """Return the number of delivered traces."""
        return self._traces[1].num_sent if self._traces else 0

    @property
    def num_waiting(self) -> int:
        """Return the number of traces waiting for delivery."""
        return self._traces[1].num_waiting if self._traces else 0

    @property
    def num_dropped(self) -> dict[str, int]:
        """Return the number of dropped traces by reason: queue_full, not_delivered, closed."""
        return dict(self._traces[1].num_dropped) if self._traces else {}

    def _decide(self, request: FinalRequest) -> _TraceDecision:
        """Return the decision on a trace, by our thresholds and the collector's objectives.

        An exporter that links to traces calls it before the request itself arrives.
        """
        last = self._decided
        if last is not None and last.request is request:
            return last
        parent = parent_of(request.trace)
        own_id = trace_id_of(request.engine_id, request.request_id)
        trace_id = parent.trace_id if parent else own_id
        tbt_ns = tbt_ns_of(request)
        found = verdicts(request, tbt_ns, self._settings)
        if request.judged is not None:
            found |= request.judged.results
        share, limit = self._settings.keep_share, self._client_traces
        kept = should_keep(request, found, parent, own_id, share, limit)
        self._decided = decided = _TraceDecision(request, parent, trace_id, tbt_ns, found, kept)
        return decided

    def _metrics_of(self, engine_id: str) -> EngineMetrics:
        found = self._counted.get(engine_id)
        if found is None:
            start_ns = self._real_ns or time.time_ns()
            found = self._counted[engine_id] = EngineMetrics(start_ns)
        return found

    def _send_metrics(self, now_ns: int) -> None:
        assert self._metrics is not None
        metrics_queue = self._metrics[1]
        encoded_of = {
            view.engine_id: device_metrics(view, start_ns=self._since_ns, end_ns=now_ns)
            for view in self._views
        }
        for engine_id, counted in self._counted.items():
            engine = self._engines.get(engine_id) or EngineResource(engine_id)
            encoded_of.setdefault(engine_id, []).extend(counted.encoded(engine, now_ns))
        for engine_id, encoded in encoded_of.items():
            if encoded:
                metrics_queue.put(
                    MetricsBatch(self._engines.get(engine_id) or EngineResource(engine_id), encoded)
                )
        metrics_queue.start()

    def _deliver(self, batch: Sequence[Finished]) -> None:
        assert self._traces is not None
        engines, residuals, offset_ns = self._engines, self._residuals, self._offset_ns
        by_engine: dict[str, list[bytes]] = {}
        for finished in batch:
            engine_id = finished.request.engine_id
            engine = engines.get(engine_id) or EngineResource(engine_id)
            # A later change of the wall clock does not move a waiting trace.
            of_it_ns = finished.offset_ns or offset_ns
            trace = trace_of(finished, engine, of_it_ns, residual=residuals.get(engine_id))
            encoded = trace_bytes(trace)
            by_engine.setdefault(engine_id, []).append(encoded)
        parts = []
        for engine_id, traces in by_engine.items():
            of = self._resource(engines.get(engine_id) or EngineResource(engine_id))
            parts.append(resource_spans(of, _SCOPE, traces))
        self._traces[0].send(b"".join(parts))

    def _deliver_metrics(self, batch: Sequence[MetricsBatch]) -> None:
        assert self._metrics is not None
        last = {metrics.engine.engine_id: metrics for metrics in batch}
        parts = [
            resource_metrics(self._resource(each.engine), _SCOPE, each.encoded)
            for each in last.values()
        ]
        self._metrics[0].send(b"".join(parts))

    def _resource_of(self, engine: EngineResource) -> bytes:
        return resource_bytes(resource(engine, service_name=self._settings.service_name))


def _engine(view: EngineView) -> EngineResource:
    device_id = view.devices[0].device if len(view.devices) == 1 else ""
    return EngineResource(
        view.engine_id,
        view.engine,
        view.version,
        view.model,
        view.device,
        device_id if device_id not in (view.device, "unknown") else "",
        view.is_synthetic,
    )


def _objectives(settings: OtlpSettings) -> tuple[LatencyLimit, ...]:
    found = []
    if settings.ttft_ms is not None:
        found.append(LatencyLimit("ttft", round(settings.ttft_ms * 1e6)))
    if settings.tbt_ms is not None:
        found.append(LatencyLimit("tbt", round(settings.tbt_ms * 1e6)))
    return tuple(found)


def _post(settings: OtlpSettings, signal: str) -> Post:
    """Return the client for traces or metrics.

    Raises:
        BadInput: a package is missing, or a header or certificate cannot be used.
    """
    headers = settings.all_headers(signal)
    if settings.protocol != GRPC:
        url = settings.endpoint if signal == "TRACES" else settings.metrics_url
        return HttpPost(settings, url, headers)
    try:
        from inferscope_otlp.grpc_post import GrpcPost
    except ImportError as error:
        raise BadInput(
            f'over gRPC it needs {error.name}. Install it with: pip install "inferscope-llm[grpc]"'
        ) from error
    return GrpcPost(settings, signal, headers)
