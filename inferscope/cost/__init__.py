"""What a step costs, by its shape: FLOPs, bytes, and the model of its time."""
