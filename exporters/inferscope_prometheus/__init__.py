"""Prometheus: what the engines of a host do, as plain counters, gauges and histograms."""

from inferscope_prometheus.exporter import PrometheusExporter

__all__ = ["PrometheusExporter"]
