"""What the adapters need of each engine, and whether an installed one has it."""

from inferscope.adapters.needs.check import engines_of

__all__ = [
    "engines_of",
]
