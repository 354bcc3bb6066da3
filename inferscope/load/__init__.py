"""Open-loop load generator: realistic prompts that arrive independently of the server's pace."""
