"""OTLP over gRPC; the only module that imports grpc, the extra `grpc`."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

import grpc

from inferscope_otlp.delivery_queue import NotDelivered
from inferscope_otlp.settings import OtlpSettings

SERVICES = {
    "TRACES": "/opentelemetry.proto.collector.trace.v1.TraceService/Export",
    "METRICS": "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export",
}
_AGAIN = frozenset(
    {
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.OUT_OF_RANGE,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DATA_LOSS,
    }
)
"""Retryable status codes according to the OTLP specification."""


class GrpcPost:
    """Client that sends messages to a gRPC service."""

    def __init__(self, settings: OtlpSettings, signal: str, headers: dict[str, str]) -> None:
        """Prepare the channel; the first message connects.

        Raises:
            BadInput: a certificate cannot be used.
        """
        parts = urlsplit(settings.endpoint)
        is_tls = parts.scheme == "https"
        host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
        target = f"{host}:{parts.port or 4317}"
        if is_tls:
            settings.tls_context()  # its errors on certificate files are clearer than gRPC's
            of_ca, of_cert, of_key = map(_content, settings.tls_files)
            credentials = grpc.ssl_channel_credentials(of_ca, of_key, of_cert)
            self._channel = grpc.secure_channel(target, credentials)
        else:
            self._channel = grpc.insecure_channel(target)
        self._export = self._channel.unary_unary(SERVICES[signal])  # bytes in, bytes out
        self._metadata = tuple((name.lower(), value) for name, value in headers.items())
        self._timeout_s = settings.timeout_s
        self._compression = (
            grpc.Compression.Gzip
            if settings.compression == "gzip"
            else grpc.Compression.NoCompression
        )
        self._call: grpc.Future | None = None

    def send(self, message: bytes) -> None:
        """Send a message.

        Raises:
            NotDelivered: it was not delivered.
        """
        call = self._call = self._export.future(
            message,
            timeout=self._timeout_s,
            metadata=self._metadata,
            compression=self._compression,
        )
        try:
            call.result()
        except grpc.FutureCancelledError as error:
            raise NotDelivered("CANCELLED", retry_after_s=0.0) from error
        except grpc.RpcError as error:
            code = error.code()
            again = 0.0 if code in _AGAIN else None
            raise NotDelivered(f"the receiver answers {code.name}", retry_after_s=again) from error

    def stop(self) -> None:
        """Cancel the call in progress."""
        if self._call is not None:
            self._call.cancel()

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()


def _content(path: str | None) -> bytes | None:
    return None if path is None else Path(path).read_bytes()
