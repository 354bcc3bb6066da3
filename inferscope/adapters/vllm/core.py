"""Hooks of vLLM's scheduler, where it plans steps and where outputs leave.

The hooked methods belong to its interface, which custom schedulers implement. On a step's path the
hooks keep references (`kept.py`); these become records (`steps.py`) after the dispatch:

    step()         schedule ─ execute_model ─ get_grammar_bitmask ─ wait ─ update_from_output
    with a queue   schedule ─ execute_model ─ get_grammar_bitmask ─ sample ─ wait ─ update_…
                                              └ flush

Where vLLM asks for no bitmask there (pooling models) or only after the outputs of the step before
(structured output that waits for them), the plan is written before the next call that changes the
scheduler. With several batches in flight each plan is written behind its own dispatch.
"""

from __future__ import annotations

import atexit
import functools
from collections.abc import Callable, Mapping
from time import monotonic_ns
from typing import Any

from inferscope.adapters.patching import Around, Direct, Patches
from inferscope.adapters.vllm import tag as vllm_tag
from inferscope.adapters.vllm.cache import CacheHooks
from inferscope.adapters.vllm.info import data_rank, engine_info
from inferscope.adapters.vllm.kept import Kept
from inferscope.adapters.vllm.steps import Core
from inferscope.adapters.vllm.transfers import Transfers, groups_of
from inferscope.probe import Probe

SCHEDULER = "the scheduler"
_NEEDED = (
    *("vllm_config", "requests", "kv_cache_manager", "get_request_counts"),
    *("max_num_running_reqs", "max_num_scheduled_tokens", "running"),
)
"""Attributes of a scheduler that the hooks read."""


