"""Recorder of step execution in vLLM's workers.

    execute_model ─► (None) ─► sample_tokens      on ranks of the last pipeline stage
    execute_model ─► output                       on the others, and for pooling models

Hooks of the worker cover both model runners and exclude graph capture, which runs beneath it.
Warm-up may call `execute_model` itself; a hook of its own excludes it. The scheduler's output
carries the step's number; if the number is lost on the way, both sides count steps alike, and the
steps are not signed.

Before a launch a hook only notes the time without a lock (`probe/marks.py`), records an event if
the span begins there, and writes the ring's word PENDING if no step is pending. Behind the next
launch, while the device computes, the step is signed and completed spans are written. On a CPU both
happen at the step's end: there a launch returns when its step is over.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from importlib import import_module
from time import monotonic_ns
from typing import Any

from inferscope.adapters.patching import Around, Direct, Patches
from inferscope.adapters.vllm import tag as vllm_tag
from inferscope.adapters.vllm.info import data_rank, engine_info
from inferscope.adapters.vllm.kept import OVERDUE_NS
from inferscope.adapters.vllm.modes import Modes, modes_of
from inferscope.adapters.vllm.signing import Signer
from inferscope.host_signals import suppressed
from inferscope.probe import (
    EventTimer,
    HostTimer,
    Marks,
    Probe,
    StepTimer,
    TorchEvents,
    forked_lock,
)

_ON_HOST = ("ngram", "[ngram]", "suffix")
"""Methods of speculation that use the device for nothing but the verification."""
_DEVICE_TOKENS = (
    *("use_eagle", "uses_draft_model"),
    *("uses_extract_hidden_states", "use_ngram_gpu"),
)
"""Predicates of a speculative configuration: its drafter takes tokens that are on the device."""
_FORWARD = "device spans that begin at the forward"


class WorkerHooks:
    """Hooks around the worker of a process.

    Attributes:
        is_early: whether each step is signed at its end, because this host computes it.
    """

    def __init__(self, patches: Patches) -> None:
        self._patches = patches
        self._worker: weakref.ref[Any] | None = None
        """Weak reference to the worker, which holds the weights."""
        self._probe = Probe.disabled()
        self._marks: Marks | None = None
        """Notes of the steps; None if this host computes them."""
        self._samples = True
        self._next_step = 0
        self._has_run = False
        self._is_warming_up = False
        self._num_dummies = 0
        self._signer = Signer(self._probe, Modes())
        self.is_early = False
        self._open: tuple[int, Any] | None = None
        """Number of the step that sampling will complete, and its `SchedulerOutput`."""
        self._noting: list[Marks] = []
        """`Marks` of the open step; empty if no step is open or this host computes.

        Wrappers within a step hold this list itself and read nothing else.
        """
        self._done: deque[tuple[int, Any]] = deque()
        """Numbers and outputs of the steps that are not signed yet."""
        self._since_ns = 0
        """Time when the oldest of these ended."""
        self._lock = forked_lock()
        """Lock held while steps are signed, by the engine's thread or the probe's."""
        patches.forgetting.append(self.forget)

    def forget(self) -> None:
        """Drop references to the engine's objects: no hook is called any more.

        The wrappers of each step only test these, and not whether the patches are off.
        """
        self._worker = self._open = None
        self._noting.clear()
        self._done.clear()

    def install(self, wrapper_class: Any) -> None:
        """Hook `init_device` of `WorkerWrapperBase`: by then the worker's class is known.

        `init_worker` is too early: it loads the plug-ins.
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
        """Open this process's ring, now that the number of blocks is known."""
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
        """Hook the start and end of a step's device span, within the model runner.

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
                    {"_bookkeeping_sync": Direct(self._bookkeeping_sync)},
                )
            return
        # The second model runner waits for nothing in `sample_tokens`.
        connector = getattr(runner, "kv_connector", None)
        owner = None if connector is None else type(connector)
        patches.unit(_FORWARD, owner, {"pre_forward": Around(after=self.forwarding)})

    def warming_up(self, worker: Any) -> None:
        """Ignore the steps of the warm-up, which no scheduler has planned."""
        self._is_warming_up = self._is_observed(worker)

    def warmed_up(self, _: None, result: Any, worker: Any) -> None:
        """Record steps again after the warm-up."""
        self._is_warming_up = False

    # As in `core.py`: a wrapper called before a dispatch does everything in one frame.

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
                    # The first step includes work that every process does once.
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
                if self._marks is not None:  # this step is launched
                    self._marks.book()
                if self._done:
                    with self._probe.hidden:
                        self.sign()
                if result is not None or not self._samples:  # no sampling follows
                    self.stop()
            except Exception as error:
                patches.caught(execute_model, error)
            return result

        return execute_model

    def _sample_tokens(self, call: Callable[..., Any], original: Callable[..., Any]) -> Any:
        patches, within = self._patches, self._patches.within

        def sample_tokens(*args: Any, **kw: Any) -> Any:
            result = call(*args, **kw)
            reference = self._worker
            if (
                self._open is None  # it has ended, before the host waited
                or reference is None
                or reference() is not args[0]
                or (within and patches.is_within("sample_tokens", args[0]))
            ):
                return result
            try:
                self.stop()  # outputs are queued; on a CPU they are there
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

    # The first start and the first end of a step count, so these two need not test whether an
    # override calls them.

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

    def _bookkeeping_sync(self, call: Callable[..., Any], original: Callable[..., Any]) -> Any:
        """End the open step: all of its work is queued, and the host is about to wait for it.

        What runs before the wait costs less than after it, when the thread has slept.
        """
        patches, noting = self._patches, self._noting

        def bookkeeping_sync(*args: Any, **kw: Any) -> Any:
            done = self._open
            if noting and done is not None:
                try:
                    self._open, ended_ns = None, noting.pop().end(done[0], 0)
                    if not self._done:
                        self._since_ns = ended_ns
                    self._done.append(done)
                except Exception as error:
                    patches.caught(bookkeeping_sync, error)
            return call(*args, **kw)

        return bookkeeping_sync

    def forwarding(self, *args: Any, **kw: Any) -> None:
        """Begin the step's device span, now that its inputs are prepared."""
        for marks in self._noting:
            marks.device_start()

    def mark(self) -> None:
        """Note steps without a lock from now on: a device computes beside this host."""
        self._marks = self._probe.marks()

    def sign(self) -> None:
        """Sign the steps that have ended; this also writes the completed spans."""
        with self._lock:
            while self._done:
                self._signer.sign(*self._done.popleft())

    def sign_overdue(self, now_ns: int) -> None:
        """Sign the ended steps if no launch follows in time; on the probe's own thread."""
        if self._done and now_ns - self._since_ns >= OVERDUE_NS:
            self.sign()

    def idling(self, worker: Any, *args: Any, **kw: Any) -> None:
        """Begin a step that only keeps pace with other replicas.

        Such steps have negative numbers: the core does not plan them.
        """
        self._num_dummies += 1
        self.sign()
        self._probe.start(-self._num_dummies, dummy=True)

    def idled(self, _: None, result: Any, worker: Any, *args: Any, **kw: Any) -> None:
        """End a step begun by `idling`."""
        self._probe.stop(-self._num_dummies)

    def closed(self, _: None, result: None, worker: Any) -> None:
        """Close the ring at the worker's shutdown."""
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
        self._patches.detach(self._probe)
        self._worker = self._open = self._marks = None
        self._noting.clear()
        self._probe = Probe.disabled()
        self._has_run = self._is_warming_up = False

    def _timer(self, device: Any) -> StepTimer | None:
        """Return a timer for steps on this device; None if its type is unsupported."""
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
    """Return whether this rank samples: only the last stage of a pipeline does."""
    group = import_module("vllm.distributed.parallel_state").get_pp_group()
    return bool(group.is_last_rank)


def _name_and_uuid(device: Any) -> tuple[str, str]:
    """Return the device's name and UUID; empty where vLLM's platform does not give them."""
    if device.type == "cpu":
        return "cpu", ""
    names = ["", ""]
    platform = import_module("vllm.platforms").current_platform
    for place, ask in enumerate(("get_device_name", "get_device_uuid")):
        with suppressed(Exception):  # a driver's failure here must not cost the probe
            names[place] = str(getattr(platform, ask)(device.index or 0))
    return names[0], names[1]
