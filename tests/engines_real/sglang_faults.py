"""A `sitecustomize` for SGLang's processes: it puts a fault into one hook of ours after another.

A fault switches an adapter off for good. So that one server can be tried with them all, a thread
waits for the next name in a file, observes again as if nothing had been, and says so in the log.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

CORE = (
    *("enqueued", "scheduled", "launching", "launched", "forward_begins"),
    *("forward_ends", "result_begins", "result_ends", "streamed", "aborted"),
)
FRONT_END = ("sending", "sending_batch", "received")
EDGE = ("_sent", "_end")
EDGE_FUNCTIONS = ("_begin", "_leaving")
AT_START = "opening"
_POLL_S = 0.02


class Saboteur:
    """Has one hook fail, and observes again for the next."""

    def __init__(self, order: Path) -> None:
        self._order = order
        self._failing = order.read_text()
        self._observe: Callable[[], None] | None = None

    def install(self) -> None:
        """Stand in front of every hook."""
        from inferscope.adapters import edge
        from inferscope.adapters.sglang import hooks as sglang_hooks
        from inferscope.adapters.sglang.frontend import FrontEndWatch
        from inferscope.adapters.sglang.scheduler import SchedulerWatch

        for owner, names in (
            (SchedulerWatch, CORE),
            (FrontEndWatch, FRONT_END),
            (edge.Edge, EDGE),
            (edge, EDGE_FUNCTIONS),
        ):
            for name in names:
                setattr(owner, name, self._gate(name, getattr(owner, name)))
        for hooks in (sglang_hooks.SchedulerHooks, sglang_hooks.FrontEndHooks):
            hooks._open = self._opening(hooks._open, sglang_hooks.patches)

    def _gate(self, name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(hook)
        def gate(*args: Any, **kwargs: Any) -> Any:
            if self._failing == name:
                raise RuntimeError(f"put into {name}")
            return hook(*args, **kwargs)

        return gate

    def _opening(self, original: Callable[..., None], patches: Any) -> Callable[..., None]:
        @functools.wraps(original)
        def opening(*args: Any, **kwargs: Any) -> None:
            def again() -> None:
                patches.restore()
                patches.probes.clear()
                patches.is_off = False
                original(*args, **kwargs)

            if self._observe is None:
                self._observe = again
                threading.Thread(target=self._wait, daemon=True).start()
            if self._failing == AT_START:
                raise RuntimeError(f"put into {AT_START}")
            original(*args, **kwargs)

        return opening

    def _wait(self) -> None:
        assert self._observe is not None
        while True:
            time.sleep(_POLL_S)
            order = self._order.read_text()
            if order != self._failing:
                self._failing = ""
                self._observe()
                self._failing = order
                sys.stderr.write(f"ready: {order} in {os.getpid()}\n")
                sys.stderr.flush()


if "FAULTS" in os.environ:
    Saboteur(Path(os.environ["FAULTS"])).install()
