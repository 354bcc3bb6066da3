"""vLLM's workers: when each step was executed.

    execute_model ─► (None) ─► sample_tokens      on ranks of the last pipeline stage
    execute_model ─► output                       on the others, and for pooling models

The worker's level covers both model runners, and leaves graph capture out, which runs beneath it.
Warm-up may call `execute_model` itself and is left out by a hook of its own. A step's number, and
the core's indices of who is in it, ride on the scheduler's output; where they do not survive the
way here, steps are counted on both sides alike, and not signed.
"""

from __future__ import annotations

import weakref
from importlib import import_module
from typing import Any

from inferscope.adapters.patching import Around, Patches
from inferscope.adapters.vllm_info import data_rank, engine_info
from inferscope.adapters.vllm_modes import Modes, modes_of
from inferscope.adapters.vllm_steps import Tag
from inferscope.host_signals import suppressed
from inferscope.probe import EventTimer, HostTimer, Probe, StepTimer, TorchEvents

_ON_HOST = ("ngram", "[ngram]", "suffix")
"""Methods of speculation that use the device for nothing but the verification."""
_DEVICE_TOKENS = (
    *("use_eagle", "uses_draft_model"),
    *("uses_extract_hidden_states", "use_ngram_gpu"),
)
"""Predicates of a speculative configuration: its drafter takes tokens that are on the device."""
_FORWARD = "device spans that begin at the forward"


