"""Validated settings of the exporter."""

from __future__ import annotations

import difflib
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from urllib.parse import urlsplit

from inferscope.errors import BadInput
from inferscope.foreign import without_secrets
from inferscope_otlp.environment import environment_file, environment_headers

_SECTION = "exporter otlp"
_COMPRESSIONS = ("gzip", "none")
HTTP, GRPC = "http/protobuf", "grpc"
_PROTOCOLS = (HTTP, GRPC)
_DEFAULT_OF = {HTTP: "http://127.0.0.1:4318/v1/traces", GRPC: "http://127.0.0.1:4317"}
_TRACES, _METRICS = "/v1/traces", "/v1/metrics"
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
"""RFC 9110, section 5.6.2."""


@dataclass(frozen=True)
class OtlpSettings:
    """Destination and selection of traces."""

    endpoint: str = _DEFAULT_OF[HTTP]
    protocol: str = HTTP
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Additional headers; they may hold a secret and are never shown."""
    compression: str = "gzip"
    service_name: str | None = None
    keep_share: float = 1.0
    """Share of unremarkable requests to keep, 0..1."""
    client_traces_per_s: float = 50.0
    """Maximum rate of traces kept because the client records them; beyond it, `keep_share` decides.
    """
    ttft_ms: float | None = None
    """Requests whose first token took longer are always kept."""
    tbt_ms: float | None = None
    """Requests with a longer gap between tokens are always kept."""
    timeout_s: float = 10.0
    """Timeout of one try."""
    queue_size: int = 2048
    """Maximum number of traces waiting for delivery."""
    metrics_endpoint: str | None = None
    """URL over HTTP; None derives it from the traces' URL."""
    metrics_interval_s: float = 0.0
    """Seconds between two posts of metrics; 0 sends none."""
    certificate: str | None = None
    """PEM file of the receiver's authority; the next two are the client's certificate and key."""
    client_certificate: str | None = None
    client_key: str | None = None

    @property
    def shown_endpoint(self) -> str:
        """Return the endpoint without user, password and query."""
        return without_secrets(self.endpoint)

    @property
    def metrics_url(self) -> str:
        """Return the URL of metrics over HTTP."""
        if self.metrics_endpoint is not None:
            return self.metrics_endpoint
        parts = urlsplit(self.endpoint)
        return parts._replace(path=parts.path.removesuffix(_TRACES) + _METRICS).geturl()

    @property
    def tls_files(self) -> tuple[str | None, str | None, str | None]:
        """Return CA file, client certificate and key: from the settings, else the environment."""
        given = (self.certificate, self.client_certificate, self.client_key)
        words = ("CERTIFICATE", "CLIENT_CERTIFICATE", "CLIENT_KEY")
        of_ca, of_cert, of_key = (
            path or environment_file(word, "TRACES")
            for path, word in zip(given, words, strict=True)
        )
        return of_ca, of_cert, of_key

    def all_headers(self, signal: str) -> dict[str, str]:
        """Return the headers for TRACES or METRICS, including the environment's.

        Raises:
            BadInput: one of the environment's headers cannot be sent.
        """
        found = environment_headers(signal)
        for name, content in found.items():
            check_header(name, content)
        return found | {name.lower(): content for name, content in self.headers.items()}

    def tls_context(self) -> ssl.SSLContext:
        """Return the TLS context.

        Raises:
            BadInput: a certificate or key cannot be used.
        """
        of_ca, of_cert, of_key = self.tls_files
        try:
            context = ssl.create_default_context(cafile=of_ca)
            if of_cert is not None:
                context.load_cert_chain(of_cert, of_key)
        except OSError as error:  # ssl.SSLError is one
            named = ", ".join(filter(None, (of_ca, of_cert, of_key)))
            raise BadInput(f"{_SECTION}: cannot use {named}: {error.strerror or error}.") from error
        return context


_NAMES = [each.name for each in fields(OtlpSettings)]


