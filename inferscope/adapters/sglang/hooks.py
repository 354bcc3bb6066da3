"""Hooks of SGLang and their targets; `scheduler.py` describes their order."""

from __future__ import annotations

import atexit
import multiprocessing
import pkgutil
import sys
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

from inferscope.adapters.edge import Edge
from inferscope.adapters.patching import Patches
from inferscope.adapters.sglang.cache import FEATURE as _CACHE
from inferscope.adapters.sglang.cache import NODES as _NODES
from inferscope.adapters.sglang.cache import CacheHooks
from inferscope.adapters.sglang.frontend import FrontEndWatch
from inferscope.adapters.sglang.info import (
    adapter_names,
    engine_info,
    free_and_cached,
    graph_sizes,
    is_asynchronous,
    place,
    step_timer,
)
from inferscope.adapters.sglang.scheduler import SchedulerWatch
from inferscope.probe import Probe, engine_id
from inferscope.records import EngineInfo

_LAUNCHER = "sglang.srt.entrypoints.engine"
_SCHEDULER = "sglang.srt.managers.scheduler"
_WORKER = "sglang.srt.managers.tp_worker.TpModelWorker"
_STREAMER = (
    "sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer.stream_output"
)
_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
_SIGNALS = "sglang.srt.managers.tokenizer_manager.SignalHandler"
_TREE = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache"
_CACHE_EVENTS = "sglang.srt.mem_cache.events.KVCacheEventRecorder"
_BATCH = "sglang.srt.managers.schedule_batch.ScheduleBatch"
_ENDS = "how requests end outside of a batch"
CRASHES = "the end of a front end whose scheduler has crashed"

Hook: TypeAlias = Callable[..., Any]
"""Function called with the original and its arguments, like SGLang's AROUND hooks."""

patches = Patches("sglang")


def place_hooks() -> None:
    """Register the hooks for this process's role.

    In a child only modules that it has loaded itself are hooked: SGLang's registry imports the
    hooked modules, and the detokenizer does not need the scheduler's. A server may be a child too
    (of a trainer, of a router); it also loads the scheduler, whose hooks are never called there.
    """
    is_child = multiprocessing.parent_process() is not None
    if not is_child or _LAUNCHER in sys.modules:
        engine_id()  # named here, so that all children inherit the name
        front_end = FrontEndHooks()
        _place("requests at the front end", front_end, f"{_MANAGER}.__init__")
    if is_child and _SCHEDULER in sys.modules:
        _place("the scheduler", SchedulerHooks(), f"{_SCHEDULER}.Scheduler.run_event_loop")


def _place(name: str, hooks: SchedulerHooks | FrontEndHooks, opener: str) -> None:
    """Register a process's hooks: those of its unit all or none, the others by feature.

    Args:
        name: name of what the unit observes.
        hooks: hooks of the process.
        opener: target of the hook that opens the ring. If the unit is incomplete, only this hook
            is registered, and the ring reports the missing ones.
    """
    try:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    except ImportError:
        patches.unsupported("this version has no registry of hooks")
        return
    placed = hooks.by_target()
    missing = [target for target in placed if not _exists(target)]
    if missing:
        hooks.is_whole = False
        patches.unsupported(f"{name}: {', '.join(missing)} is missing")
        placed = {} if opener in missing else {opener: placed[opener]}
    else:
        for feature, wanted in hooks.by_feature().items():
            lacking = [target for target in wanted if not _exists(target)]
            if lacking:
                patches.unsupported(f"{feature}: {', '.join(lacking)} is missing")
                hooks.lacking.add(feature)
            else:
                placed |= wanted
    for target, hook in placed.items():
        HookRegistry.register(target, hook, HookType.AROUND)


def _exists(target: str) -> bool:
    try:
        pkgutil.resolve_name(target)
    except (ImportError, AttributeError):
        return False
    return True


