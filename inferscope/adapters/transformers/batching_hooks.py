"""Hooks around the continuous batching of transformers, and the `Batcher` of each loop."""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

from inferscope.adapters.patching import Around, Patches
from inferscope.adapters.recorder import Recorders
from inferscope.adapters.transformers.batching import Batcher
from inferscope.adapters.transformers.info import describe, is_asynchronous

_PACKAGE = "transformers.generation.continuous_batching"
_FEATURE = "continuous batching"
_STATUS = "BackgroundThreadStatus"


class _OnThread(threading.local):
    batcher: Batcher | None = None
    """Batcher of the loop that runs in this thread."""
    is_looping = False


class BatchingHooks:
    """Wrappers around the batching loop, shared by all managers."""

    def __init__(
        self, patches: Patches, recorders: Recorders, watches: Callable[[Any], bool]
    ) -> None:
        self._patches = patches
        self._recorders = recorders
        self._watches = watches
        self._on = _OnThread()
        self._is_whole = False
        self._batchers: weakref.WeakKeyDictionary[Any, Batcher] = weakref.WeakKeyDictionary()
        """Batchers by processor; the keys are weak, for a processor holds the KV cache."""

    def install(self) -> None:
        """Wrap the functions that the loop calls; without one of them nothing is observed.

        The hook that makes a `Batcher` comes last: without a `Batcher` the others do nothing.
        """
        find, around = self._patches.find, self._patches.around
        manager = find(f"{_PACKAGE}.continuous_api", "ContinuousBatchingManager")
        processor = find(f"{_PACKAGE}.continuous_api", "ContinuousBatchProcessor")
        router = find(f"{_PACKAGE}.continuous_api", "OutputRouter")
        scheduler = find(f"{_PACKAGE}.scheduler", "Scheduler")
        runner = find(f"{_PACKAGE}.model_runner", "ModelRunner")
        unit = functools.partial(self._patches.unit, _FEATURE)
        self._is_whole = (
            unit(
                processor,
                {
                    "prepare_next_batch": Around(self._plan, self._planned),
                    "update_batch": Around(self._update, self._updated),
                },
            )
            and unit(
                scheduler,
                {
                    "add_waiting_request": Around(self._waits),
                    "clear_cancelled_requests": Around(after=self._cancelled),
                },
            )
            and (
                unit(router, {"fail_and_deliver": Around(self._failed)})
                if hasattr(router, "fail_and_deliver")
                else unit(processor, {"_handle_request_error": Around(self._failed_before_5_17)})
            )
            and unit(runner, {"compute_batch": Around(self._computes, self._computed)})
            and all(
                unit(
                    find(f"{_PACKAGE}.input_outputs", name),
                    {"prepare_batch_tensors": Around(self._chosen)},
                )
                for name in ("ContinuousBatchingIOs", "ContinuousBatchingAsyncIOs")
            )
            and self._patches.replace(manager, "_run_generation_loop", self._loop)
            and unit(manager, {"_create_batch_processor": Around(after=self._created)})
        )
        if self._is_whole:  # without it tokens are recorded slightly later
            around(router, "deliver_batch", before=self._delivers)
        status = getattr(sys.modules.get(f"{_PACKAGE}.continuous_api"), _STATUS, None)
        if self._is_whole and hasattr(status, "pause_and_wait"):  # older versions have no pauses
            hooks = {"pause_and_wait": Around(self._pauses, self._goes_on)}
            self._patches.unit("pauses", status, hooks)

    def add(self, model: Any, processor: Any) -> None:
        """Observe a batching loop, unless it is already observed or cannot be."""
        if self._is_whole and processor not in self._batchers:
            described = functools.partial(describe, model, processor=processor)
            recorder = self._recorders.take(model, described, place=str(model.device))
            if recorder is not None:
                batcher = Batcher(recorder, processor, is_deferring=is_asynchronous(model))
                overdue = functools.partial(self._patches.run, batcher.deferred.flush_overdue)
                recorder.probe.look_after(overdue)
                self._batchers[processor] = batcher

    def close(self) -> None:
        """Stop observing all loops."""
        for batcher in list(self._batchers.values()):
            self._close(batcher)

    # --- start and end of a loop --------------------------------------------------------------

    def _created(self, _: None, processor: Any, manager: Any) -> None:
        # A warm-up creates a processor in its caller's thread, and no loop may ever run it.
        if self._on.is_looping and self._watches(manager.model):
            self.add(manager.model, processor)
            self._on.batcher = self._batchers.get(processor)

    def _loop(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def _run_generation_loop(*args: Any, **kwargs: Any) -> Any:
            self._on.is_looping = True
            try:
                return original(*args, **kwargs)
            finally:
                self._on.is_looping = False
                batcher, self._on.batcher = self._on.batcher, None
                if batcher is not None:
                    self._patches.run(self._close, batcher)

        return _run_generation_loop

    def _close(self, batcher: Batcher) -> None:
        if batcher.is_closed:
            return
        for key, each in list(self._batchers.items()):
            if each is batcher:
                del self._batchers[key]
        batcher.close()  # the processor, and its entry, may be gone before the loop ends
        self._recorders.give_back(batcher.recorder)

    # --- one iteration of the loop ------------------------------------------------------------

    def _plan(self, processor: Any) -> None:
        batcher = self._on.batcher = self._batchers.get(processor)
        if batcher is not None:
            batcher.plan_begins()

    def _planned(self, _: None, is_planned: bool, processor: Any) -> None:
        if self._on.batcher is not None:
            self._on.batcher.plan_ends(is_planned)

    def _pauses(self, status: Any) -> None:
        if self._on.batcher is not None:
            self._on.batcher.pauses()

    def _goes_on(self, _: None, _result: None, status: Any) -> None:
        if self._on.batcher is not None:
            self._on.batcher.goes_on()

    def _waits(self, scheduler: Any, state: Any) -> None:
        if self._on.batcher is not None:
            self._on.batcher.waits(state)

    def _cancelled(self, _: None, states: list[Any], scheduler: Any) -> None:
        if self._on.batcher is not None and states:
            self._on.batcher.cancelled(states)

    def _failed(self, router: Any, state: Any, error: Exception) -> None:
        if self._on.batcher is not None:
            self._on.batcher.failed(state)

    def _failed_before_5_17(self, processor: Any, error: Exception, state: Any) -> None:
        self._failed(processor, state, error)

    def _chosen(self, ios: Any, requests_in_batch: list[Any], *_args: Any, **_kwargs: Any) -> None:
        if self._on.batcher is not None:
            self._on.batcher.batch_chosen(requests_in_batch)

    def _computes(self, runner: Any, *_args: Any, **_kwargs: Any) -> None:
        if self._on.batcher is not None:
            _on_stream(runner, self._on.batcher.step_begins)

    def _computed(self, _: None, _result: None, runner: Any, *_args: Any, **_kwargs: Any) -> None:
        if self._on.batcher is not None:
            _on_stream(runner, self._on.batcher.step_ends)

    def _update(self, processor: Any) -> None:
        if self._on.batcher is not None:
            self._on.batcher.update_begins()

    def _delivers(self, router: Any, outputs: list[Any]) -> None:
        if self._on.batcher is not None:
            self._on.batcher.update_ends()

    def _updated(self, _: None, _result: None, processor: Any) -> None:
        if self._on.batcher is not None:  # nothing was delivered
            self._on.batcher.update_ends()


def _on_stream(runner: Any, record: Callable[[], None]) -> None:
    """Call `record` with the runner's stream as the current one: events are recorded on it."""
    stream = getattr(runner.inputs_and_outputs, "compute_stream", None)
    if stream is None or stream.device.type != "cuda":
        record()
        return
    with sys.modules["torch"].cuda.stream(stream):
        record()
