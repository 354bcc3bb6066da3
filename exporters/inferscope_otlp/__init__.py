"""OpenTelemetry exporter: one trace per finished request, over OTLP."""

from inferscope_otlp.exporter import OtlpExporter

__all__ = ["OtlpExporter"]
