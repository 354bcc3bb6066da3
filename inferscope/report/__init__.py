"""Reports on a run: one request explained in sentences, device-time shares, findings, kernels."""