class PauseHooks:
    """Pause hooks of the scheduler, or of the front end alone in mode "abort"."""

    def __init__(self, probe_of: Callable[[Any], Probe | None]) -> None:
        self._probe_of = probe_of

    def by_target(self, owner: str) -> dict[str, Hook]:
        """Return the hooks by the dotted name of what they are placed around."""
        return {
            f"{owner}.pause_generation": self._pause,
            f"{owner}.continue_generation": self._continue,
        }

    # The front end's are coroutine functions: it closes or opens its door once they are awaited.

    def _pause(self, original: Hook, *args: Any, **kwargs: Any) -> Any:
        probe = self._probe_of(args[0])
        if probe is not None:
            patches.run(probe.paused)
        return original(*args, **kwargs)

    def _continue(self, original: Hook, *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        probe = self._probe_of(args[0])
        if probe is not None:
            patches.run(probe.unpaused)
        return result


class SchedulerHooks:
    """Hooks of a scheduler's process. They only pass calls on until its loop begins."""

    def __init__(self) -> None:
        self.is_whole = True
        """All hooks of the unit are placed; else only the one that opens the ring is."""
        self.lacking: set[str] = set()
        """Features of which a hook has no place in this version."""
        self._watch: SchedulerWatch | None = None
        self._cache = CacheHooks(patches.run)
        self.pauses = PauseHooks(lambda _: None if self._watch is None else self._watch.probe)

    def by_target(self) -> dict[str, Hook]:
        """Return the hooks by the dotted name of what they are placed around."""
        scheduler = f"{_SCHEDULER}.Scheduler"
        return {
            f"{scheduler}.run_event_loop": self._run_event_loop,
            f"{scheduler}._add_request_to_queue": self._add_request_to_queue,
            f"{scheduler}.run_batch": self._run_batch,
            f"{scheduler}.process_batch_result": self._process_batch_result,
            f"{_WORKER}.forward_batch_generation": self._forward,
            _STREAMER: self._stream_output,
        }

    def by_feature(self) -> dict[str, dict[str, Hook]]:
        """Return the hooks that each serve one feature, likewise; the scheduler needs none."""
        scheduler = f"{_SCHEDULER}.Scheduler"
        return {
            "when scheduling began": {
                f"{scheduler}.get_next_batch_to_run": self._get_next_batch_to_run
            },
            "when scheduling began in a disaggregated engine": {
                f"{scheduler}.get_next_disagg_{role}_batch_to_run": self._get_next_batch_to_run
                for role in ("prefill", "decode")
            },
            _ENDS: {f"{scheduler}.send_abort_output": self._send_abort_output},
            "steps of embeddings": {f"{_WORKER}.forward_batch_embedding": self._forward},
            "pauses": self.pauses.by_target(scheduler),
            _CACHE: self._cache.by_target(_TREE, _BATCH),
            _NODES: self._cache.of_nodes(_CACHE_EVENTS),
        }

    # Opening is the first thing the loop does: model loading, warm-up and capture are over.

    def _run_event_loop(self, original: Hook, /, *args: Any, **kwargs: Any) -> Any:
        patches.run(self._open, *args, **kwargs)
        try:
            return original(*args, **kwargs)
        finally:
            if self._watch is not None:
                patches.run(self._watch.flush)
                self._watch.probe.close()

    def _open(self, scheduler: Any, *_: Any, **__: Any) -> None:
        timer = step_timer(scheduler)
        if timer is None:
            patches.unsupported(f"steps on a device of type {scheduler.device}")
        is_muxed = getattr(scheduler, "enable_pdmux", False)
        if is_muxed:
            patches.unsupported("--enable-pdmux, which runs two batches at a time")
        if getattr(scheduler.server_args, "tokenizer_worker_num", 1) > 1:
            # SGLang loads no plug-ins in them. The engine is observed all the same.
            patches.unsupported("--tokenizer-worker-num above 1: latencies are the engine's")
        where = place(scheduler)
        info = engine_info(scheduler, where)
        probe = Probe.open(
            info,
            role="core" if where.is_core else "worker",
            rank=where.world_rank,
            timer=timer,
        )
        is_observing = self.is_whole and timer is not None and not is_muxed
        patches.attach(probe, is_observing=is_observing)
        if not is_observing:
            atexit.register(probe.close)
            return
        self._hook_drafting(scheduler)
        self._watch = SchedulerWatch(
            probe,
            is_core=where.is_core,
            pool=free_and_cached(scheduler),
            block_tokens=scheduler.page_size,
            total_tokens=scheduler.max_total_num_tokens,
            max_running=scheduler.max_running_requests,
            graph_sizes=graph_sizes(scheduler),
            adapter_of=adapter_names(scheduler),
            end_left="error" if _ENDS in self.lacking else "client_cancel",
            is_deferring=is_asynchronous(scheduler),
            # One that decodes for another takes the last token back where a pause retracts it.
            counts_at_once=info.role == "decode",
        )
        if where.is_core and _CACHE not in self.lacking:
            self._watch.cache = self._cache.open(scheduler, probe)
        probe.look_after(partial(patches.run, self._watch.flush_overdue))
        patches.forgetting.append(self._watch.forget)

    def _hook_drafting(self, scheduler: Any) -> None:
        """Time the whole of a speculative step: its worker calls the model more than once."""
        kind = type(scheduler.model_worker)
        if scheduler.model_worker is scheduler.tp_worker:
            return

        def make(original: Hook) -> Hook:
            def forward_batch_generation(worker: Any, *args: Any, **kwargs: Any) -> Any:
                return self._forward(original, worker, *args, **kwargs)

            return forward_batch_generation

        patches.replace(kind, "forward_batch_generation", make)

    # A method of the watch takes what SGLang passes, by the names that SGLang gives it, inside the
    # `try`: a signature that changes costs our record, not its call. These are called in each step,
    # and nothing stands between them and the watch.

    def _add_request_to_queue(self, original: Hook, /, *args: Any, **kwargs: Any) -> Any:
        watch = self._watch
        if watch is not None and not patches.is_off:
            try:
                watch.enqueued(*args, **kwargs)
            except Exception as error:
                patches.caught(watch.enqueued, error)
        return original(*args, **kwargs)

    def _get_next_batch_to_run(self, original: Hook, /, *args: Any, **kwargs: Any) -> Any:
        watch = self._watch
        if watch is None or patches.is_off:
            return original(*args, **kwargs)
        start_ns = watch.now_ns()
        plan = original(*args, **kwargs)
        if not patches.is_off:
            try:
                watch.scheduled(start_ns, plan)
            except Exception as error:
                patches.caught(watch.scheduled, error)
        return plan

    def _run_batch(self, original: Hook, /, *args: Any, **kwargs: Any) -> Any:
        watch = self._watch
        if watch is None or patches.is_off:
            return original(*args, **kwargs)
        try:
            watch.launching(*args, **kwargs)
        except Exception as error:
            patches.caught(watch.launching, error)
        try:
            result = original(*args, **kwargs)
        except BaseException:
            patches.run(watch.flush)  # a launch that fails may end the process
            raise
        if not patches.is_off:
            try:
                watch.launched()
            except Exception as error:
                patches.caught(watch.launched, error)
        return result

    def _forward(self, original: Hook, /, *args: Any, **kwargs: Any) -> Any:
        watch = self._watch
        if watch is None or patches.is_off:
            return original(*args, **kwargs)
        try:
            watch.forward_begins()
        except Exception as error:
            patches.caught(watch.forward_begins, error)
        try:
            return original(*args, **kwargs)
        finally:
            if not patches.is_off:
                try:
                    watch.forward_ends()
                except Exception as error:
                    patches.caught(watch.forward_ends, error)

    def _process_batch_result(self, original: Hook, /, *args: Any, **kwargs: Any) -> Any:
        watch = self._watch
        if watch is None or patches.is_off:
            return original(*args, **kwargs)
        try:
            watch.result_begins(*args, **kwargs)
        except Exception as error:
            patches.caught(watch.result_begins, error)
        returned = original(*args, **kwargs)
        if not patches.is_off:
            try:
                watch.result_ends(*args, **kwargs)
            except Exception as error:
                patches.caught(watch.result_ends, error)
        return returned

    def _stream_output(self, original: Hook, /, *args: Any, **kwargs: Any) -> Any:
        watch = self._watch
        if watch is None or patches.is_off:
            return original(*args, **kwargs)
        at_ns = watch.now_ns()  # the client can have them as soon as it runs
        returned = original(*args, **kwargs)
        if not patches.is_off:
            try:
                watch.streamed(at_ns, *args, **kwargs)
            except Exception as error:
                patches.caught(watch.streamed, error)
        return returned

    def _send_abort_output(self, original: Hook, /, *args: Any, **kwargs: Any) -> Any:
        watch = self._watch
        if watch is not None and not patches.is_off:
            try:
                watch.aborted(*args, **kwargs)
            except Exception as error:
                patches.caught(watch.aborted, error)
        return original(*args, **kwargs)


class FrontEndHooks:
    """Hooks of the process that serves HTTP. They are inactive until it has a tokenizer manager."""

    def __init__(self) -> None:
        self.is_whole = True
        """All hooks of the unit are placed; else only the one that opens the ring is."""
        self.lacking: set[str] = set()
        """Features of which a hook has no place in this version."""
        self._watch: FrontEndWatch | None = None
        self._probe: Probe | None = None
        self._manager: weakref.ref[Any] | None = None
        """The tokenizer manager that is observed, or was."""
        self.pauses = PauseHooks(
            lambda manager: self._probe if self._is_observed(manager) else None
        )

    def by_target(self) -> dict[str, Hook]:
        """Return the hooks by the dotted name of what they are placed around."""
        return {
            f"{_MANAGER}.__init__": self._init,
            f"{_MANAGER}._send_one_request": self._send_one_request,
            f"{_MANAGER}._handle_batch_output": self._handle_batch_output,
        }

    def by_feature(self) -> dict[str, dict[str, Hook]]:
        """Return the hooks that each serve one feature, likewise; requests need none of them."""
        return {
            "several prompts in one request": {
                f"{_MANAGER}._send_batch_request": self._send_batch_request
            },
            "pauses": self.pauses.by_target(_MANAGER),
            CRASHES: {f"{_SIGNALS}.running_phase_sigquit_handler": self._crashed},
        }

    def _crashed(self, original: Hook, /, *args: Any, **kwargs: Any) -> Any:
        """Leave no shutdown record: a child has died, and this process is about to kill itself.

        As the first process of a container it cannot, and exits in good order.
        """
        if self._probe is not None:
            patches.run(self._probe.abandon)
        return original(*args, **kwargs)

    def _init(self, original: Hook, /, *args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        patches.run(self._made, *args, **kwargs)

    def _made(self, manager: Any, *_: Any, **__: Any) -> None:
        if self._manager is not None and self._manager() is not None:
            patches.unsupported("a second engine in one process")
            return
        self._manager = weakref.ref(manager)
        if self._probe is None:
            self._open(manager)

    def _is_observed(self, manager: Any) -> bool:
        return self._manager is not None and self._manager() is manager

    def _open(self, manager: Any) -> None:
        application = patches.find("starlette.applications", "Starlette")
        if application is None:
            return
        options = manager.server_args
        probe = Probe.open(
            EngineInfo(
                0,
                "sglang",
                model=options.model_path,
                served_name=getattr(options, "served_model_name", None) or options.model_path,
            ),
            role="frontend",
        )
        self._probe = probe
        patches.attach(probe, is_observing=self.is_whole)
        atexit.register(probe.close)
        if not self.is_whole:
            return
        edge = Edge(probe, patches)
        edge.watch(application)
        self._watch = FrontEndWatch(edge)

    # These are coroutine functions: what is done here is done when they are called, before
    # anything is awaited.

    def _send_one_request(self, original: Hook, /, *args: Any, **kwargs: Any) -> Any:
        if self._watch is not None and self._is_observed(args[0]):
            patches.run(_sending, self._watch, *args, **kwargs)
        return original(*args, **kwargs)

    def _send_batch_request(self, original: Hook, /, *args: Any, **kwargs: Any) -> Any:
        if self._watch is not None and self._is_observed(args[0]):
            patches.run(_sending_batch, self._watch, *args, **kwargs)
        return original(*args, **kwargs)

    def _handle_batch_output(self, original: Hook, /, *args: Any, **kwargs: Any) -> Any:
        if self._watch is not None and self._is_observed(args[0]):
            patches.run(_received, self._watch, *args, **kwargs)
        return original(*args, **kwargs)


def _sending(watch: FrontEndWatch, manager: Any, /, tokenized_obj: Any, *_: Any, **__: Any) -> None:
    watch.sending(manager, tokenized_obj)


def _sending_batch(
    watch: FrontEndWatch, manager: Any, /, tokenized_objs: Any, *_: Any, **__: Any
) -> None:
    watch.sending_batch(manager, tokenized_objs)


def _received(watch: FrontEndWatch, manager: Any, /, recv_obj: Any, *_: Any, **__: Any) -> None:
    watch.received(manager, recv_obj)
