"""transformers: `generate`, continuous batching, and which models are observed.

`watch` wraps functions of the generation loop (`generate`) and of continuous batching
(`batching`); closing the last observation puts every one of them back. Classes are patched and
never instances, for an instance takes its attributes along into copies and pickles. So what is
wrapped asks first whether its model is observed.
"""

from __future__ import annotations

import functools
import threading
import time
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

from inferscope.adapters.patching import Patches
from inferscope.adapters.recorder import Recorders
from inferscope.adapters.transformers.batching_hooks import BatchingHooks
from inferscope.adapters.transformers.generate import DraftLoop, Loop, MainLoop, next_name
from inferscope.adapters.transformers.info import describe
from inferscope.adapters.watch import Watch, run_locked
from inferscope.errors import BadInput
from inferscope.probe import Probe, forked_lock

Function = Callable[..., Any]

_lock = forked_lock()


class _OnThread(threading.local):
    """What goes on in a thread: the call of `generate`, and the decoding loop within it."""

    loop: Loop | None = None
    arrived_ns = 0
    name = ""
    num_loops = 0

    def __getstate__(self) -> dict[str, object]:
        """Return no state: a pickled hook is within no call."""
        return {}


class Session:
    """All that is observed in this process, from the first observation to the last.

    Attributes:
        watches_all: whether every model is observed, not only the added ones.
        recorders: recorders of each model, one per thread that generates.
    """

    def __init__(self) -> None:
        self.patches = Patches("transformers")
        self.recorders = Recorders(self.patches)
        self.watches_all = False
        self._expected: dict[int, tuple[weakref.ref[Any], str, int]] = {}
        """Names and arrival times of requests, by the identity of the inputs of `generate`."""
        self._models: dict[int, tuple[weakref.ref[Any], int]] = {}
        """Observed models with their number of observations, by identity."""
        self._on = _OnThread()
        self.batching = BatchingHooks(self.patches, self.recorders, self.watches)

    def __getstate__(self) -> dict[str, object]:
        """Return no state: hooks pickled with their class only pass calls on (see `Patches`)."""
        return {}

    # --- observed models ----------------------------------------------------------------------

    def add(self, model: Any) -> None:
        """Observe a model."""
        key = id(model)
        _, num = self._models.get(key, (None, 0))
        self._models[key] = (weakref.ref(model, lambda _: self._models.pop(key, None)), num + 1)

    def remove(self, model: Any) -> None:
        """Release one observation of a model."""
        entry = self._models.pop(id(model), None)
        if entry is not None and entry[1] > 1:
            self._models[id(model)] = (entry[0], entry[1] - 1)
        elif not self.watches_all:
            self.recorders.release(model)

    @property
    def is_idle(self) -> bool:
        """Return whether no model is observed any more."""
        return not self.watches_all and not self._models

    def watches(self, model: Any) -> bool:
        """Return whether a model is observed."""
        entry = self._models.get(id(model))
        return self.watches_all or (entry is not None and entry[0]() is model)

    def expect(self, ids: Any, name: str, arrived_ns: int) -> None:
        """Set the name of the request for which `generate` will get these ids."""
        key, expected = id(ids), self._expected
        # Identities are reused: a name expires with its ids, whether `generate` ran or not.
        expected[key] = (weakref.ref(ids, lambda _: expected.pop(key, None)), name, arrived_ns)

    def open_first(self, model: Any) -> None:
        """Open a model's ring before the first step, so that readers can attach to it."""
        described = functools.partial(describe, model)
        self.recorders.open_first(model, described, place=str(model.device))

    def front_end(self, model: Any) -> Probe | None:
        """Return the probe of the HTTP edge in front of a model; None for the process's own."""
        described = functools.partial(describe, model)
        return self.recorders.front_end(model, described, place=str(model.device))

    def close(self) -> None:
        """Put everything back, and close the rings."""
        self.patches.run(self.batching.close)
        self.patches.restore()
        self.recorders.close()

    # --- what is wrapped ----------------------------------------------------------------------

    def patch_shared(self) -> None:
        """Wrap what all models share."""
        mixin = self.patches.find("transformers.generation.utils", "GenerationMixin")
        self.patches.replace(mixin, "generate", self._generate)
        self.batching.install()

    def patch_model(self, cls: type) -> None:
        """Wrap the loop's functions of a class of models where they are defined."""
        on, patches = self._on, self.patches

        def owner(name: str) -> type:
            return next((base for base in cls.__mro__ if name in vars(base)), cls)

        for name, is_assisted in (("_sample", False), ("_assisted_decoding", True)):
            wrap = functools.partial(self._loop, is_assisted=is_assisted)
            patches.replace(owner(name), name, wrap)
        name = "prepare_inputs_for_generation"
        patches.replace(owner(name), name, self._prepare)

        def ends(model: Any, *_args: Any, **_kwargs: Any) -> None:
            if on.loop is not None and on.loop.model is model:
                on.loop.forward_ends()

        def turns(model: Any, *_args: Any, **_kwargs: Any) -> None:
            if on.loop is not None and on.loop.model is model:
                on.loop.turn()

        def compiles(model: Any, *_args: Any, **_kwargs: Any) -> None:
            if on.loop is not None and on.loop.model is model:
                on.loop.is_compiled = True

        for name, before in (
            ("_update_model_kwargs_for_generation", ends),
            ("_has_unfinished_sequences", turns),
            ("get_compiled_call", compiles),
        ):
            patches.around(owner(name), name, before=before)

    # --- the call of generate -----------------------------------------------------------------

    def _generate(self, original: Function) -> Function:
        on, patches = self._on, self.patches

        @functools.wraps(original)
        def generate(model: Any, *args: Any, **kwargs: Any) -> Any:
            is_within = on.arrived_ns or on.loop is not None
            if patches.is_off or is_within or not self.watches(model):
                return original(model, *args, **kwargs)
            try:  # an interrupt may come in any of these lines
                on.arrived_ns, on.num_loops, on.name = time.monotonic_ns(), 0, ""
                patches.run(self._enter, model, args, kwargs)
                result = original(model, *args, **kwargs)
            finally:
                on.arrived_ns, on.loop = 0, None
                patches.run(self.recorders.give_back_own)
            if not on.num_loops and not patches.is_off:
                patches.unsupported("beam search and custom decoding loops are not recorded")
            return result

        return generate

    def _enter(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.patch_model(type(model))
        assistant = kwargs.get("assistant_model")
        if assistant is not None:
            self.patch_model(type(assistant))
        expected = self._expected.pop(id(kwargs.get("input_ids")), None)
        if expected is not None:
            _, self._on.name, self._on.arrived_ns = expected

    # --- its decoding loop --------------------------------------------------------------------

    def _loop(self, original: Function, *, is_assisted: bool) -> Function:
        on, patches = self._on, self.patches

        @functools.wraps(original)
        def loop(*args: Any, **kwargs: Any) -> Any:
            model, outer = args[0], on.loop
            if patches.is_off or not (
                self.watches(model) if outer is None else not outer.is_overridden(model)
            ):
                return original(*args, **kwargs)
            begun: Loop | None = None
            error: BaseException | None = None
            try:
                on.num_loops += 1
                ids = _input_ids(args, kwargs)
                begun = on.loop = patches.run(self._begin, model, ids, kwargs, is_assisted)
                return original(*args, **kwargs)
            except BaseException as raised:
                error = raised
                raise
            finally:
                on.loop = outer
                patches.run(self._leave, begun, error)
                del error  # its traceback holds this frame

        return loop

    def _begin(
        self, model: Any, ids: Any, settings: dict[str, Any], is_assisted: bool
    ) -> Loop | None:
        on = self._on
        if on.loop is not None:  # an assistant's, or a loop within a custom one
            outer = on.loop if isinstance(on.loop, MainLoop) else None
            if outer is None or not outer.is_assisted:
                return None
            if model.device != outer.model.device:  # the recorder's timer is the other's
                self.patches.unsupported("an assistant on another device than its model")
                return None
            return DraftLoop(model, settings, outer)
        if model.config.is_encoder_decoder:
            self.patches.unsupported("encoder-decoder models are not recorded")
            return None
        criteria = settings.get("stopping_criteria")
        if criteria is not None:
            self.patches.around(type(criteria), "__call__", after=self._judged)
        recorder = self.recorders.take(
            model,
            functools.partial(describe, model),
            place=str(model.device),
            thread=threading.get_ident(),
        )
        if recorder is None:
            return None
        try:
            return MainLoop(
                recorder,
                model,
                ids,
                settings,
                arrived_ns=on.arrived_ns or time.monotonic_ns(),
                name=on.name or next_name(),
                is_assisted=is_assisted,
            )
        except BaseException:
            self.recorders.give_back(recorder)
            raise

    def _leave(self, loop: Loop | None, error: BaseException | None) -> None:
        if loop is None:
            return
        try:
            loop.leave(error)
        finally:
            if isinstance(loop, MainLoop):
                self.recorders.give_back(loop.recorder)

    def _judged(
        self, _: None, is_done: Any, criteria: Any, ids: Any, *_args: Any, **_kwargs: Any
    ) -> None:
        loop = self._on.loop
        if loop is not None and loop.criteria is criteria:
            loop.tokens_chosen(ids, is_done)

    def _prepare(self, original: Function) -> Function:
        on, run = self._on, self.patches.run

        @functools.wraps(original)
        def prepare_inputs_for_generation(*args: Any, **kwargs: Any) -> Any:
            model, loop = args[0], on.loop
            # One that overrides another calls it.
            if loop is None or loop.model is not model or loop.is_preparing:
                return original(*args, **kwargs)
            run(loop.forward_ends)  # of the chunk of the prompt before this one
            loop.is_preparing = True
            try:
                inputs = original(*args, **kwargs)
            finally:
                loop.is_preparing = False
            run(loop.forward_begins, _input_ids(args, kwargs), inputs)
            return inputs

        return prepare_inputs_for_generation


def _input_ids(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the token ids of a call, whatever its model names them if they come by position."""
    return args[1] if len(args) > 1 else kwargs.get("input_ids")


_session: Session | None = None


def watch(subject: Any) -> Watch:
    """Observe a model, or the model of a continuous batching manager.

    Raises:
        BadInput: it does not generate.
    """
    model = subject.model if hasattr(subject, "add_request") else subject
    if not hasattr(model, "generate"):
        raise BadInput(
            f"{type(subject).__name__} does not generate. Give a model with a language model head."
        )
    with _lock:
        session = _begun()
        session.add(model)
        session.patches.run(session.patch_model, type(model))
        session.patches.run(session.open_first, model)
        processor = getattr(subject, "batch_processor", None)
        if processor is not None:
            session.patches.run(session.batching.add, model, processor)
        # Weakly: an observation that is never closed must not keep the model alive.
        stop = functools.partial(_unwatch, session, weakref.ref(model))
        return Watch(session.recorders.path_of(model), stop)


def _unwatch(session: Session, ref: weakref.ref[Any]) -> None:
    """Observe a model once less; the last one puts everything back."""

    def remove() -> None:
        global _session
        model = ref()
        if model is not None:
            session.remove(model)
        if session is _session and session.is_idle:
            session.close()
            _session = None

    run_locked(_lock, remove)


def watch_all() -> Session:
    """Observe every model of this process: what `inferscope run` asks for."""
    with _lock:
        session = _begun()
        session.watches_all = True
        return session


def observe_module(module: ModuleType) -> None:
    """Observe every model; called when `transformers.generation.utils` has been imported."""
    watch_all()


def _begun() -> Session:
    global _session
    if _session is None:
        _session = Session()
        _session.patches.run(_session.patch_shared)
    return _session
