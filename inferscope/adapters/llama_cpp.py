"""Adapter for llama-cpp-python, which evaluates one sequence at a time by `Llama.eval`.

    create_completion ─► generate ─┬─ eval(prompt)        a step: what the cache lacks of the prompt
                                   ├─ yield token         it leaves the loop
                                   └─ eval([token, …])    a step: the token, and drafts to verify

Each run of `generate` is a request. Steps are timed on the host: with layers on a GPU the call
returns at their launch, and the rest of their time appears as the host's gap.
"""

from __future__ import annotations

import functools
import itertools
import sys
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path
from types import ModuleType
from typing import Any

from inferscope.adapters.patching import Patches
from inferscope.adapters.recorder import Recorder, Recorders
from inferscope.adapters.slice_builder import SliceBuilder
from inferscope.adapters.watch import Watch, run_locked
from inferscope.probe import EngineInfo, HostTimer, StepTimer, forked_lock
from inferscope.records import RequestIndex

Function = Callable[..., Any]

_numbers = itertools.count(1)
_lock = forked_lock()


class _OnThread(threading.local):
    """The run that evaluates in this thread, and the token limit of its caller."""

    run: Run | None = None
    max_tokens = 0


class Run:
    """One run of `generate`."""

    def __init__(self, recorder: Recorder, arrived_ns: int, max_tokens: int) -> None:
        self.recorder = recorder
        self._arrived_ns = arrived_ns
        self._max_tokens = max_tokens
        self._index: RequestIndex | None = None
        self._num_prompt = 0
        self._num_generated = 0
        self._seen = 0
        self._step = -1
        self._slices: SliceBuilder | None = None
        """Slices of the last step, until its drafts are verified."""
        self._num_since = 0
        """Number of tokens that have left since then."""

    def eval_begins(self, start: int, num_tokens: int) -> None:
        """Begin a step: tokens are about to be evaluated after the cached ones."""
        self._judge()
        probe = self.recorder.probe
        end = start + num_tokens
        if self._index is None:
            name = f"completion-{next(_numbers)}"
            self._num_prompt = end
            self._index = probe.queued(name, prompt_tokens=end, at_ns=self._arrived_ns)
            probe.admitted(self._index, cached_tokens=start)
        is_prompt = start < self._num_prompt
        self._slices = SliceBuilder()
        known = end if is_prompt else start + 1
        self._slices.add(
            self._index, start, end, num_prompt=self._num_prompt, seen=self._seen, num_known=known
        )
        self._seen = max(self._seen, known)
        self._step = self.recorder.next_step()
        is_cold = self.recorder.is_cold("eager", num_tokens)
        probe.start(self._step, cold=is_cold)

    def eval_ends(self) -> None:
        """End the step."""
        self.recorder.probe.stop(self._step)

    def yields(self) -> None:
        """Record a token that leaves the loop."""
        if self._index is None:
            return
        self._judge_if_plain()
        self._num_since += 1
        self._num_generated += 1
        self.recorder.probe.emitted([self._index], [1], step=self._step)

    def ends(self, error: type[BaseException] | None) -> None:
        """Record the run's end: its caller stopped it, or an error of this type did."""
        self._judge()
        if self._index is None:
            return
        reason = "length" if 0 < self._max_tokens <= self._num_generated else "stop"
        if error is not None and issubclass(error, KeyboardInterrupt):
            reason = "client_cancel"
        elif error is not None and not issubclass(error, GeneratorExit):
            reason = "error"
        self.recorder.probe.finished(self._index, reason)

    def _judge_if_plain(self) -> None:
        """Record a step without drafts at its first token."""
        if self._slices is not None and not any(self._slices.proposed):
            self._judge()

    def _judge(self) -> None:
        slices, self._slices = self._slices, None
        if slices is not None:
            slices.accept(max(0, self._num_since - 1))
            slices.write_to(self.recorder.probe, self._step)
        self._num_since = 0


class _Resumed:
    """The generator of a run; `eval` finds the run while the generator is resumed."""

    def __init__(
        self, inner: Generator[int, Any, None], begun: Run, on: _OnThread, run: Function
    ) -> None:
        self._inner = inner
        self._begun = begun
        self._on = on
        self._run = run

    def __iter__(self) -> _Resumed:
        return self

    def __next__(self) -> int:
        return self.send(None)

    def send(self, value: Any) -> int:
        """Resume the generator with a value, up to its next token."""
        return self._resume(self._inner.send, value)

    def throw(self, *error: Any) -> int:
        """Resume the generator with an exception, which it may answer with a token."""
        try:
            return self._resume(self._inner.throw, *error)
        finally:
            del error  # its traceback has this frame

    def close(self) -> None:
        """End the generator."""
        self._inner.close()

    def _resume(self, how: Function, *given: Any) -> int:
        outer, self._on.run = self._on.run, self._begun
        try:
            token: int = how(*given)
        finally:
            self._on.run = outer  # a logits processor of that one may have made this run
            del given  # an exception's traceback has this frame
        self._run(self._begun.yields)
        return token


