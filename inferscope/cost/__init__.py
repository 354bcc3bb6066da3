"""Cost of a step from its shape: FLOPs, bytes, and the model of its time."""
