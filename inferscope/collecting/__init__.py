"""One collector per host, or several that share its engines; live exporters; pins."""
