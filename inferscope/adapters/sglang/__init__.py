"""The adapter for SGLang, loaded by its plug-in group in each of its processes."""

from inferscope.adapters.sglang.plugin import register

__all__ = ["register"]
