"""InferScope: observability and profiling of live LLM inference."""

from __future__ import annotations

from inferscope.errors import InferScopeError
from inferscope.observing import Observation, observe

__all__ = ["InferScopeError", "Observation", "__version__", "observe"]

__version__ = "0.1.0"