class CoreHooks:
    """Hooks around the schedulers of a process; they run in the core's own loop.

    Attributes:
        kept: facts that the observed core has yet to write; None without such a core.
    """

    def __init__(
        self, patches: Patches, is_host_computing: Callable[[], bool] = lambda: False
    ) -> None:
        """Observe nothing yet.

        Args:
            patches: patches that hold the hooks.
            is_host_computing: function that returns whether the worker is in this process and
                computes on a CPU.
        """
        self._patches = patches
        self._is_host_computing = is_host_computing
        self.kept: Kept | None = None
        self._transfers = Transfers()
        self._cache = CacheHooks()
        self._is_deferring = False
        self._first_step = 0
        """First step number of the next scheduler; step numbers are unique in a process."""
        patches.forgetting.append(self.forget)

    def forget(self) -> None:
        """Drop references to the engine's objects: no hook is called any more.

        The wrappers of each step only test `kept`, and not whether the patches are off.
        """
        self._cache.forget()
        kept, self.kept = self.kept, None
        if kept is not None:
            kept.planned = None
            kept.left.clear()

    def install(self, scheduler_class: Any) -> None:
        """Hook the methods of `Scheduler` that begin and end requests and steps: all or none."""
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
                "schedule": Direct(self._schedule),
                "update_from_output": Direct(self._update_from_output),
                "finish_requests": Around(self.aborting, self.aborted),
            },
        )
        if is_whole:
            flushing = {"get_grammar_bitmask": Direct(self._get_grammar_bitmask)}
            self._is_deferring = patches.unit(
                "records beside the device", scheduler_class, flushing
            )
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
        if self.kept is not None:
            if self.kept.core.scheduler is not None:
                self._patches.unsupported("a second scheduler in one process")
                return
            self._leave(self.kept)  # gone without a shutdown
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
        core = Core(scheduler, probe)
        core.cache = self._cache.install(self._patches, scheduler, probe)
        is_early = not self._is_deferring or self._is_host_computing()
        self.kept = kept = Kept(core, first_step=self._first_step, is_early=is_early)
        if not is_early:
            probe.look_after(functools.partial(self._patches.run, kept.flush_overdue))
        connector = getattr(scheduler, "connector", None)
        if connector is None:
            return
        groups = groups_of(scheduler)
        if groups:
            self._transfers.core, self._transfers.groups = core, groups
            self._transfers.install(self._patches, connector)
        else:
            self._patches.unsupported("KV transfers: the scheduler's kv_cache_config is missing")

    def adding(self, scheduler: Any, request: Any) -> None:
        """Write kept facts before a request, or a session's next input, enters the queue."""
        kept = self._of(scheduler)
        if kept is None:
            return
        kept.core.adding = request.request_id
        if kept.core.knows(request.request_id):
            kept.flush()  # whether it ended or goes on is read from the scheduler
        else:
            kept.settle()

    def added(self, _: None, result: None, scheduler: Any, request: Any) -> None:
        """Record a request that enters the queue."""
        kept = self._of(scheduler)
        if kept is not None:
            kept.core.added(request)

    # A wrapper called before a dispatch does everything in one frame: a model's weights evict our
    # code from the caches, and each function called then costs a microsecond or two.

    def _schedule(self, call: Callable[..., Any], original: Callable[..., Any]) -> Any:
        patches, within = self._patches, self._patches.within
        no_rows = vllm_tag.NO_ROWS

        def schedule(*args: Any, **kw: Any) -> Any:
            kept = self.kept
            if (
                kept is None
                or kept.scheduler() is not args[0]
                or (within and patches.is_within("schedule", args[0]))
            ):
                return original(*args, **kw)
            if kept.planned is not None:
                try:
                    kept.flush()  # no dispatch was seen
                except Exception as error:
                    patches.caught(kept.flush, error)
            start_ns = monotonic_ns()
            output = call(*args, **kw)
            end_ns = monotonic_ns()
            try:
                if kept is self.kept:
                    step = -1
                    if output.num_scheduled_tokens:
                        step = kept.next_step
                        kept.next_step = step + 1
                        output._inferscope = (step, *no_rows)  # `vllm_tag.attach`, without the call
                    kept.planned = (output, step, start_ns, end_ns)
                    if kept.is_early or step < 0:  # nothing is dispatched
                        kept.flush()
            except Exception as error:
                patches.caught(schedule, error)
            return output

        return schedule

    def _get_grammar_bitmask(self, call: Callable[..., Any], original: Callable[..., Any]) -> Any:
        patches, within, dispatched = self._patches, self._patches.within, self.dispatched

        def get_grammar_bitmask(scheduler: Any, *args: Any, **kw: Any) -> Any:
            if patches.is_off or (within and patches.is_within("get_grammar_bitmask", scheduler)):
                return original(scheduler, *args, **kw)
            bitmask = call(scheduler, *args, **kw)
            if not patches.is_off:
                try:
                    dispatched(scheduler)
                except Exception as error:
                    patches.caught(dispatched, error)
            return bitmask

        return get_grammar_bitmask

    def dispatched(self, scheduler: Any) -> None:
        """Write the kept facts while the device computes."""
        kept = self._of(scheduler)
        if kept is not None:
            with kept.core.probe.hidden:
                kept.flush()

    def _update_from_output(self, call: Callable[..., Any], original: Callable[..., Any]) -> Any:
        patches, within, tag = self._patches, self._patches.within, vllm_tag.NAME

        def update_from_output(
            scheduler: Any, scheduler_output: Any, model_runner_output: Any, *args: Any, **kw: Any
        ) -> Any:
            kept = self.kept
            if (
                kept is None
                or kept.scheduler() is not scheduler
                or (within and patches.is_within("update_from_output", scheduler))
            ):
                return original(scheduler, scheduler_output, model_runner_output, *args, **kw)
            try:
                if kept.planned is not None:
                    kept.flush()
                kept.accepted, kept.ended = {}, []
                if scheduler_output.scheduled_spec_decode_tokens:
                    kept.judge(scheduler_output, model_runner_output)
            except Exception as error:
                patches.caught(update_from_output, error)
            outputs = call(scheduler, scheduler_output, model_runner_output, *args, **kw)
            at_ns = monotonic_ns()
            if kept is not self.kept:
                return outputs
            try:
                if scheduler_output.num_scheduled_tokens and not hasattr(scheduler_output, tag):
                    self.unplanned(kept)
                    return outputs
                kept.left.append((scheduler_output, outputs, at_ns, kept.ended, kept.accepted))
                kept.ended = None
                if kept.is_early or not scheduler.running:  # no other dispatch may follow
                    kept.flush()
            except Exception as error:
                patches.caught(update_from_output, error)
            return outputs

        return update_from_output

    def unplanned(self, kept: Kept) -> None:
        """Report that a scheduler plans its steps outside the hooked method."""
        self.kept = None
        self._cache.forget()
        what = f"{SCHEDULER}: its steps are not planned by its method schedule"
        self._patches.unsupported(what)
        kept.core.probe.unsupported(what, is_everything=True)

    def aborting(self, scheduler: Any, *args: Any, **kw: Any) -> None:
        """Write the kept facts before requests are ended from outside."""
        kept = self._of(scheduler)
        if kept is not None:
            kept.flush()

    def aborted(
        self, _: None, result: Any, scheduler: Any, request_ids: Any, finished_status: Any
    ) -> None:
        """Record requests that were ended from outside."""
        kept = self._of(scheduler)
        if kept is not None:
            kept.core.aborted(request_ids, finished_status, kept.ended)

    def turned(self, _: None, result: None, scheduler: Any, pause_state: Any) -> None:
        """Record that the core is paused or resumes, e.g. for new weights or sleep mode."""
        kept = self._of(scheduler)
        if kept is None:
            return
        kept.flush()
        probe = kept.core.probe
        if pause_state.name == "UNPAUSED":
            probe.unpaused()
        else:
            probe.paused()

    def closed(self, _: None, result: None, scheduler: Any) -> None:
        """Close the ring at the core's shutdown."""
        kept = self._of(scheduler)
        if kept is not None:
            self._leave(kept)

    def _leave(self, kept: Kept) -> None:
        """Close the ring; another scheduler may follow in this process."""
        kept.flush()
        kept.core.probe.close()
        self._patches.detach(kept.core.probe)
        self._transfers.core = None
        self._cache.forget()
        self._first_step = kept.next_step
        self.kept = None

    def _of(self, scheduler: Any) -> Kept | None:
        kept = self.kept
        return kept if kept is not None and kept.core.scheduler is scheduler else None
