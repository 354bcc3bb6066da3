"""Adapters: engines of others, observed without a change to their source."""

from inferscope.adapters.registry import SUBJECTS

__all__ = ["SUBJECTS"]
