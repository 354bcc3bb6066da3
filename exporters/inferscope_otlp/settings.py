"""The exporter's section of the configuration, checked once."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from urllib.parse import urlsplit

from inferscope.errors import BadInput

_SECTION = "exporter otlp"
_COMPRESSIONS = ("gzip", "none")
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
"""RFC 9110, section 5.6.2."""


@dataclass(frozen=True)
class Settings:
    """Where traces go, and which."""

    endpoint: str = "http://127.0.0.1:4318/v1/traces"
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Sent along; they may hold a secret and are shown nowhere."""
    compression: str = "gzip"
    service_name: str | None = None
    keep_share: float = 1.0
    """Of the requests that are unremarkable, 0..1."""
    ttft_ms: float | None = None
    """Requests whose first token took longer are always kept."""
    tbt_ms: float | None = None
    """Requests with a longer gap between tokens are always kept."""
    timeout_s: float = 10.0
    """For one post, with all its retries."""
    queue_size: int = 2048
    """Traces that may wait to be sent."""

    @property
    def shown_endpoint(self) -> str:
        """Return the endpoint without a user's name and password, and without its query."""
        return _without_secrets(self.endpoint)

    @property
    def secrets(self) -> tuple[str, ...]:
        """Return what no text that is logged may hold."""
        parts = urlsplit(self.endpoint)
        return tuple(filter(None, (*self.headers.values(), parts.query, parts.password or "")))


def _without_secrets(url: str) -> str:
    """Return a URL, or what was given for one, without user, password, query and fragment."""
    shown = re.split(r"[?#]", url)[0]
    scheme, slashes, rest = shown.partition("//") if "//" in shown else ("", "", shown)
    host, slash, path = rest.partition("/")
    return f"{scheme}{slashes}{host.rpartition('@')[2]}{slash}{path}"


_NAMES = [each.name for each in fields(Settings)]


def read_settings(section: Mapping[str, object] | None) -> Settings:
    """Check a section of the configuration.

    Raises:
        BadInput: a name in it is not known, or a value cannot be used.
    """
    given = {} if section is None else section
    if not isinstance(given, Mapping):
        raise BadInput(f"{_SECTION}: its settings are no mapping. Give names with their values.")
    for name in given:
        if name not in _NAMES:
            nearest = difflib.get_close_matches(str(name), _NAMES, n=1)
            hint = f"Did you mean {nearest[0]}?" if nearest else f"Known: {', '.join(_NAMES)}."
            raise BadInput(f"{_SECTION}: there is no setting {name!r}. {hint}")
    found = Settings()
    return Settings(
        endpoint=_endpoint(given.get("endpoint", found.endpoint)),
        headers=_headers(given.get("headers")),
        compression=_compression(given.get("compression", found.compression)),
        service_name=_name(given.get("service_name")),
        keep_share=_number("keep_share", given.get("keep_share", found.keep_share), most=1),
        ttft_ms=_threshold("ttft_ms", given.get("ttft_ms")),
        tbt_ms=_threshold("tbt_ms", given.get("tbt_ms")),
        timeout_s=_number("timeout_s", given.get("timeout_s", found.timeout_s), least=0.1, most=60),
        queue_size=_count("queue_size", given.get("queue_size", found.queue_size)),
    )


def _bad(name: str, value: object, wanted: str) -> BadInput:
    return BadInput(f"{_SECTION}: {name} is {value!r}. Give {wanted}.")


def _endpoint(value: object) -> str:
    example = "the URL of an OTLP/HTTP receiver, such as http://127.0.0.1:4318/v1/traces"
    if not isinstance(value, str):
        raise BadInput(f"{_SECTION}: endpoint is no text. Give {example}.")
    try:
        parts = urlsplit(value)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number
        is_url = False
    if not is_url or not value.isprintable():
        raise _bad("endpoint", _without_secrets(value), example)
    return value


def _headers(value: object) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise BadInput(f"{_SECTION}: headers is no mapping. Give names with their values.")
    for name, content in value.items():
        if not isinstance(name, str) or not isinstance(content, str):
            # The content may be a secret: it is not repeated.
            raise BadInput(f"{_SECTION}: the header {name!r} is no text. Put its value in quotes.")
        if not _HEADER_NAME.fullmatch(name):
            raise BadInput(f"{_SECTION}: {name!r} is no header's name. Give letters, digits and -.")
        if content != content.strip() or not (content.isascii() and content.isprintable()):
            raise BadInput(
                f"{_SECTION}: the value of the header {name} has a line break, blanks around it or "
                "something else that no header can have. Give the value alone."
            )
    return dict(value)


def _compression(value: object) -> str:
    if not isinstance(value, str) or value not in _COMPRESSIONS:
        raise _bad("compression", value, " or ".join(_COMPRESSIONS))
    return value


def _name(value: object) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or not value:
        raise _bad("service_name", value, "a name")
    return value


def _threshold(name: str, value: object) -> float | None:
    return None if value is None else _number(name, value, most=1e9)


def _number(name: str, value: object, *, least: float = 0, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
        raise _bad(name, value, f"a number from {least:g} to {most:g}")
    return float(value)


def _count(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 1_000_000:
        raise _bad(name, value, "a whole number from 1 to 1000000")
    return value
