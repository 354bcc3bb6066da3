from __future__ import annotations

import gc
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from inferscope.adapters import llama_cpp, watch
from inferscope.adapters.watch import Watch, run_locked
from inferscope.probe import probe as probe_module
from inferscope.probe.forked_locks import forked_lock
from inferscope.probe.opening import make_ring
from tests.adapters.test_llama_cpp import Llama
from tests.ring.interrupted_lock import InterruptedLock, is_free


def test_an_action_waits_for_the_lock_and_its_caller_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watch, "_PATIENCE_S", 0.01)
    lock, is_done = forked_lock(), threading.Event()
    caller = threading.Thread(target=run_locked, args=(lock, is_done.set))
    with lock:
        caller.start()
        caller.join(30)
        assert not caller.is_alive()
        assert not is_done.is_set()
    assert is_done.wait(30)


@pytest.mark.parametrize("raised", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("place", ["acquire", "release"])
def test_a_handler_that_interrupts_a_locked_call_leaves_the_lock_free(
    place: str, raised: type[BaseException]
) -> None:
    def handler(*_: object) -> None:
        raise raised

    lock = InterruptedLock(place)
    before = signal.signal(signal.SIGALRM, handler)
    try:
        with pytest.raises(raised):
            run_locked(lock, lambda: None)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert is_free(lock)


def test_a_locked_call_leaves_the_lock_to_the_call_around_it() -> None:
    lock, found = forked_lock(), []
    run_locked(lock, lambda: run_locked(lock, lambda: found.append(1)) or found.append(2))
    assert found == [1, 2]
    assert not lock._is_owned()
    with lock:
        run_locked(lock, lambda: None)
        assert lock._is_owned()


class Service:
    """Ends its observation when it is collected, as an object of a host may."""

    def __init__(self) -> None:
        self.cycle = self
        self.watch: Watch = llama_cpp.watch(Llama())

    def __del__(self) -> None:
        self.watch.close()


def test_a_finaliser_that_closes_a_watch_does_not_delay_the_ring_of_a_generation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFERSCOPE_DIR", str(tmp_path))
    monkeypatch.setattr(watch, "_PATIENCE_S", 0.01)
    monkeypatch.setattr("inferscope.probe.opening.PATIENCE_S", 5)

    def collecting(*args: Any, **kwargs: Any) -> Any:
        gc.collect()
        return make_ring(*args, **kwargs)

    gc.disable()
    try:
        Service()
        llama = Llama()
        with_one = llama_cpp.watch(llama)
        first = llama.generate([1, 2, 3])
        next(first)  # its recorder is in use
        monkeypatch.setattr(probe_module, "make_ring", collecting)
        next(llama.generate([5, 6, 7]))
    finally:
        gc.enable()
    assert len(list(tmp_path.rglob("*.ring"))) == 3
    with_one.close()


def test_a_finaliser_that_closes_a_watch_does_not_delay_the_ring_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFERSCOPE_DIR", str(tmp_path))
    monkeypatch.setattr(watch, "_PATIENCE_S", 0.01)

    def collecting(*args: Any, **kwargs: Any) -> Any:
        gc.collect()
        return make_ring(*args, **kwargs)

    gc.disable()
    try:
        Service()
        monkeypatch.setattr(probe_module, "make_ring", collecting)
        second = llama_cpp.watch(Llama())
    finally:
        gc.enable()
    assert second.path is not None
    second.close()