class Session:
    """The observed `Llama`s of this process."""

    def __init__(self) -> None:
        self.patches = Patches("llama-cpp-python")
        self.recorders = Recorders(self.patches)
        self.watches_all = False
        self._watched: dict[int, tuple[Any, int]] = {}
        self._on = _OnThread()

    def install(self, cls: Any) -> None:
        """Wrap what a class of `Llama` calls."""
        self.patches.replace(cls, "generate", self._generate)
        self.patches.replace(cls, "eval", self._eval)
        self.patches.replace(cls, "create_completion", self._complete)

    def add(self, llama: Any) -> None:
        """Observe a `Llama`, which is kept until it is observed no more."""
        self._watched[id(llama)] = (llama, self._watched.get(id(llama), (llama, 0))[1] + 1)

    def remove(self, llama: Any) -> None:
        """Observe it once less."""
        _, num = self._watched.pop(id(llama), (llama, 1))
        if num > 1:
            self._watched[id(llama)] = (llama, num - 1)
        elif not self.watches_all:
            self.recorders.release(llama)

    @property
    def is_idle(self) -> bool:
        """Nothing is observed any more."""
        return not self.watches_all and not self._watched

    def close(self) -> None:
        """Put everything back, and close the rings."""
        self.patches.restore()
        self.recorders.close()

    # --- what is wrapped ----------------------------------------------------------------------

    def _complete(self, original: Function) -> Function:
        on = self._on

        @functools.wraps(original)
        def create_completion(llama: Any, *args: Any, **kwargs: Any) -> Any:
            # Its answer may be a generator that begins to run much later: this is what it asked
            # for last, and a wrong guess makes a `length` a `stop` at worst.
            wanted = kwargs.get("max_tokens", args[2] if len(args) > 2 else _DEFAULT_TOKENS)
            on.max_tokens = wanted if isinstance(wanted, int) else 0
            return original(llama, *args, **kwargs)

        return create_completion

    def _generate(self, original: Function) -> Function:
        on, run = self._on, self.patches.run

        @functools.wraps(original)
        def generate(llama: Any, *args: Any, **kwargs: Any) -> Generator[int, Any, None]:
            inner = original(llama, *args, **kwargs)
            begun: Run | None = None
            # The error itself, in a local of this frame, would keep the frame alive in a cycle with
            # its traceback, and with the frame the model.
            error: type[BaseException] | None = None
            try:  # an interrupt may come in any of these lines
                begun = run(self._begin, llama)
                yield from inner if begun is None else _Resumed(inner, begun, on, run)
            except BaseException as caught:
                error = type(caught)
                raise
            finally:
                if begun is not None:
                    run(self._end, begun, error)

        return generate

    def _eval(self, original: Function) -> Function:
        on, run = self._on, self.patches.run

        @functools.wraps(original)
        def evaluate(llama: Any, tokens: Any, *args: Any, **kwargs: Any) -> Any:
            begun = on.run
            if begun is None or begun.recorder.model.ref() is not llama:
                return original(llama, tokens, *args, **kwargs)
            run(_eval_begins, begun, llama, tokens)
            result = original(llama, tokens, *args, **kwargs)
            run(begun.eval_ends)
            return result

        return evaluate

    def _begin(self, llama: Any) -> Run | None:
        if not self.watches_all and id(llama) not in self._watched:
            return None
        recorder: Recorder | None = None
        try:
            recorder = self.recorders.take(llama, functools.partial(_describe, llama))
            if recorder is None:
                return None
            wanted, self._on.max_tokens = self._on.max_tokens, 0
            return Run(recorder, time.monotonic_ns(), wanted)
        except BaseException:
            if recorder is not None:
                self.recorders.give_back(recorder)
            raise

    def _end(self, run: Run, error: type[BaseException] | None) -> None:
        try:
            run.ends(error)
        finally:
            self.recorders.give_back(run.recorder)


_DEFAULT_TOKENS = 16
"""Default token limit of `create_completion`."""


_session: Session | None = None


def watch(subject: Any) -> Watch:
    """Observe a `llama_cpp.Llama`."""
    with _lock:
        session = _begun()
        session.add(subject)
        session.patches.run(session.install, type(subject))
        session.patches.run(
            session.recorders.open_first, subject, functools.partial(_describe, subject)
        )
        return Watch(
            session.recorders.path_of(subject), functools.partial(_unwatch, session, subject)
        )


def _unwatch(session: Session, llama: Any) -> None:
    """Release one observation; the last one removes all hooks."""

    def remove() -> None:
        global _session
        session.remove(llama)
        if session is _session and session.is_idle:
            session.close()
            _session = None

    run_locked(_lock, remove)


def observe_module(module: ModuleType) -> None:
    """Observe every `Llama`; called when `llama_cpp.llama` has been imported."""
    with _lock:
        session = _begun()
        session.watches_all = True
        session.patches.run(session.install, getattr(module, "Llama", None))


def _begun() -> Session:
    global _session
    if _session is None:
        _session = Session()
    return _session


def _eval_begins(run: Run, llama: Any, tokens: Any) -> None:
    run.eval_begins(int(llama.n_tokens), len(tokens))


def _describe(llama: Any) -> tuple[EngineInfo, StepTimer]:
    """Return the certain facts of an engine; the shape of a quantised file is not one."""
    path = str(getattr(llama, "model_path", ""))
    version = getattr(sys.modules.get("llama_cpp"), "__version__", "")
    info = EngineInfo(
        0,
        "llama-cpp-python",
        version=str(version),
        model=path,
        served_name=Path(path).stem,
        device="cpu",
        max_running=1,
        token_budget=int(getattr(llama, "n_batch", 0)),
    )
    return info, HostTimer()
