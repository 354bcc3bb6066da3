"""The adapter for vLLM, loaded by its plug-in group in each of its processes."""

from inferscope.adapters.vllm.plugin import register

__all__ = ["register"]
