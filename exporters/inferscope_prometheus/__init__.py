"""Prometheus exporter: metrics of a host's engines as counters, gauges and histograms."""

from inferscope_prometheus.exporter import PrometheusExporter

__all__ = ["PrometheusExporter"]
