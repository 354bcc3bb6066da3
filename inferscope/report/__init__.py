"""What a run can be told as: one request explained in sentences."""
