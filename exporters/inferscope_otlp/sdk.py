"""The one module that knows OpenTelemetry: our spans as the SDK's, sent by the SDK's exporter.

The SDK encodes, compresses, retries and speaks TLS, and obeys its environment variables for
headers, certificates and resource attributes.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterable, Iterator
from functools import lru_cache
from urllib.parse import unquote

from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

import inferscope
from inferscope_otlp import names
from inferscope_otlp.courier import NotDelivered
from inferscope_otlp.finished import Engine
from inferscope_otlp.settings import Settings
from inferscope_otlp.spans import Span, Trace

_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_SCOPE = InstrumentationScope(names.SCOPE, inferscope.__version__)
_UNSET = Status(StatusCode.UNSET)
_MAX_RESOURCES = 64
_MOST_WORDS = 400
_LEAST = 4
"""Characters of a secret: taking every 1 out of an error would make it unreadable."""


class Post:
    """Sends traces; its `send` blocks, its `stop` ends that where the SDK can be interrupted."""

    def __init__(self, settings: Settings) -> None:
        """Make the SDK's exporter; nothing is sent yet."""
        is_gzip = settings.compression == "gzip"
        self._exporter = OTLPSpanExporter(
            endpoint=settings.endpoint,
            headers=dict(settings.headers),
            timeout=settings.timeout_s,  # type: ignore[arg-type, unused-ignore]  # int until 1.30
            compression=Compression.Gzip if is_gzip else Compression.NoCompression,
        )
        self._resource = lru_cache(_MAX_RESOURCES)(lambda engine: resource(engine, settings))
        self._words = _LastWords((*settings.secrets, *_headers_of_environment()))

    def send(self, traces: list[tuple[Engine, Trace]]) -> None:
        """Send traces.

        Raises:
            NotDelivered: they did not arrive, after the retries that the timeout has room for.
                Before its version 1.35 the SDK retried an answer of 5xx for a minute all the same.
        """
        spans = [
            span
            for engine, trace in traces
            for span in readable_spans(trace, self._resource(engine))
        ]
        self._words.take()
        try:
            result = self._exporter.export(spans)
        except OSError as error:  # some versions let the HTTP client's errors through
            raise NotDelivered(self._words.clean(str(error))) from error
        if result is not SpanExportResult.SUCCESS:
            raise NotDelivered(self._words.take() or "no reason given")

    def stop(self) -> None:
        """Send nothing more; what waits for its next try is given up."""
        self._exporter.shutdown()  # type: ignore[no-untyped-call, unused-ignore]

    def close(self) -> None:
        """Let go of what was taken at the start."""
        self._words.forget()


def resource(engine: Engine, settings: Settings) -> Resource:
    """Return what served: who runs InferScope may name it by OTEL_RESOURCE_ATTRIBUTES."""
    defaults = {names.SERVICE_NAME: "inferscope", names.HOST_NAME: socket.gethostname()}
    ours: dict[str, str | bool] = {names.SERVICE_INSTANCE_ID: engine.engine_id}
    if settings.service_name:
        ours[names.SERVICE_NAME] = settings.service_name
    if engine.device:
        ours[names.HW_NAME] = engine.device
    if engine.version:
        ours[names.ENGINE_VERSION] = engine.version
    if engine.is_synthetic:
        ours[names.SYNTHETIC] = True
    return Resource(defaults).merge(OTELResourceDetector().detect()).merge(Resource(ours))


def readable_spans(trace: Trace, of: Resource) -> Iterator[ReadableSpan]:
    """Return a trace as the SDK's spans, the root first."""
    parent = trace.parent
    above = None
    if parent is not None:
        flags = _SAMPLED if parent.is_sampled else TraceFlags(TraceFlags.DEFAULT)
        above = SpanContext(parent.trace_id, parent.span_id, is_remote=True, trace_flags=flags)
    context = SpanContext(trace.trace_id, trace.root.span_id, False, _SAMPLED)
    status = Status(StatusCode.ERROR, trace.failure) if trace.failure else _UNSET
    yield _readable(trace.root, context, above, of, kind=SpanKind.SERVER, status=status)
    for child in trace.children:
        own = SpanContext(trace.trace_id, child.span_id, False, _SAMPLED)
        yield _readable(child, own, context, of, kind=SpanKind.INTERNAL, status=_UNSET)


def _readable(
    span: Span,
    context: SpanContext,
    parent: SpanContext | None,
    of: Resource,
    *,
    kind: SpanKind,
    status: Status,
) -> ReadableSpan:
    return ReadableSpan(
        span.name,
        context,
        parent,
        resource=of,
        attributes=span.attributes,
        events=[Event(each.name, each.attributes, each.at_ns) for each in span.events],
        kind=kind,
        status=status,
        start_time=span.start_ns,
        end_time=span.end_ns,
        instrumentation_scope=_SCOPE,
    )


def _headers_of_environment() -> Iterator[str]:
    """Return the values that the SDK adds by itself."""
    for name in ("OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_TRACES_HEADERS"):
        for pair in os.environ.get(name, "").split(","):
            value = pair.partition("=")[2].strip()
            yield from (value, unquote(value))


class _LastWords(logging.Handler):
    """Keeps what the SDK's exporter says of a post, instead of logging it at every try.

    The SDK's exporter tells its caller that a post failed, and only its log why.
    """

    def __init__(self, secrets: Iterable[str]) -> None:
        super().__init__(logging.WARNING)
        # As they are, as an error quotes them, and without the word before ("Bearer SECRET").
        found = {form for each in secrets for form in (each, repr(each)[1:-1], *each.split()[1:])}
        self._secrets = sorted((each for each in found if len(each) >= _LEAST), key=len)[::-1]
        self._first = ""
        self._logger = logging.getLogger(OTLPSpanExporter.__module__)
        self._had_propagated = self._logger.propagate
        if self._logger.level == logging.NOTSET:  # else somebody wants to read it
            self._logger.propagate = False
        self._logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the first words: they name the cause, the later ones say that it was given up."""
        self._first = self._first or record.getMessage()

    def take(self) -> str:
        """Return what was said since the last time."""
        first, self._first = self._first, ""
        return self.clean(first)

    def clean(self, words: str) -> str:
        """Return words without the headers' values and the endpoint's query: keys stand there."""
        for secret in self._secrets:
            words = words.replace(secret, "…")
        return words[:_MOST_WORDS]

    def forget(self) -> None:
        """Leave the SDK's log to itself."""
        self._logger.removeHandler(self)
        self._logger.propagate = self._had_propagated
