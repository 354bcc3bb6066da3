"""The Grafana dashboards, as Python: `python -m dashboards.generate` writes them as JSON."""
