"""Where vLLM is observed: four of its modules, each when a process imports it.

    front end  vllm.v1.engine.async_llm       `frontend`  requests and answers over HTTP
    starts     vllm.v1.engine.core_client     `starts`    ids of engines in one process
    core       vllm.v1.core.sched.scheduler   `core`      plans, slices, lives of requests
    worker     vllm.v1.worker.worker_base     `worker`    when a step was executed

A process may play several of these parts. The core gives each step a number, which rides on the
scheduler's output to the workers; a request goes by vLLM's internal id, which front end and core
share.
"""

from __future__ import annotations

from importlib.util import find_spec
from types import ModuleType

from inferscope.adapters import inject
from inferscope.adapters.patching import Patches
from inferscope.adapters.vllm.core import CoreHooks
from inferscope.adapters.vllm.frontend import FrontEndHooks
from inferscope.adapters.vllm.starts import Starts
from inferscope.adapters.vllm.worker import WorkerHooks
from inferscope.probe import engine_id

PATCHES = Patches("vLLM")
STARTS = Starts(PATCHES)
WORKER = WorkerHooks(PATCHES)
CORE = CoreHooks(PATCHES, WORKER.is_computing_on_host)
_OBSERVERS = {
    "vllm.v1.engine.async_llm": "observe_front_end",
    "vllm.v1.engine.core_client": "observe_starts",
    "vllm.v1.core.sched.scheduler": "observe_core",
    "vllm.v1.worker.worker_base": "observe_worker",
}
_observed: set[str] = set()


def observe() -> None:
    """Observe this process's part of a server; safe to call twice."""
    engine_id()  # named before the first child is started, which inherits the name
    wanted = _OBSERVERS.keys() - _observed
    _observed.update(wanted)
    for module in sorted(wanted):
        if PATCHES.run(_exists, module) is False:
            PATCHES.unsupported(f"{module} is missing")
        else:
            inject.when_imported({module: f"{__name__}:{_OBSERVERS[module]}"})


def observe_front_end(module: ModuleType) -> None:
    """Observe the API server process."""
    FrontEndHooks(PATCHES, STARTS.id_of).install(getattr(module, "AsyncLLM", None))


def observe_starts(module: ModuleType) -> None:
    """Observe the process that starts engines."""
    STARTS.install(getattr(module, "MPClient", None))


def observe_core(module: ModuleType) -> None:
    """Observe the process that schedules."""
    CORE.install(getattr(module, "Scheduler", None))


def observe_worker(module: ModuleType) -> None:
    """Observe a process that executes."""
    WORKER.install(getattr(module, "WorkerWrapperBase", None))


def _exists(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # a package above it
        return False