class WorkerHooks:
    """Observes the worker of a process."""

    def __init__(self, patches: Patches) -> None:
        self._patches = patches
        self._worker: weakref.ref[Any] | None = None
        """It must not live on by its hooks: it holds the weights."""
        self._probe = Probe.disabled()
        self._samples = True
        self._next_step = 0
        self._has_run = False
        self._is_warming_up = False
        self._num_dummies = 0
        self._modes = Modes()
        self._open: tuple[int, int, Any] | None = None
        """The step that sampling will complete, its padded size and its `SchedulerOutput`."""

    def install(self, wrapper_class: Any) -> None:
        """Hook `WorkerWrapperBase`, which knows the class of the worker only once it has made it.

        Not `init_worker`: that is where the plug-ins are loaded.
        """
        hooks = {"init_device": Around(after=self.initialised)}
        self._patches.unit("the worker", wrapper_class, hooks)

    def initialised(self, _: None, result: None, wrapper: Any) -> None:
        """Hook the worker's own class."""
        if self._worker is not None:
            if self._worker() is not None:
                self._patches.unsupported("a second worker in one process")
                return
            self._close()  # gone without a shutdown
        worker = wrapper.worker
        self._worker = weakref.ref(worker)
        patches, kind = self._patches, type(worker)
        is_direct = hasattr(wrapper, "execute_model_ray")
        if is_direct:
            patches.unsupported("steps of the worker: Ray calls its model runner directly")
        is_whole = not is_direct and patches.unit(
            "steps of the worker",
            kind,
            {
                "initialize_from_config": Around(after=self.configured),
                "compile_or_warm_up_model": Around(self.warming_up, self.warmed_up),
                "execute_model": Around(self.starting, self.executed),
                "sample_tokens": Around(after=self.sampled),
            },
        )
        if not is_whole:
            self._open_ring(worker, is_observing=False)
            return
        patches.unit(
            "steps of an idle replica",
            kind,
            {"execute_dummy_batch": Around(self.idling, self.idled)},
        )
        patches.unit(
            "the worker's shutdown in good order", kind, {"shutdown": Around(after=self.closed)}
        )

    def configured(self, _: None, result: None, worker: Any, *args: Any, **kw: Any) -> None:
        """Open this process's ring: the number of blocks is known now."""
        if not self._is_observed(worker):
            return
        timer = self._timer(worker.device)
        if timer is None:
            self._open_ring(worker, is_observing=False)
            return
        self._samples = _is_last_stage()
        self._modes = modes_of(worker.vllm_config)
        self._open_ring(worker, timer)
        self._hook_device_span(worker)

    def _open_ring(
        self, worker: Any, timer: StepTimer | None = None, *, is_observing: bool = True
    ) -> None:
        config = worker.vllm_config
        world = int(config.parallel_config.world_size)
        rank = int(worker.rank) % world
        device, uuid = _name_and_uuid(worker.device)
        self._probe = Probe.open(
            engine_info(config, device=device, device_uuid=uuid, rank=rank),
            role="worker",
            rank=data_rank(config) * world + rank,
            timer=timer,
        )
        self._patches.attach(self._probe, is_observing=is_observing)

    def _hook_device_span(self, worker: Any) -> None:
        """Hook where a step's device span begins and ends, within the model runner.

        Both are optional. A span begins at the entry of `execute_model` otherwise, which counts the
        preparation of inputs as device time, and ends where `sample_tokens` returns: without
        asynchronous scheduling that is after the host has waited for the tokens.
        """
        patches, runner = self._patches, getattr(worker, "model_runner", None)
        kind = type(runner)
        if hasattr(kind, "_model_forward"):
            patches.unit(_FORWARD, kind, {"_model_forward": Around(before=self.forwarding)})
            if not _drafts_late(worker.vllm_config):
                patches.unit(
                    "device spans that end before the host waits",
                    kind,
                    {"_bookkeeping_sync": Around(before=self.waiting)},
                )
            return
        # The second model runner waits for nothing in `sample_tokens`.
        connector = getattr(runner, "kv_connector", None)
        owner = None if connector is None else type(connector)
        patches.unit(_FORWARD, owner, {"pre_forward": Around(after=self.forwarding)})

    def warming_up(self, worker: Any) -> None:
        """Ignore steps from here on: no scheduler has planned them."""
        self._is_warming_up = self._is_observed(worker)

    def warmed_up(self, _: None, result: Any, worker: Any) -> None:
        """Record steps again."""
        self._is_warming_up = False

    def starting(self, worker: Any, scheduler_output: Any) -> None:
        """Begin timing a step, unless it has no tokens: then nothing is executed."""
        tag = Tag.of(scheduler_output)
        if tag is not None:  # a scheduler has planned it: a warm-up that raised is over
            self._is_warming_up = False
        is_observed = self._is_observed(worker) and not self._is_warming_up
        if not is_observed or not scheduler_output.total_num_scheduled_tokens:
            return
        step = self._next_step if tag is None else tag.step
        mode, padded = self._modes.of(scheduler_output.num_scheduled_tokens.values())
        # The first one pays for what every process does once.
        self._probe.start(step, mode=mode, cold=not self._has_run)
        self._has_run = True
        self._next_step = step + 1
        self._open = (step, padded, scheduler_output)

    def forwarding(self, *args: Any, **kw: Any) -> None:
        """Begin the device span of the step: its inputs are prepared."""
        if self._open is not None:
            self._probe.device_start()

    def waiting(self, *args: Any, **kw: Any) -> None:
        """End the device span of the step: all its kernels are queued."""
        if self._open is not None:
            self._probe.device_end()

    def executed(self, _: None, result: Any, worker: Any, scheduler_output: Any) -> None:
        """End the step, unless sampling is still to come."""
        if self._is_observed(worker) and (result is not None or not self._samples):
            self._stop()

    def sampled(self, _: None, result: Any, worker: Any, *args: Any, **kw: Any) -> None:
        """End the step: its outputs are queued, on a CPU they are there."""
        if self._is_observed(worker):
            self._stop()

    def idling(self, worker: Any, *args: Any, **kw: Any) -> None:
        """Begin a step that is executed only because other replicas execute one.

        Their numbers are negative: the core knows nothing of them.
        """
        self._num_dummies += 1
        self._probe.start(-self._num_dummies, dummy=True)

    def idled(self, _: None, result: Any, worker: Any, *args: Any, **kw: Any) -> None:
        """End such a step."""
        self._probe.stop(-self._num_dummies)

    def closed(self, _: None, result: None, worker: Any) -> None:
        """The worker shuts down."""
        if self._is_observed(worker):
            self._close()

    def _is_observed(self, worker: Any) -> bool:
        return self._worker is not None and self._worker() is worker

    def _close(self) -> None:
        """Close the ring; another worker may follow in this process."""
        self._probe.close()
        self._worker = self._open = None
        self._probe = Probe.disabled()
        self._has_run = self._is_warming_up = False

    def _stop(self) -> None:
        if self._open is None:
            return
        (step, padded, scheduler_output), self._open = self._open, None
        self._probe.stop(step, padded_tokens=padded)
        tag = Tag.of(scheduler_output)
        if tag is not None:
            tokens = tag.tokens
            if tokens is None:
                tokens = tuple(scheduler_output.num_scheduled_tokens.values())
            self._probe.sign(
                step, requests=tag.requests, tokens=tokens, prefill_tokens=tag.prefill_tokens
            )

    def _timer(self, device: Any) -> StepTimer | None:
        """Return what can time steps on this device."""
        if device.type == "cpu":
            return HostTimer()
        if device.type == "cuda":
            return EventTimer(TorchEvents(device))
        self._patches.unsupported(f"timing steps on a device of type {device.type}")
        return None


def _drafts_late(config: Any) -> bool:
    """Return whether drafts may be made on the device after the host has the step's tokens."""
    speculation = getattr(config, "speculative_config", None)
    if speculation is None or getattr(speculation, "method", "") in _ON_HOST:
        return False
    takes_device_tokens = any(getattr(speculation, name, bool)() for name in _DEVICE_TOKENS)
    return not takes_device_tokens or bool(
        getattr(speculation, "disable_padded_drafter_batch", True)
    )


def _is_last_stage() -> bool:
    """Tell whether this rank samples: only the last stage of a pipeline does."""
    group = import_module("vllm.distributed.parallel_state").get_pp_group()
    return bool(group.is_last_rank)


def _name_and_uuid(device: Any) -> tuple[str, str]:
    """Return how the device is called, empty where vLLM's platform does not say."""
    if device.type == "cpu":
        return "cpu", ""
    names = ["", ""]
    platform = import_module("vllm.platforms").current_platform
    for place, ask in enumerate(("get_device_name", "get_device_uuid")):
        with suppressed(Exception):  # what is asked of a driver here is not worth a probe
            names[place] = str(getattr(platform, ask)(device.index or 0))
    return names[0], names[1]
