"""OpenTelemetry resource of an engine."""

from __future__ import annotations

import os
import socket

from inferscope_otlp import names
from inferscope_otlp.attributes import Attributes
from inferscope_otlp.environment import parse_pairs
from inferscope_otlp.finished import EngineResource


def resource(engine: EngineResource, *, service_name: str | None) -> Attributes:
    """Return an engine's resource; OTEL_RESOURCE_ATTRIBUTES may override it."""
    found: Attributes = {names.SERVICE_NAME: "inferscope", names.HOST_NAME: socket.gethostname()}
    found |= dict(parse_pairs(os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")))
    named = service_name or os.environ.get("OTEL_SERVICE_NAME")
    if named:
        found[names.SERVICE_NAME] = named
    found[names.SERVICE_INSTANCE_ID] = engine.engine_id
    for name, value in (
        (names.HW_ID, engine.device_id),
        (names.HW_NAME, engine.device),
        (names.ENGINE_VERSION, engine.version),
        (names.SYNTHETIC, engine.is_synthetic),
    ):
        if value:
            found[name] = value
    return found
