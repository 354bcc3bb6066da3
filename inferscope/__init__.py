"""InferScope: where a live LLM request's time went."""

from __future__ import annotations

from inferscope.errors import InferScopeError

__all__ = ["InferScopeError", "__version__"]

__version__ = "0.1.0"
