"""vLLM's plug-in, in its group `vllm.general_plugins`.

vLLM calls `register` in every process of a server: front ends, engine cores, workers. It may call
it twice, and it calls it whether or not anybody wants to observe: so this module imports nothing.
"""

import os


def register() -> None:
    """Observe this process, if INFERSCOPE=1; otherwise do nothing at all."""
    if os.environ.get("INFERSCOPE") != "1":
        return
    from inferscope.host_signals import pass_on

    try:
        from inferscope.adapters.vllm.hooks import observe

        observe()
    except Exception as error:  # vLLM would end: it calls plug-ins without a guard
        pass_on(error)
        import logging

        what, logger = type(error).__name__, logging.getLogger("inferscope")
        try:
            logger.error("inferscope: not observing: %s: %s", what, error)
        except Exception as fault:  # of a filter or a handler of the host
            pass_on(fault)
