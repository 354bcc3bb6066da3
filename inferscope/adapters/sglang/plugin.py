"""The SGLang plug-in: SGLang calls `register` in each of its processes (group sglang.srt.plugins).

Nothing happens, and nothing is imported, unless `INFERSCOPE=1`. Then hooks are put into SGLang's
own registry, which places them beside those of other plug-ins once all of them are known:

    main process        tokenizer manager, HTTP server ─► a ring of role `frontend`
    scheduler process   scheduler, model worker        ─► `core`, or `worker` beside the first rank
    others              nothing

A hook without a target is reported once, as `unsupported`, and then none is placed.
"""

from __future__ import annotations

import os

_has_registered = False


def register() -> None:
    """Place the hooks that belong into this process; calling it again does nothing."""
    global _has_registered
    if os.environ.get("INFERSCOPE") != "1" or _has_registered:
        return
    _has_registered = True
    from inferscope.adapters.sglang.hooks import place_hooks

    place_hooks()
