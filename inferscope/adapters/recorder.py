"""Recorders for hooks in a generating process: a probe, and the number of the next step.

A ring has one writing thread, and a timer one step at a time. So each thread that generates while
others do takes a recorder of its own. A recorder belongs to one model: its timer is that of the
model's device, and its ring describes the model.

Each model is an engine of its own to readers, for an engine has one shape, one device and one fit
of its cost. The first has the process's engine ID, the second that ID with `-2` behind it, and so
on. Models of the same description (replicas, or one that was unloaded and loaded again) share an
engine; their recorders are its data-parallel ranks.
"""

from __future__ import annotations

import atexit
import itertools
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from inferscope.adapters.patching import Patches
from inferscope.adapters.watch import run_locked
from inferscope.host_signals import start_thread
from inferscope.probe import Deferred, EngineInfo, Probe, StepTimer, engine_id, forked_lock

MAX_RECORDERS = 8
"""Maximum number of open rings, for all models and threads: each has 64 MB by default."""
_MAX_ENGINES = 64
"""Engines whose IDs are remembered while none of their models is there."""

Describe = Callable[[], tuple[EngineInfo, StepTimer]]
"""Function that returns the description of an engine, and a timer for its steps."""


class Engine:
    """The models of this process that have one description.

    Attributes:
        engine_id: None for the process's own.
        ranks: of the recorders that are open.
        front_end: the probe of the HTTP server in front of it, where that is not the process's.
    """

    def __init__(self, engine_id: str | None) -> None:
        self.engine_id = engine_id
        self.ranks: set[int] = set()
        self.front_end: Probe | None = None

    def take_rank(self) -> int:
        """Return the lowest rank that no open recorder has."""
        rank = next(rank for rank in itertools.count() if rank not in self.ranks)
        self.ranks.add(rank)
        return rank


class Engines:
    """The engines of this process, by the description of their models."""

    def __init__(self) -> None:
        self._lock = forked_lock()
        self._by_description: dict[tuple[str, ...], Engine] = {}
        self._num_made = 0

    def of(self, info: EngineInfo) -> Engine:
        """Return the engine of a description, a new one for one that was not there before."""
        key = (info.engine, info.model, info.options_hash, info.device)
        with self._lock:
            engine = self._by_description.pop(key, None)
            if engine is None:
                self._num_made += 1
                number = self._num_made
                engine = Engine(None if number == 1 else f"{engine_id()}-{number}")
            self._by_description[key] = engine
            if len(self._by_description) > _MAX_ENGINES:
                unused = (key for key, each in self._by_description.items() if not each.ranks)
                self._by_description.pop(next(unused, key))
        return engine


_engines = Engines()


class Recorder:
    """Recorder of one thread's steps of one model, with a ring of its own.

    Attributes:
        thread: identity of the thread that uses it until `give_back_own`, or 0.
        num_taken: number of times that `take` has returned it.
        deferred: what is noted and not recorded yet, None before anything is.
    """

    def __init__(self, probe: Probe, model: _Model, rank: int) -> None:
        self.probe = probe
        self.model = model
        self.rank = rank
        self.thread = 0
        self.num_taken = 0
        self.deferred: Deferred | None = None
        self._next_step = 0
        self._seen: set[tuple[str, int]] = set()

    def next_step(self) -> int:
        """Return the number of the step that begins."""
        step = self._next_step
        self._next_step += 1
        return step

    def is_cold(self, mode: str, num_tokens: int) -> bool:
        """Record a step's size and mode; return whether no such step has run before."""
        bucket = (mode, num_tokens.bit_length())
        if bucket in self._seen:
            return False
        self._seen.add(bucket)
        return True


class _Model:
    """The recorders of one model.

    Attributes:
        ref: the model, which is not kept alive.
        place: the device that it was on.
        is_retired: collected, moved or no longer observed: a recorder given back is closed.
    """

    def __init__(self, ref: weakref.ref[Any], place: str, engine: Engine) -> None:
        self.ref = ref
        self.place = place
        self.engine = engine
        self.free: list[Recorder] = []
        self.is_retired = False


