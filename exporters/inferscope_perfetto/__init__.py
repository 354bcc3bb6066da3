"""Perfetto exporter: a trace of steps and requests that opens in ui.perfetto.dev."""

from inferscope_perfetto.exporter import PerfettoExporter

__all__ = ["PerfettoExporter"]
