"""What the adapters need of each engine, and whether an installed one has it."""
