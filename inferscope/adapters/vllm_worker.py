"""vLLM's workers: when each step was executed.

    execute_model ─► (None) ─► sample_tokens      on ranks of the last pipeline stage
    execute_model ─► output                       on the others, and for pooling models

The worker's level covers both model runners, and leaves graph capture out, which runs beneath it.
Warm-up may call `execute_model` itself and is left out by a hook of its own. A step's number is
attached to the scheduler's output; where it does not survive the way here, steps are counted on
both sides alike, and not signed.

Before a launch only an event is recorded and the time taken, without a lock (`probe/marks.py`), and
the ring's word PENDING written where no step is pending; at the end of a step the same without it.
A step is signed, and the spans that have come are written, behind the next launch, while the device
computes. Where this host computes the step itself, on a CPU, both are done at its end: the next
launch returns when it is over.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from importlib import import_module
from time import monotonic_ns
from typing import Any

from inferscope.adapters import vllm_tag
from inferscope.adapters.patching import Around, Direct, Patches
from inferscope.adapters.vllm_info import data_rank, engine_info
from inferscope.adapters.vllm_kept import OVERDUE_NS
from inferscope.adapters.vllm_modes import Modes, modes_of
from inferscope.adapters.vllm_signing import Signer
from inferscope.host_signals import suppressed
from inferscope.probe import EventTimer, HostTimer, Marks, Probe, StepTimer, TorchEvents
from inferscope.probe.forked_lock import forked_lock

_ON_HOST = ("ngram", "[ngram]", "suffix")
"""Methods of speculation that use the device for nothing but the verification."""
_DEVICE_TOKENS = (
    *("use_eagle", "uses_draft_model"),
    *("uses_extract_hidden_states", "use_ngram_gpu"),
)
"""Predicates of a speculative configuration: its drafter takes tokens that are on the device."""
_FORWARD = "device spans that begin at the forward"


class WorkerHooks:
    """Observes the worker of a process.

    Attributes:
        is_early: each step is signed at its end, for this host computes it.
    """

    def __init__(self, patches: Patches) -> None:
        self._patches = patches
        self._worker: weakref.ref[Any] | None = None
        """It must not live on by its hooks: it holds the weights."""
        self._probe = Probe.disabled()
        self._marks: Marks | None = None
        """Notes the steps; None where this host computes them."""
        self._samples = True
        self._next_step = 0
        self._has_run = False
        self._is_warming_up = False
        self._num_dummies = 0
        self._signer = Signer(self._probe, Modes())
        self.is_early = False
        self._open: tuple[int, Any] | None = None
        """The step that sampling will complete, and its `SchedulerOutput`."""
        self._noting: list[Marks] = []
        """What notes the step that is open: one, or none where no step is, or this host computes.

        Wrappers within a step keep this list itself, and look at nothing else.
        """
        self._done: deque[tuple[int, Any]] = deque()
        """Steps that are not signed yet, likewise."""
        self._since_ns = 0
        """When the oldest of these ended."""
        self._lock = forked_lock()
        """Held while steps are signed: by the engine's thread, or the probe's."""
        """The runner takes drafts out of the `SchedulerOutput` that it executes."""
        patches.forgetting.append(self.forget)

    def forget(self) -> None:
        """Drop the engine's objects that are kept: no hook is called any more.

        The wrappers of each step look for these alone, and not whether the patches are off.
        """
        self._worker = self._open = None
        self._noting.clear()
        self._done.clear()

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
                "execute_model": Direct(self._execute_model),
                "sample_tokens": Direct(self._sample_tokens),
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
        self._open_ring(worker, timer)
        self._signer = Signer(self._probe, modes_of(worker.vllm_config))
        self.is_early = isinstance(timer, HostTimer)
        if not self.is_early:
            self.mark()
            self._probe.look_after(partial(self._patches.run, self.sign_overdue))
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
            patches.unit(_FORWARD, kind, {"_model_forward": Direct(self._device_start)})
            if not _drafts_late(worker.vllm_config):
                patches.unit(
                    "device spans that end before the host waits",
                    kind,
                    {"_bookkeeping_sync": Direct(self._device_end)},
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

    # As in `vllm_core`: what is called before a dispatch does all in one frame.

    def _execute_model(self, call: Callable[..., Any], original: Callable[..., Any]) -> Any:
        patches, within, tag = self._patches, self._patches.within, vllm_tag.NAME
        noting = self._noting

        def execute_model(worker: Any, scheduler_output: Any, *args: Any, **kw: Any) -> Any:
            reference = self._worker
            if (
                reference is None
                or reference() is not worker
                or (within and patches.is_within("execute_model", worker))
            ):
                return original(worker, scheduler_output, *args, **kw)
            try:
                fields = getattr(scheduler_output, tag, None)
                if fields is not None:  # a scheduler has planned it: a warm-up that raised is over
                    self._is_warming_up = False
                # Without tokens nothing is executed.
                if scheduler_output.total_num_scheduled_tokens and not self._is_warming_up:
                    step = self._next_step if fields is None else fields[0]
                    marks = self._marks
                    # The first one pays for what every process does once.
                    if marks is not None:
                        marks.begin(step, "eager", not self._has_run, False, not marks.has_moved)
                        if not noting:
                            noting.append(marks)
                    else:
                        self._probe.start(step, cold=not self._has_run, reaps=False)
                    self._has_run = True
                    self._next_step = step + 1
                    self._open = (step, scheduler_output)
            except Exception as error:
                patches.caught(execute_model, error)
            result = call(worker, scheduler_output, *args, **kw)
            if patches.is_off:
                self.forget()  # this step began while another thread switched the hooks off
                return result
            try:
                if noting:  # this step is launched
                    noting[0].book()
                if self._done:
                    with self._probe.hidden:
                        self.sign()
                if result is not None or not self._samples:  # no sampling is to come
                    self.stop()
            except Exception as error:
                patches.caught(execute_model, error)
            return result

        return execute_model

    def _sample_tokens(self, call: Callable[..., Any], original: Callable[..., Any]) -> Any:
        patches, within, noting = self._patches, self._patches.within, self._noting

        def sample_tokens(*args: Any, **kw: Any) -> Any:
            result = call(*args, **kw)
            reference, done = self._worker, self._open
            if (
                done is None
                or reference is None
                or reference() is not args[0]
                or (within and patches.is_within("sample_tokens", args[0]))
            ):
                return result
            try:
                if noting:  # outputs are queued
                    self._open, ended_ns = None, noting.pop().end(done[0], 0)
                    if not self._done:
                        self._since_ns = ended_ns
                    self._done.append(done)
                else:  # on a CPU they are there
                    self.stop()
            except Exception as error:
                patches.caught(sample_tokens, error)
            return result

        return sample_tokens

    def stop(self) -> None:
        """End the step that is open."""
        done = self._open
        if done is None:
            return
        self._open, marks = None, self._marks
        self._noting.clear()
        if marks is not None:
            ended_ns = marks.end(done[0], 0)
        else:
            self._probe.stop(done[0])
            ended_ns = monotonic_ns()
        if not self._done:
            self._since_ns = ended_ns
        self._done.append(done)
        if self.is_early:
            self.sign()

    # A step within a step is none, and moving its start or end twice changes nothing: so these two
    # need not ask whether an override calls them.

    def _device_start(self, call: Callable[..., Any], original: Callable[..., Any]) -> Any:
        patches, noting = self._patches, self._noting

        def wrapper(*args: Any, **kw: Any) -> Any:
            if noting:
                try:
                    noting[0].device_start()
                except Exception as error:
                    patches.caught(wrapper, error)
            return call(*args, **kw)

        return wrapper

    def _device_end(self, call: Callable[..., Any], original: Callable[..., Any]) -> Any:
        patches, noting = self._patches, self._noting

        def wrapper(*args: Any, **kw: Any) -> Any:
            if noting:
                try:
                    noting[0].device_end()
                except Exception as error:
                    patches.caught(wrapper, error)
            return call(*args, **kw)

        return wrapper

    def forwarding(self, *args: Any, **kw: Any) -> None:
        """Begin the device span of the step: its inputs are prepared."""
        for marks in self._noting:
            marks.device_start()

    def mark(self) -> None:
        """Note the steps without a lock: the device computes beside this host."""
        self._marks = self._probe.marks()

    def sign(self) -> None:
        """Sign the steps that have ended; with that the spans that have come are written."""
        with self._lock:
            while self._done:
                self._signer.sign(*self._done.popleft())

    def sign_overdue(self, now_ns: int) -> None:
        """Sign them if no launch has followed for long; on the probe's own thread."""
        if self._done and now_ns - self._since_ns >= OVERDUE_NS:
            self.sign()

    def idling(self, worker: Any, *args: Any, **kw: Any) -> None:
        """Begin a step that is executed only because other replicas execute one.

        Their numbers are negative: the core knows nothing of them.
        """
        self._num_dummies += 1
        self.sign()
        self._probe.start(-self._num_dummies, dummy=True)

    def idled(self, _: None, result: Any, worker: Any, *args: Any, **kw: Any) -> None:
        """End such a step."""
        self._probe.stop(-self._num_dummies)

    def closed(self, _: None, result: None, worker: Any) -> None:
        """The worker shuts down."""
        if self._is_observed(worker):
            self._close()

    def is_computing_on_host(self) -> bool:
        """Return whether a worker of this process computes on its CPU."""
        return self.is_early and self._worker is not None and self._worker() is not None

    def _is_observed(self, worker: Any) -> bool:
        return self._worker is not None and self._worker() is worker

    def _close(self) -> None:
        """Close the ring; another worker may follow in this process."""
        self.sign()
        self._probe.close()
        self._worker = self._open = self._marks = None
        self._noting.clear()
        self._probe = Probe.disabled()
        self._has_run = self._is_warming_up = False

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
