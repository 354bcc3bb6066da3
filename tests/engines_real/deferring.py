"""A `sitecustomize` for SGLang's processes: hooks record behind launches, as on a device."""

from __future__ import annotations

import os

if os.environ.get("DEFERS") == "1":
    from inferscope.adapters.sglang import hooks as sglang_hooks

    sglang_hooks.is_asynchronous = lambda scheduler: True
