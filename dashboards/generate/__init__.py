"""Grafana dashboards in Python: `python -m dashboards.generate` writes them as JSON."""
