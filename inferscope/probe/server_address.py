"""Where a server is, as the connection has it by which a request came: attributes of its record."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def server_place(scope: Mapping[str, Any]) -> dict[str, str]:
    """Return the address and the port of ASGI's scope; nothing of a socket that has no port."""
    host, port = scope.get("server") or (None, None)
    return {} if port is None else {"server.address": str(host), "server.port": str(port)}