def read_settings(section: Mapping[str, object] | None) -> OtlpSettings:
    """Check a section of the configuration.

    Raises:
        BadInput: a name is unknown, or a value is invalid.
    """
    given = {} if section is None else section
    if not isinstance(given, Mapping):
        raise BadInput(f"{_SECTION}: settings must be a mapping of names to values.")
    for name in given:
        if name not in _NAMES:
            nearest = difflib.get_close_matches(str(name), _NAMES, n=1)
            hint = f"Did you mean {nearest[0]}?" if nearest else f"Known: {', '.join(_NAMES)}."
            raise BadInput(f"{_SECTION}: unknown setting {name!r}. {hint}")
    found = OtlpSettings()
    protocol = _one_of("protocol", given.get("protocol", found.protocol), _PROTOCOLS)
    return OtlpSettings(
        endpoint=_endpoint("endpoint", given.get("endpoint", _DEFAULT_OF[protocol])),
        protocol=protocol,
        headers=_headers(given.get("headers")),
        compression=_one_of(
            "compression", given.get("compression", found.compression), _COMPRESSIONS
        ),
        service_name=_name(given.get("service_name")),
        keep_share=_number("keep_share", given.get("keep_share", found.keep_share), most=1),
        client_traces_per_s=_number(
            "client_traces_per_s",
            given.get("client_traces_per_s", found.client_traces_per_s),
            most=1e6,
        ),
        ttft_ms=_threshold("ttft_ms", given.get("ttft_ms")),
        tbt_ms=_threshold("tbt_ms", given.get("tbt_ms")),
        timeout_s=_number("timeout_s", given.get("timeout_s", found.timeout_s), least=0.1, most=60),
        queue_size=_count("queue_size", given.get("queue_size", found.queue_size)),
        metrics_endpoint=(
            None
            if given.get("metrics_endpoint") is None
            else _endpoint("metrics_endpoint", given["metrics_endpoint"])
        ),
        metrics_interval_s=_number(
            "metrics_interval_s", given.get("metrics_interval_s", 0.0), most=3600
        ),
        certificate=_file("certificate", given.get("certificate")),
        client_certificate=_file("client_certificate", given.get("client_certificate")),
        client_key=_file("client_key", given.get("client_key")),
    )


def _invalid(name: str, value: object, wanted: str) -> BadInput:
    return BadInput(f"{_SECTION}: {name} is {value!r}. Give {wanted}.")


def _endpoint(name: str, value: object) -> str:
    example = "the URL of an OTLP receiver, such as http://127.0.0.1:4318/v1/traces"
    if not isinstance(value, str):
        raise BadInput(f"{_SECTION}: {name} must be a string. Give {example}.")
    try:
        parts = urlsplit(value)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # an invalid port
        is_url = False
    if not is_url or not value.isprintable():
        raise _invalid(name, without_secrets(value), example)
    return value


def _headers(value: object) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise BadInput(f"{_SECTION}: headers must be a mapping of names to values.")
    for name, content in value.items():
        if not isinstance(name, str) or not isinstance(content, str):
            # The value may be a secret: it is not repeated.
            raise BadInput(
                f"{_SECTION}: the header {name!r} must be a string. Put its value in quotes."
            )
        check_header(name, content)
    return dict(value)


def check_header(name: str, content: str) -> None:
    """Check that a header can be sent, without repeating what may be a secret.

    Raises:
        BadInput: it cannot be sent.
    """
    if not _HEADER_NAME.fullmatch(name):
        raise BadInput(
            f"{_SECTION}: {name!r} is not a valid header name. Give letters, digits and -."
        )
    if content != content.strip() or not (content.isascii() and content.isprintable()):
        raise BadInput(
            f"{_SECTION}: the value of the header {name} has a line break, blanks around it or "
            "another invalid character. Give the value alone."
        )


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> str:
    if not isinstance(value, str) or value not in allowed:
        raise _invalid(name, value, " or ".join(allowed))
    return value


def _file(name: str, value: object) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or not value:
        raise _invalid(name, value, "a file")
    return value


def _name(value: object) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or not value:
        raise _invalid("service_name", value, "a name")
    return value


def _threshold(name: str, value: object) -> float | None:
    return None if value is None else _number(name, value, most=1e9)


def _number(name: str, value: object, *, least: float = 0, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
        raise _invalid(name, value, f"a number from {least:g} to {most:g}")
    return float(value)


def _count(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 1_000_000:
        raise _invalid(name, value, "a whole number from 1 to 1000000")
    return value
