"""Validated settings of the exporter."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from inferscope.document import only
from inferscope.errors import BadInput

LAST_PORT = 65535
PATHS = ("token_file", "tls_cert", "tls_key", "tls_client_ca")
ANY_ENGINE = "*"
"""Key of `engine_metrics` for the only engine that is not named."""
_LEAST_TOKEN = 16
_MOST_TENANTS = 1000
_FEWEST_SERIES = 1000
"""Minimum of max_series; one engine has about 450."""
_MOST_SERIES = 10_000_000


@dataclass(frozen=True)
class PrometheusSettings:
    """Address, access control, tenants and limits of the metrics server."""

    host: str = "127.0.0.1"
    port: int = 9464
    token_file: Path | None = None
    """File with the bearer token that clients must send; reloaded when it changes."""
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    """CA file: clients must present a certificate that it has signed."""
    price_per_gpu_hour: float | None = None
    """Dollars per GPU hour."""
    tenants: tuple[str, ...] = ()
    """Tenants that have series from the start."""
    most_tenants: int = 20
    """Maximum number of tenants with series; all others are `other`."""
    max_series: int = 100_000
    """Maximum number of series on a page; beyond it the newest engines are left out as a whole."""
    engine_metrics: tuple[tuple[str, str], ...] = ()
    """Engine IDs, or `*`, with the pages on which the engines count their own requests."""

    @property
    def is_local(self) -> bool:
        """Return whether only this host can connect."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def url(self) -> str:
        """Return the URL of the page."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http{'s' if self.tls_cert else ''}://{host}:{self.port}/metrics"


_NAMES = [each.name for each in fields(PrometheusSettings)]


def read_settings(section: Mapping[str, object]) -> PrometheusSettings:
    """Check a section of the configuration.

    Raises:
        BadInput: a name is unknown, or a value is invalid.
    """
    only(section, _NAMES)
    found = PrometheusSettings()
    host, port = section.get("host", found.host), section.get("port", found.port)
    if not isinstance(host, str) or not host:
        raise BadInput(f"host is {host!r}. Give an address, such as {found.host}.")
    if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port <= LAST_PORT:
        raise BadInput(f"port is {port!r}. Give a number up to {LAST_PORT}; 0 takes any free one.")
    settings = PrometheusSettings(
        host,
        port,
        _path(section, "token_file"),
        _path(section, "tls_cert"),
        _path(section, "tls_key"),
        _path(section, "tls_client_ca"),
        _price(section.get("price_per_gpu_hour")),
        _tenants(section.get("tenants")),
        _most_tenants(section.get("most_tenants", found.most_tenants)),
        _max_series(section.get("max_series", found.max_series)),
        _engine_metrics(section.get("engine_metrics")),
    )
    if (settings.tls_cert is None) != (settings.tls_key is None):
        raise BadInput("tls_cert and tls_key go together. Give both, or neither.")
    if settings.tls_client_ca is not None and settings.tls_cert is None:
        raise BadInput("tls_client_ca needs TLS. Give tls_cert and tls_key as well.")
    if len(settings.tenants) > settings.most_tenants:
        raise BadInput(
            f"tenants are {len(settings.tenants)}, more than most_tenants, "
            f"{settings.most_tenants}. Name fewer, or raise it."
        )
    return settings


def read_token(path: Path) -> str:
    """Return the bearer token in a file.

    Raises:
        BadInput: it cannot be read, is readable by all users, or does not contain a token.
    """
    try:
        with path.open(encoding="ascii") as file:
            others = os.fstat(file.fileno()).st_mode & 0o007
            token = file.read(4096).strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not ASCII"
        raise BadInput(f"cannot read token_file {path}: {why}. {_advice(path, error)}") from error
    if others:
        raise BadInput(
            f"token_file {path} is readable by all users. Run chmod o= {path}, or give its volume "
            "defaultMode 0440."
        )
    if len(token) < _LEAST_TOKEN or not token.isprintable() or " " in token:
        raise BadInput(
            f"token_file {path} holds no valid token. Give at least {_LEAST_TOKEN} characters, "
            "without blanks."
        )
    return token


def _advice(path: Path, error: Exception) -> str:
    """Return advice on how to provide the token file."""
    if isinstance(error, FileNotFoundError):
        return f"Make one: (umask 027; openssl rand -hex 32 > {path})"
    if isinstance(error, PermissionError):
        return f"Give it to a group of this user's and chmod 0640 {path}, or name another."
    return "Name a file that holds one."


def _path(section: Mapping[str, object], key: str) -> Path | None:
    value = section.get(key)
    if value is None:
        return None
    if not isinstance(value, str) or not value:
        raise BadInput(f"{key} is {value!r}. Give a file.")
    return Path(value)


def _price(value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1e6:
        raise BadInput(f"price_per_gpu_hour is {value!r}. Give dollars, such as 2.5.")
    return float(value)


def _tenants(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(each, str) and each for each in value):
        raise BadInput("tenants must be a list of names. Give [name, name].")
    return tuple(dict.fromkeys(value))


def _most_tenants(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MOST_TENANTS:
        raise BadInput(f"most_tenants is {value!r}. Give a whole number up to {_MOST_TENANTS}.")
    return value


def _max_series(value: object) -> int:
    is_number = isinstance(value, int) and not isinstance(value, bool)
    if not (is_number and isinstance(value, int) and _FEWEST_SERIES <= value <= _MOST_SERIES):
        raise BadInput(
            f"max_series is {value!r}. Give a whole number from {_FEWEST_SERIES} to {_MOST_SERIES}."
        )
    return value


def _engine_metrics(value: object) -> tuple[tuple[str, str], ...]:
    if value is None:
        return ()
    if not isinstance(value, dict) or not all(isinstance(each, str) for each in value.values()):
        raise BadInput("engine_metrics must be a mapping. Give ENGINE_ID: http://HOST:PORT lines.")
    return tuple((str(engine_id), url) for engine_id, url in value.items())
