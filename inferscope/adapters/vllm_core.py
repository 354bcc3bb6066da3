"""vLLM's core: the scheduler, hooked where it decides and where outputs leave.

The methods are those of its interface, which custom schedulers keep. What is told of them is in
`vllm_steps.py`.
"""

from __future__ import annotations

import atexit
from collections.abc import Mapping
from time import monotonic_ns
from typing import Any

from inferscope.adapters.patching import Around, Patches
from inferscope.adapters.vllm_info import data_rank, engine_info
from inferscope.adapters.vllm_steps import Core, Tag
from inferscope.adapters.vllm_transfers import Transfers, groups_of
from inferscope.probe import Probe

SCHEDULER = "the scheduler"
_NEEDED = (
    *("vllm_config", "requests", "kv_cache_manager", "get_request_counts"),
    *("max_num_running_reqs", "max_num_scheduled_tokens"),
)
"""Attributes of a scheduler that the hooks read in every step."""


class CoreHooks:
    """Observes the schedulers of a process; all of it runs in the core's own loop."""

    def __init__(self, patches: Patches) -> None:
        self._patches = patches
        self._core: Core | None = None
        self._first_step = 0
        """The next scheduler's: no two steps of a process have the same number."""

    def install(self, scheduler_class: Any) -> None:
        """Hook `Scheduler`: what begins and ends requests and steps whole, or not at all."""
        if self._hook(scheduler_class, {"__init__": Around(after=self.made)}):
            return
        self._patches.around(scheduler_class, "__init__", after=self.made_otherwise)

    def _hook(self, scheduler_class: Any, more: Mapping[str, Around]) -> bool:
        patches = self._patches
        is_whole = patches.unit(
            SCHEDULER,
            scheduler_class,
            {
                **more,
                "add_request": Around(self.adding, self.added),
                "schedule": Around(self.scheduling, self.scheduled),
                "update_from_output": Around(self.updating, self.updated),
                "finish_requests": Around(after=self.aborted),
            },
        )
        if is_whole:
            closing = {"shutdown": Around(after=self.closed)}
            patches.unit("its shutdown in good order", scheduler_class, closing)
            patches.unit("pauses", scheduler_class, {"set_pause_state": Around(after=self.turned)})
        return is_whole

    def made_otherwise(self, _: None, result: None, scheduler: Any, *args: Any, **kw: Any) -> None:
        """Open this process's ring, which reports that this scheduler is unsupported."""
        config = scheduler.vllm_config
        probe = Probe.open(engine_info(config), role="core", rank=data_rank(config))
        self._patches.attach(probe, is_observing=False)
        atexit.register(probe.close)

    def made(self, _: None, result: None, scheduler: Any, *args: Any, **kw: Any) -> None:
        """Open this process's ring."""
        if self._core is not None:
            if self._core.scheduler is not None:
                self._patches.unsupported("a second scheduler in one process")
                return
            self._leave(self._core)  # gone without a shutdown
        missing = [name for name in _NEEDED if not hasattr(scheduler, name)]
        if missing:
            self._patches.unsupported(f"{SCHEDULER}: it has no {', '.join(missing)}")
            self.made_otherwise(None, None, scheduler)
            return
        if not self._hook(type(scheduler), {}):  # a subclass, with methods of its own
            self.made_otherwise(None, None, scheduler)
            return
        config = scheduler.vllm_config
        probe = Probe.open(engine_info(config), role="core", rank=data_rank(config))
        self._patches.attach(probe)
        self._core = core = Core(scheduler, probe, first_step=self._first_step)
        connector = getattr(scheduler, "connector", None)
        if connector is None:
            return
        groups = groups_of(scheduler)
        if groups:
            Transfers(core, groups).install(self._patches, connector)
        else:
            self._patches.unsupported("KV transfers: the scheduler's kv_cache_config is missing")

    def adding(self, scheduler: Any, request: Any) -> None:
        """A request is about to enter the queue, or a session's last input has come."""
        core = self._of(scheduler)
        if core is not None:
            core.adding = request.request_id

    def added(self, _: None, result: None, scheduler: Any, request: Any) -> None:
        """A request enters the queue."""
        core = self._of(scheduler)
        if core is not None:
            core.added(request)

    def scheduling(self, scheduler: Any, *args: Any, **kw: Any) -> int:
        """Take the time at which scheduling begins."""
        return monotonic_ns()

    def scheduled(self, start_ns: int, output: Any, scheduler: Any, *args: Any, **kw: Any) -> None:
        """A step is planned."""
        core = self._of(scheduler)
        if core is not None:
            core.scheduled(output, start_ns=start_ns)

    def updating(self, scheduler: Any, scheduler_output: Any, model_runner_output: Any) -> None:
        """A step's outputs have come; what they say of draft tokens is trimmed later."""
        core = self._of(scheduler)
        if core is not None:
            core.judged(scheduler_output, model_runner_output)

    def updated(
        self, _: None, result: Any, scheduler: Any, scheduler_output: Any, *args: Any, **kw: Any
    ) -> None:
        """A step's outputs leave the core."""
        core = self._of(scheduler)
        if core is None:
            return
        if scheduler_output.num_scheduled_tokens and Tag.of(scheduler_output) is None:
            self._core = None
            what = f"{SCHEDULER}: its steps are not planned by its method schedule"
            self._patches.unsupported(what)
            core.probe.unsupported(what, is_everything=True)
            return
        core.updated(scheduler_output, result)

    def aborted(
        self, _: None, result: Any, scheduler: Any, request_ids: Any, finished_status: Any
    ) -> None:
        """Requests are ended from outside."""
        core = self._of(scheduler)
        if core is not None:
            core.aborted(request_ids, finished_status)

    def turned(self, _: None, result: None, scheduler: Any, pause_state: Any) -> None:
        """The core is paused or goes on: for new weights, to sleep, for good measure."""
        core = self._of(scheduler)
        if core is None:
            return
        if pause_state.name == "UNPAUSED":
            core.probe.unpaused()
        else:
            core.probe.paused()

    def closed(self, _: None, result: None, scheduler: Any) -> None:
        """The core shuts down."""
        core = self._of(scheduler)
        if core is not None:
            self._leave(core)

    def _leave(self, core: Core) -> None:
        """Close the ring; another scheduler may follow in this process."""
        core.probe.close()
        self._first_step = core.next_step
        self._core = None

    def _of(self, scheduler: Any) -> Core | None:
        core = self._core
        return core if core is not None and core.scheduler is scheduler else None
