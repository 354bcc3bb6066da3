"""OpenTelemetry's environment variables.

Only those that identify the service and the receiver are read; other settings come from the
configuration.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from urllib.parse import unquote


def environment_headers(signal: str) -> dict[str, str]:
    """Return the headers from the environment; those of the signal take precedence."""
    found: dict[str, str] = {}
    for name in ("OTEL_EXPORTER_OTLP_HEADERS", f"OTEL_EXPORTER_OTLP_{signal}_HEADERS"):
        found |= {key.lower(): value for key, value in parse_pairs(os.environ.get(name, ""))}
    return found


def environment_file(setting: str, signal: str) -> str | None:
    """Return a file from the environment: CERTIFICATE, CLIENT_CERTIFICATE or CLIENT_KEY."""
    of_signal = os.environ.get(f"OTEL_EXPORTER_OTLP_{signal}_{setting}")
    return of_signal or os.environ.get(f"OTEL_EXPORTER_OTLP_{setting}") or None


def parse_pairs(text: str) -> Iterator[tuple[str, str]]:
    """Return the pairs of `key=value,key=value`, percent-decoded, as in W3C Baggage."""
    for setting in text.split(","):
        key, is_pair, value = setting.partition("=")
        if is_pair and key.strip():
            yield unquote(key.strip()), unquote(value.strip())
