"""vLLM's plug-in, in its group `vllm.general_plugins`.

vLLM calls `register` in every process of a server: front ends, engine cores, workers. It may call
it twice, and it calls it whether or not anybody wants to observe: so this module imports nothing.
"""

import os


def register() -> None:
    """Observe this process, if INFERSCOPE=1; otherwise do nothing at all."""
    if os.environ.get("INFERSCOPE") != "1":
        return
    from inferscope.adapters.vllm_hooks import observe

    observe()
