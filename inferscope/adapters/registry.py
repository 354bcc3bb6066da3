"""Registry: every engine that is observed, and the functions that observe it.

Functions are named `module:function` and imported when their engine is: neither `import inferscope`
nor the shim of `inferscope run` may import an engine. vLLM and SGLang load their adapter
themselves, by the plug-in groups in pyproject.toml.
"""

from __future__ import annotations

SUBJECTS = {
    "transformers": "inferscope.adapters.transformers.hooks:watch",
    "llama_cpp": "inferscope.adapters.llama_cpp:watch",
    "inferscope": "inferscope.engine.watching:watch",
}
"""What observes an object given to `inferscope.observe`, by the package of its class."""

MODULES = {
    "transformers.generation.utils": "inferscope.adapters.transformers.hooks:observe_module",
    "llama_cpp.llama": "inferscope.adapters.llama_cpp:observe_module",
    "transformers.cli.serving.server": "inferscope.adapters.transformers.serve:observe_server",
}
"""What observes an engine's module once it has been imported; it is called with the module."""