class Recorders:
    """The recorders of a process: for each model, one per thread that generates at the same time.

    Those of a model that is collected, or moves to another device, are closed.
    """

    def __init__(self, patches: Patches) -> None:
        """Start with none; a fault in a hook of `patches` switches their probes off."""
        self._patches = patches
        self._lock = forked_lock()  # a finaliser may close an observation while it is held
        self._models: dict[int, _Model] = {}
        """Keyed by the identity of the model."""
        self._open: list[Recorder] = []
        self._front_ends: list[Engine] = []
        patches.forgetting.append(self._forget_facts)
        # A program that just ends, as most do, has not lost its engine.
        atexit.register(self.close)

    def take(
        self, model: Any, describe: Describe, *, place: str = "", thread: int = 0
    ) -> Recorder | None:
        """Return a recorder of a model that is not in use; None, logged once, if too many are.

        Args:
            model: what generates.
            describe: called for a new recorder; its rank is set here.
            place: the model's device.
            thread: identity of the thread that takes it, for `give_back_own`.
        """
        with self._lock:
            known = self._known(model, place)
            if known is not None and known.free:
                recorder = known.free[-1]
                recorder.thread = thread  # before it is taken: an interrupt here loses none
                recorder.num_taken += 1
                return known.free.pop()
            if len(self._open) == MAX_RECORDERS:
                self._patches.unsupported(
                    "more models or threads generating at once; some go unrecorded"
                )
                return None
            info, timer = describe()
            if known is None:
                known = self._enter(model, place, info)
            rank = known.engine.take_rank()
            probe = Probe.open(
                msgspec.structs.replace(info, ranks=(0, 0, rank, 0)),
                rank=rank,
                timer=timer,
                engine_id=known.engine.engine_id,
            )
            self._patches.attach(probe)
            recorder = Recorder(probe, known, rank)
            recorder.thread = thread
            self._open.append(recorder)
            return recorder

    def give_back(self, recorder: Recorder) -> None:
        """Return a recorder to the free ones; the one with the lowest rank is taken first.

        Requests that an interrupt has left in it end as `client_cancel`.
        """
        num_taken = recorder.num_taken
        run_locked(self._lock, lambda: self._give_back(recorder, num_taken))

    def give_back_own(self) -> None:
        """Return the recorders that this thread still uses after an interrupt."""
        own = threading.get_ident()
        with self._lock:
            for recorder in [each for each in self._open if each.thread == own]:
                self.give_back(recorder)

    def open_first(self, model: Any, describe: Describe, *, place: str = "") -> None:
        """Make a model's first one, to attach to before the first step; see `take`."""
        if not self._recorders_of(model):
            recorder = self.take(model, describe, place=place)
            if recorder is not None:
                self.give_back(recorder)

    def front_end(self, model: Any, describe: Describe, *, place: str = "") -> Probe | None:
        """Return the probe of the HTTP edge in front of a model; None for the process's own."""
        with self._lock:
            known = self._known(model, place)
            if known is None:
                known = self._enter(model, place, describe()[0])
            engine = known.engine
            if engine.engine_id is None or engine.front_end is not None:
                return engine.front_end
            if len(self._front_ends) == MAX_RECORDERS:
                return Probe.disabled()
            info = EngineInfo(0, "transformers")
            engine.front_end = Probe.open(info, role="frontend", engine_id=engine.engine_id)
            self._front_ends.append(engine)
            self._patches.attach(engine.front_end)
            return engine.front_end

    def release(self, model: Any) -> None:
        """Close the recorders of a model that is no longer observed."""

        def release() -> None:
            known = self._models.get(id(model))
            if known is not None and known.ref() is model:
                self._retire(known)

        run_locked(self._lock, release)

    def path_of(self, model: Any) -> Path | None:
        """Return the ring of a model's first recorder, None where nothing is recorded."""
        found = self._recorders_of(model)
        return found[0].probe.path if found else None

    def close(self) -> None:
        """Close all rings."""
        atexit.unregister(self.close)
        run_locked(self._lock, self._close_all)

    def _close_all(self) -> None:
        for known in list(self._models.values()):
            self._retire(known)
        for recorder in list(self._open):  # those in use
            self._close(recorder)
        for engine in list(self._front_ends):
            self._close_front_end(engine)

    def _forget_facts(self) -> None:
        """Drop what is deferred, which refers to the model; no hook is called any more."""
        for recorder in list(self._open):
            if recorder.deferred is not None:
                recorder.deferred.facts.clear()

    def _recorders_of(self, model: Any) -> list[Recorder]:
        known = self._models.get(id(model))
        if known is None or known.ref() is not model:
            return []
        return [recorder for recorder in list(self._open) if recorder.model is known]

    # --- under the lock -----------------------------------------------------------------------

    def _known(self, model: Any, place: str) -> _Model | None:
        """Return the entry of a model, unless it has moved since."""
        known = self._models.get(id(model))
        if known is not None and (known.ref() is not model or known.place != place):
            self._retire(known)
            return None
        return known

    def _enter(self, model: Any, place: str, info: EngineInfo) -> _Model:
        known = _Model(weakref.ref(model, self._collected), place, _engines.of(info))
        self._models[id(model)] = known
        return known

    def _collected(self, ref: weakref.ref[Any]) -> None:
        """Start a thread that closes the recorders of a collected model.

        The garbage collector may run anywhere, within a lock of ours or of `threading.Thread` too.
        """
        with suppress(RuntimeError):  # the interpreter is ending, and all rings are closed
            start_thread(self._forget, ref)

    def _forget(self, ref: weakref.ref[Any]) -> None:
        with self._lock:
            for known in [each for each in self._models.values() if each.ref is ref]:
                self._retire(known)

    def _give_back(self, recorder: Recorder, num_taken: int) -> None:
        if recorder.num_taken != num_taken:  # this call was delayed: it is in use again
            return
        for index in recorder.probe.live_requests:
            recorder.probe.finished(index, "client_cancel")
        known = recorder.model
        if known.is_retired:
            self._close(recorder)
            return
        if recorder not in known.free:
            known.free.append(recorder)
            known.free.sort(key=lambda each: -each.rank)
        recorder.thread = 0

    def _retire(self, known: _Model) -> None:
        known.is_retired = True
        for key in [key for key, each in self._models.items() if each is known]:
            del self._models[key]
        for recorder in known.free:
            self._close(recorder)
        known.free = []

    def _close(self, recorder: Recorder) -> None:
        if recorder not in self._open:
            return
        engine = recorder.model.engine
        recorder.probe.close()
        self._open.remove(recorder)
        self._patches.detach(recorder.probe)
        engine.ranks.discard(recorder.rank)
        if not engine.ranks and engine.front_end is not None:
            self._close_front_end(engine)

    def _close_front_end(self, engine: Engine) -> None:
        probe, engine.front_end = engine.front_end, None
        if probe is not None and engine in self._front_ends:
            probe.close()
            self._patches.detach(probe)
            self._front_ends.remove(engine)
