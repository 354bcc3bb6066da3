"""OpenTelemetry's variables of the environment: they hold for us too.

Only those that say who runs it and how to reach the receiver; ours come from the configuration.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from urllib.parse import unquote


def environment_headers(signal: str) -> dict[str, str]:
    """Return the headers that the environment wants sent; those of the signal take precedence."""
    found: dict[str, str] = {}
    for name in ("OTEL_EXPORTER_OTLP_HEADERS", f"OTEL_EXPORTER_OTLP_{signal}_HEADERS"):
        found |= {key.lower(): value for key, value in parse_pairs(os.environ.get(name, ""))}
    return found


def environment_file(word: str, signal: str) -> str | None:
    """Return a file that the environment names: CERTIFICATE, CLIENT_CERTIFICATE or CLIENT_KEY."""
    of_signal = os.environ.get(f"OTEL_EXPORTER_OTLP_{signal}_{word}")
    return of_signal or os.environ.get(f"OTEL_EXPORTER_OTLP_{word}") or None


def parse_pairs(words: str) -> Iterator[tuple[str, str]]:
    """Return the pairs of `key=value,key=value`, percent-decoded, as W3C Baggage writes them."""
    for word in words.split(","):
        key, is_pair, value = word.partition("=")
        if is_pair and key.strip():
            yield unquote(key.strip()), unquote(value.strip())
