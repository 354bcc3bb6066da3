"""A server's /metrics page over HTTP: totals and gauges of a server that is not observed."""
