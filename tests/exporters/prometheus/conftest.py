"""The recording that the trace exporter's tests fold, for these too."""

from __future__ import annotations

from tests.exporters.otlp.conftest import finals

__all__ = ["finals"]
