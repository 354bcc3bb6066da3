"""A fault for the reference engine's core: while a file exists, its scheduler admits nothing.

On the PYTHONPATH of `inferscope serve`. INFERSCOPE_TEST_ADMITS_NOTHING names the file. Running
requests go on; with none left, the loop polls its inbox and makes no step.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from pathlib import Path

_CORE = "inferscope.engine.server.core"
_IDLE_S = 0.02


def _break(fault: Path) -> None:
    from inferscope.engine.core import Engine, Output
    from inferscope.engine.scheduler import Plan, Scheduler

    schedule, step = Scheduler.schedule, Engine.step

    def schedule_without_queue(scheduler: Scheduler) -> Plan:
        if not fault.exists():
            return schedule(scheduler)
        queue, scheduler.waiting = scheduler.waiting, deque()
        try:
            return schedule(scheduler)
        finally:
            scheduler.waiting.extend(queue)

    def step_or_idle(engine: Engine) -> list[Output]:
        if fault.exists() and not engine.scheduler.running:
            time.sleep(_IDLE_S)
            return engine._take_inbox()
        return step(engine)

    Scheduler.schedule = schedule_without_queue  # type: ignore[method-assign]
    Engine.step = step_or_idle  # type: ignore[method-assign]


if _CORE in sys.orig_argv:
    _break(Path(os.environ["INFERSCOPE_TEST_ADMITS_NOTHING"]))
