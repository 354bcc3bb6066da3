"""The sampler: a process of its own that writes what devices count into a ring of its own."""
