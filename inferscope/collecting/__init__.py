"""One collector per host: it follows all rings, feeds live exporters and pins incidents."""
