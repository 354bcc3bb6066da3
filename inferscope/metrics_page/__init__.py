"""A server's /metrics page, read over HTTP: totals and gauges of a server that is not observed."""
