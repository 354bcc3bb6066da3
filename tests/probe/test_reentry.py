"""Calls from within a call: signal handlers, finalisers, and exceptions that they raise."""

from __future__ import annotations

import gc
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import timeit
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dis import opname
from functools import cache, partial
from pathlib import Path
from types import CodeType
from typing import Any, cast

import pytest

from inferscope.probe import NO_REQUEST, EngineInfo, HostTimer, Probe, opening
from inferscope.probe.lifecycle import _MOST_QUEUED
from inferscope.probe.opening import discard
from inferscope.records import (
    CLOSED,
    FAILED,
    Clock,
    Emitted,
    Keyframe,
    ProbeHealth,
    RequestEvent,
    RequestIndex,
    StepPlan,
    StepSlices,
    StepSpan,
    decode,
)
from inferscope.ring import writer
from inferscope.ring.reader import Frame, Loss, RingReader
from inferscope.ring.writer import RingWriter
from tests.children import child
from tests.probe.fakes import FakeClock, do_step, everything, make_probe, make_ring, of, records
from tests.probe.test_any_call import check_ring
from tests.ring.test_damage import until


class RingWithin:
    """A ring writer that calls something in the midst of each frame it writes."""

    def __init__(self, ring: RingWriter) -> None:
        self.__dict__.update(ring=ring, within=None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ring, name)

    def __setattr__(self, name: str, value: object) -> None:
        if name == "within":
            self.__dict__[name] = value
        else:
            setattr(self.ring, name, value)

    def write(self, code: int, payload: bytes, *, flags: int = 0) -> bool:
        within, self.within = self.within, None
        if within is not None:
            within()
        return bool(self.ring.write(code, payload, flags=flags))


def probe_within(folder: Path, clock: FakeClock | None = None) -> tuple[Probe, Any]:
    ring: Any = RingWithin(make_ring(folder, capacity=1 << 20))
    probe = Probe(ring, None, EngineInfo(0, "test"), clock=clock or FakeClock(step_ns=1000))
    return probe, ring


def test_a_call_within_a_call_is_written_before_the_outer_one_returns(tmp_path: Path) -> None:
    probe, ring = probe_within(tmp_path)
    found: list[int] = []

    def handler() -> None:
        index = probe.queued("inner", prompt_tokens=2)
        probe.admitted(index)
        do_step(probe, 8, [index])
        probe.finished(index, "stop")
        probe.paused()
        found.append(index)
        assert not of(RequestEvent, tmp_path / "a.ring")

    ring.within = handler
    outer = probe.queued("outer", prompt_tokens=1)
    assert len({outer, *found}) == 2
    path = tmp_path / "a.ring"
    events = [(event.index, event.kind) for event in of(RequestEvent, path)]
    assert events == [(outer, 2), (found[0], 2), (found[0], 3), (found[0], 8)]
    assert [plan.step for plan in of(StepPlan, path)] == [8]
    assert [slices.step for slices in of(StepSlices, path)] == [8]
    assert of(Keyframe, path)[-1].paused_ns is not None
    # A step's own times would be wrong later: it has none, and that is counted.
    assert not of(StepSpan, path)
    probe.close()
    assert of(ProbeHealth, path)[-1].lost_calls == 2
    check_ring(path)


def test_too_many_calls_within_a_call_are_counted(tmp_path: Path) -> None:
    probe, ring = probe_within(tmp_path)
    indices = []
    ring.within = lambda: indices.extend(
        probe.queued("inner", prompt_tokens=2) for _ in range(_MOST_QUEUED + 7)
    )
    probe.emitted([0], [1])
    assert NO_REQUEST not in indices
    assert len(set(indices)) == _MOST_QUEUED + 7
    probe.close()
    path = tmp_path / "a.ring"
    assert len(of(RequestEvent, path)) == _MOST_QUEUED
    assert of(ProbeHealth, path)[-1].lost_calls == 7
    check_ring(path)


def test_a_fault_within_a_call_is_recorded_after_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    probe, ring = probe_within(tmp_path)
    ring.within = lambda: probe.fail(ValueError("lost count"))
    probe.emitted([0], [1])
    assert not probe.on
    assert not caplog.records
    probe._life.write_messages()
    assert len(caplog.records) == 1
    path = tmp_path / "a.ring"
    assert [type(record) for record in records(path)][-2:] == [Emitted, ProbeHealth]
    assert of(ProbeHealth, path)[-1].state == FAILED


@pytest.mark.parametrize("raised", [KeyboardInterrupt, SystemExit])
def test_a_handler_that_closes_the_probe_and_ends_the_process_leaves_a_closed_ring(
    tmp_path: Path, raised: type[BaseException]
) -> None:
    probe, ring = probe_within(tmp_path)

    def handler() -> None:
        probe.close()
        raise raised

    ring.within = handler
    with pytest.raises(raised):
        probe.emitted([0], [1])
    assert of(ProbeHealth, tmp_path / "a.ring")[-1].state == CLOSED
    check_ring(tmp_path / "a.ring")
    probe.emitted([0], [1])


def test_an_interrupted_keyframe_is_begun_anew(tmp_path: Path) -> None:
    clock = FakeClock(step_ns=1000)
    for num_frames in range(1, 5):  # in the midst of each of its records
        ring: Any = RingWithin(make_ring(tmp_path, f"r{num_frames}", capacity=1 << 20))
        probe = Probe(ring, None, EngineInfo(0, "test"), clock=clock)
        index = probe.queued("r", prompt_tokens=1)
        clock.now_ns += 11 * 10**9
        count = 0

        def interrupt(num_frames: int = num_frames, ring: Any = ring) -> None:
            nonlocal count
            count += 1
            if count > num_frames:
                raise KeyboardInterrupt
            ring.within = interrupt

        ring.within = interrupt
        with pytest.raises(KeyboardInterrupt):
            probe.emitted([index], [1])
        probe.emitted([index], [2])
        path = tmp_path / f"r{num_frames}.ring"
        # All that a reader needs who starts at the last keyframe.
        kinds = [type(record) for record in records(path)]
        last = len(kinds) - kinds[::-1].index(Keyframe)
        assert {EngineInfo, Clock} < set(kinds[last:])
        assert of(Emitted, path)[-1].tokens == b"\2\0\0\0"
        probe.close()
        check_ring(path)


@contextmanager
def signals(handler: Callable[..., object]) -> Iterator[None]:
    # Python discards an exception that a handler raises within a callback of the collector.
    gc.disable()
    before = signal.signal(signal.SIGALRM, handler)
    try:
        yield
    finally:
        gc.enable()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@cache
def returns(code: CodeType, at: int) -> bool:
    """Return whether an instruction ends its function."""
    return opname[code.co_code[at]].startswith("RETURN_")


@contextmanager
def signal_at_instruction(number: int, *functions: str) -> Iterator[list[int]]:
    """Send this process SIGALRM before the n-th bytecode instruction that runs within functions.

    Not before a return: Python runs handlers after calls, at jumps back and as functions begin.

    Yields a list that is empty until the signal was sent.
    """
    sent: list[int] = []
    num_seen = 0

    def trace(frame: Any, event: str, _: object) -> Any:
        nonlocal num_seen
        caller = frame
        while caller is not None and caller.f_code.co_name not in functions:
            caller = caller.f_back
        if caller is None:
            return trace
        frame.f_trace_opcodes = True
        if event == "opcode" and not sent and not returns(frame.f_code, frame.f_lasti):
            num_seen += 1
            if num_seen == number:
                sent.append(number)
                signal.raise_signal(signal.SIGALRM)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield sent
    finally:
        sys.settrace(before)


def at_every_instruction(
    folder: Path, functions: tuple[str, ...], call: Callable[[Probe], object]
) -> Iterator[tuple[Probe, Path]]:
    """Make a call again and again, with a signal whose handler closes the probe further on.

    Yields each probe and its ring after its call.
    """
    number, is_inside = 0, True
    while is_inside:
        number += 1
        probe = make_probe(folder, FakeClock(), name=f"r{number}", capacity=1 << 16)
        path = probe.path
        assert path is not None

        def handler(*_: object, probe: Probe = probe) -> None:
            sys.settrace(None)
            signal.setitimer(signal.ITIMER_REAL, 10)
            signal.signal(signal.SIGALRM, hangs)
            probe.close()

        def hangs(*_: object) -> None:
            raise TimeoutError("the call hangs")

        with signals(handler), signal_at_instruction(number, *functions) as sent:
            call(probe)
        is_inside = bool(sent)
        if is_inside:
            yield probe, path
    assert number > 5


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Collect no garbage meanwhile: Python suppresses what a handler raises in a finaliser."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.thorough
@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("raised", [TimeoutError, RuntimeError, TypeError])
@pytest.mark.parametrize(
    "call", [lambda probe: probe.emitted([0], [1.0]), lambda probe: probe.close()]
)
def test_an_exception_of_a_handler_within_any_instruction_is_the_hosts(
    tmp_path: Path, raised: type[Exception], call: Callable[[Probe], object]
) -> None:
    def handler(*_: object) -> None:
        signal.signal(signal.SIGALRM, signal.SIG_IGN)  # as a time limit's does that is used once
        raise raised("of the host")

    number, num_reached, is_inside = 0, 0, True
    while is_inside:
        number += 1
        probe = make_probe(tmp_path, FakeClock(), capacity=1 << 16)
        with signals(handler), signal_at_instruction(number, "emitted", "close") as sent:
            try:
                call(probe)
            except raised:
                num_reached += 1
        is_inside = bool(sent)
        assert num_reached == number - (not is_inside)
        assert not is_inside or probe._log.state != FAILED
        (tmp_path / "a.ring").unlink()
    assert number > 100


def left_behind(folder: Path) -> list[str]:
    """Return what an open that was given up has left: files, descriptors, threads."""
    files = [str(path) for path in folder.rglob("*") if path.is_file()]
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the descriptor by which they are listed
            files.append(os.readlink(f"/proc/self/fd/{number}"))
    threads = [thread.name for thread in threading.enumerate() if thread not in _threads_before]
    return [name for name in files if str(folder) in name] + [
        name for name in threads if "inferscope" in name
    ]


_threads_before: list[threading.Thread] = []
"""Threads of probes that other tests have left open."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("INFERSCOPE_DIR", str(tmp_path / "opened"))
    monkeypatch.setenv("INFERSCOPE_RING_MB", "0.1")
    _threads_before[:] = threading.enumerate()
    return tmp_path / "opened"


@pytest.mark.thorough
@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("raised", [TimeoutError, RuntimeError, KeyboardInterrupt])
def test_an_exception_of_a_handler_within_any_instruction_of_open_is_the_hosts(
    folder: Path, raised: type[BaseException]
) -> None:
    def handler(*_: object) -> None:
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        raise raised("of the host")

    number, is_inside = 0, True
    while is_inside:
        number += 1
        probe = None
        with signals(handler), signal_at_instruction(number, "open") as sent:
            try:
                probe = Probe.open(EngineInfo(0, "test"))
            except raised:
                assert sent
        is_inside = bool(sent)
        assert (probe is None) == is_inside
        assert number < 1000
    assert probe is not None
    assert probe.on
    probe.close()
    discard(probe.path)
    until(lambda: not left_behind(folder))


@pytest.mark.parametrize(
    ("module", "name"),
    [(os, "scandir"), (os.path, "lexists"), (writer, "_allocate"), (opening, "open_control")],
)
def test_an_exception_of_a_handler_while_the_ring_is_made_is_the_hosts(
    folder: Path, monkeypatch: pytest.MonkeyPatch, module: Any, name: str
) -> None:
    def handler(*_: object) -> None:
        raise TimeoutError("the model takes too long to load")

    real = getattr(module, name)

    def interrupted(*given: Any, **named: Any) -> Any:
        os.kill(os.getpid(), signal.SIGALRM)
        return real(*given, **named)

    monkeypatch.setattr(module, name, interrupted)
    with signals(handler):
        with pytest.raises(TimeoutError, match="too long"):
            Probe.open(EngineInfo(0, "test"))
        monkeypatch.undo()
        until(lambda: not left_behind(folder))


def test_an_odd_argument_costs_little_more_than_another(tmp_path: Path) -> None:
    probe = make_probe(tmp_path, FakeClock())

    def fastest_s(waiting: float) -> float:
        def call() -> None:
            probe.plan(1, start_ns=0, end_ns=1, waiting=cast(int, waiting), running=1)

        return min(timeit.repeat(call, number=20, repeat=20)) / 20

    assert fastest_s(-1) < fastest_s(0) + 100e-6  # 0.45 ms when 64 signals were asked for handlers
    probe.close()


def test_a_close_within_any_instruction_of_stopping_the_keeper_returns(tmp_path: Path) -> None:
    for probe, path in at_every_instruction(tmp_path, ("stop",), lambda probe: probe.close()):
        assert probe._log.ring is None
        assert of(ProbeHealth, path)[-1].state == CLOSED
        path.unlink()


@pytest.mark.thorough
def test_a_close_within_any_instruction_of_a_call_is_carried_out(tmp_path: Path) -> None:
    def call(probe: Probe) -> None:
        probe.emitted([0], [1])

    for probe, path in at_every_instruction(tmp_path, ("perform",), call):
        assert probe._log.ring is None
        assert not probe._life._queued
        assert of(ProbeHealth, path)[-1].state == CLOSED
        path.unlink()


def test_a_close_within_the_threads_own_report_is_carried_out(tmp_path: Path) -> None:
    clock = FakeClock(step_ns=1000)
    probe, ring = probe_within(tmp_path, clock)
    probe.emitted([0], [1])
    clock.now_ns += 10**9
    ring.within = probe.close
    probe._keeper.tend()
    assert probe._log.ring is None
    assert of(ProbeHealth, tmp_path / "a.ring")[-1].state == CLOSED


@pytest.mark.parametrize("raised", [KeyboardInterrupt, TimeoutError])
def test_a_real_signal_anywhere_in_a_call_leaves_a_whole_ring_and_a_free_probe(
    tmp_path: Path, raised: type[BaseException]
) -> None:
    probe = make_probe(tmp_path, FakeClock(step_ns=1000), capacity=8 << 20)
    chance, num_handled = random.Random(1), 0

    def handler(*_: object) -> None:
        nonlocal num_handled
        num_handled += 1
        do_step(probe, 10**6, [probe.queued("inner", prompt_tokens=1)])
        if num_handled % 2:
            raise raised

    def interrupted(step: int) -> bool:
        num_before = num_handled
        try:
            signal.setitimer(signal.ITIMER_REAL, chance.uniform(2e-6, 150e-6))
            do_step(probe, step, [probe.queued("outer", prompt_tokens=1)])
            while num_handled == num_before:
                pass
        except raised:
            return True
        return False

    with signals(handler):
        num_raised = sum(interrupted(step) for step in range(500))
    assert probe.on
    assert num_raised == num_handled / 2
    assert not probe._log.lock._is_owned()  # type: ignore[attr-defined]
    do_step(probe, 2 * 10**6, [1])
    path = probe.path
    assert path is not None
    assert [slices.step for slices in of_all(StepSlices, path)][-1] == 2 * 10**6
    reader = RingReader(path)
    assert not [found for found in everything(reader) if isinstance(found, Loss)]
    reader.close()
    # Another thread gets in as well.
    other = threading.Thread(target=probe.emitted, args=([1], [77]))
    other.start()
    other.join(10)
    assert of_all(Emitted, path)[-1].tokens == b"\x4d\0\0\0"
    probe.close()


class Interrupting:
    """An argument whose conversion is interrupted by a signal."""

    def __index__(self) -> int:
        signal.raise_signal(signal.SIGALRM)
        return 1

    def __str__(self) -> str:
        return str(self.__index__())


class Handler:
    def method(self, *_: object) -> None:
        raise TimeoutError

    __call__ = method


@pytest.mark.parametrize(
    "handler", [Handler().method, Handler(), partial(Handler().method, None)], ids=type
)
def test_an_exception_of_a_handler_during_a_conversion_is_the_hosts(
    tmp_path: Path, handler: Callable[..., object]
) -> None:
    probe, slow = make_probe(tmp_path, FakeClock()), cast(Any, Interrupting())
    calls: tuple[Callable[[], object], ...] = (
        lambda: probe.queued(slow, prompt_tokens=1),
        lambda: probe.queued("r", prompt_tokens=slow),
        lambda: probe.received("r", attributes={"a": slow}),
        lambda: probe.finished(slow, "stop"),
        lambda: probe.finished(RequestIndex(0), slow),
        lambda: probe.plan(slow, start_ns=0, end_ns=1, waiting=0, running=1),
        lambda: probe.start(slow),
        lambda: probe.stop(1, padded_tokens=slow),
        lambda: probe.emitted([slow], [1]),
        lambda: probe.sign(1, requests=[0], tokens=[slow]),
        lambda: probe.slices(slow, requests=[0], phases=[1], tokens=[1], contexts=[1]),
        lambda: probe.unsupported(slow),
    )
    with signals(handler):
        for call in calls:
            with pytest.raises(TimeoutError):
                call()
    assert probe.on
    assert not probe._log.odd.num
    assert not probe._life._messages
    probe.close()


def of_all(kind: type[Any], path: Path) -> list[Any]:
    """Return records of a kind, of a ring that may lack some."""
    reader = RingReader(path)
    frames = [frame for frame in everything(reader) if isinstance(frame, Frame)]
    reader.close()
    found = [decode(frame.code, frame.payload) for frame in frames]
    return [record for record in found if isinstance(record, kind)]


def test_finalisers_that_the_collector_runs_within_a_call_do_not_wait(tmp_path: Path) -> None:
    probe, ring = probe_within(tmp_path)

    class Task:
        def __init__(self) -> None:
            self.me = self
            self.index = probe.queued("task", prompt_tokens=1)

        def __del__(self) -> None:
            probe.finished(self.index, "client_cancel")

    for _ in range(50):
        Task()
    ring.within = gc.collect
    probe.emitted([0], [1])
    finished = [event for event in of(RequestEvent, tmp_path / "a.ring") if event.kind == 8]
    assert len(finished) == 50
    assert probe._log.requests.num_live == 0
    probe.close()
    check_ring(tmp_path / "a.ring")


def test_two_threads_with_crossed_locks_go_on(tmp_path: Path) -> None:
    probe, ring = probe_within(tmp_path)
    theirs, is_inside = threading.Lock(), threading.Event()

    def finaliser() -> None:
        is_inside.set()
        with theirs:
            pass

    def holder() -> None:
        with theirs:
            is_inside.wait(10)
            probe.emitted([1], [2])  # waits for the other thread, which waits for `theirs`

    ring.within = finaliser
    thread = threading.Thread(target=holder)
    with theirs:
        pass
    thread.start()
    while not theirs.locked():
        pass
    probe.emitted([0], [1])
    thread.join(10)
    assert not thread.is_alive()
    probe.emitted([0], [3])
    tokens = [emitted.tokens[0] for emitted in of(Emitted, tmp_path / "a.ring")]
    assert sorted(tokens) == [1, 2, 3]
    probe.close()
    check_ring(tmp_path / "a.ring")


def test_a_thread_that_never_leaves_the_probe_costs_others_little(tmp_path: Path) -> None:
    probe = make_probe(tmp_path, FakeClock())
    is_over, is_inside = threading.Event(), threading.Event()

    def stuck() -> None:
        with probe._log.lock:
            is_inside.set()
            is_over.wait(60)

    thread = threading.Thread(target=stuck)
    thread.start()
    is_inside.wait(10)
    waits = []
    probe._log.lock, real = Waiting(probe._log.lock, waits), probe._log.lock  # type: ignore[assignment]
    for step in range(100):
        do_step(probe, step, [1])
    assert waits == [0.1]
    probe._log.lock = real
    is_over.set()
    thread.join()
    do_step(probe, 100, [1])
    path = probe.path
    assert path is not None
    assert [slices.step for slices in of(StepSlices, path)] == list(range(101))
    probe.close()


class Waiting:
    """A lock that notes for how long it was waited for."""

    def __init__(self, lock: Any, waits: list[float]) -> None:
        self.lock, self.waits = lock, waits

    def acquire(self, is_blocking: bool, timeout_s: float = -1) -> bool:
        if is_blocking:
            self.waits.append(timeout_s)
        return bool(self.lock.acquire(is_blocking, timeout_s))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.lock, name)


def test_a_step_timed_across_a_call_within_is_timed_by_its_own_start(tmp_path: Path) -> None:
    probe, ring = probe_within(tmp_path)
    probe.start(1)
    ring.within = lambda: probe.start(2)  # lost: its timer would be started too late
    probe.emitted([0], [1])
    probe.stop(1)
    probe.close()
    assert [span.step for span in of(StepSpan, tmp_path / "a.ring")] == [1]


def test_a_stop_that_follows_a_lost_stop_and_start_ends_no_other_step(tmp_path: Path) -> None:
    clock = FakeClock()
    probe, ring = probe_within(tmp_path, clock)

    def do(step: int) -> None:
        probe.start(step)
        clock.now_ns += 10**7
        probe.stop(step)

    def within() -> None:
        probe.stop(1)
        probe.start(2)

    probe.start(1)
    clock.now_ns += 10**7
    ring.within = within
    probe.emitted([0], [1])
    clock.now_ns += 10**7
    probe.stop(2)
    assert probe._spans.timer.pending_ns == 0  # readers wait for no span that will not come
    do(3)
    probe.close()
    path = tmp_path / "a.ring"
    spans = of(StepSpan, path)
    assert [(span.step, span.ready_ns - span.launch_start_ns) for span in spans] == [(3, 10**7)]
    last = of(ProbeHealth, path)[-1]
    assert (last.dropped, last.lost_calls) == (1, 2)


def test_a_step_begun_before_the_last_one_was_stopped_has_no_span(tmp_path: Path) -> None:
    clock = FakeClock()
    probe = make_probe(tmp_path, clock)
    for call, step in ((probe.start, 1), (probe.start, 2), (probe.stop, 1), (probe.stop, 2)):
        clock.now_ns += 10**7
        call(step)
    probe.close()
    path = tmp_path / "a.ring"
    spans = of(StepSpan, path)
    assert [(span.step, span.ready_ns - span.launch_start_ns) for span in spans] == [(2, 2 * 10**7)]
    assert of(ProbeHealth, path)[-1].dropped == 1


PROGRAM = """
import os, signal, sys
from inferscope.probe import EngineInfo, Probe
probe = Probe.open(EngineInfo(0, "test"))

def stop(*_):
    probe.finished(index, "server_abort")
    probe.close()
    sys.exit(7)

signal.signal(signal.SIGTERM, stop)
index = probe.queued("r", prompt_tokens=1)
print(probe.path, flush=True)
while True:  # inside the probe, for all of its time but little
    probe.emitted([index], [1])
"""


def test_a_server_stopped_within_the_probe_ends_and_its_ring_is_closed(tmp_path: Path) -> None:
    environment = {**os.environ, "INFERSCOPE_DIR": str(tmp_path), "INFERSCOPE_RING_MB": "1"}
    words = [sys.executable, "-c", PROGRAM]
    with child(words, env=environment, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        path = Path(server.stdout.readline().strip())
        server.terminate()
        assert server.wait(60) == 7
    assert of_all(ProbeHealth, path)[-1].state == CLOSED
    assert of_all(RequestEvent, path)[-1].kind == 8


class Blocking(logging.Handler):
    """A handler of the host's log whose pipe is full."""

    def __init__(self) -> None:
        super().__init__()
        self.is_over = threading.Event()
        self.threads: list[threading.Thread] = []

    def handle(self, record: logging.LogRecord) -> bool:  # holding no lock of the handler
        thread = threading.current_thread()
        self.threads.append(thread)
        return thread is threading.main_thread() or self.is_over.wait(60)


@pytest.fixture
def blocking() -> Iterator[Blocking]:
    handler, logger = Blocking(), logging.getLogger("inferscope")
    logger.addHandler(handler)
    yield handler
    handler.is_over.set()
    logger.removeHandler(handler)


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Probe]:
    monkeypatch.setenv("INFERSCOPE_DIR", str(tmp_path))
    monkeypatch.setenv("INFERSCOPE_RING_MB", "0.1")
    probe = Probe.open(EngineInfo(0, "test"))
    assert probe.on
    yield probe
    probe.close()


def test_the_heart_beats_while_the_hosts_log_blocks(opened: Probe, blocking: Blocking) -> None:
    assert opened.path is not None
    reader = RingReader(opened.path)
    opened.emitted(None, None)  # type: ignore[arg-type]  # there is a line to write
    until(lambda: len(blocking.threads) == 1)
    heartbeats = {reader.heartbeat_ns()}
    until(lambda: heartbeats.add(reader.heartbeat_ns()) or len(heartbeats) > 3, 5)
    reader.close()


@pytest.fixture
def full_pipe() -> Iterator[tuple[int, logging.Handler]]:
    """The reading end of a full pipe that the host's log is written to, and the log's handler."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    for num_bytes in (4096, 1):
        with suppress(BlockingIOError):
            while True:
                os.write(writing, b"x" * num_bytes)
    os.set_blocking(writing, True)
    logger = logging.getLogger("inferscope")
    with os.fdopen(writing, "w") as stream:
        handler = logging.StreamHandler(stream)
        logger.addHandler(handler)
        yield reading, handler
        os.set_blocking(reading, False)
        with suppress(BlockingIOError):
            while os.read(reading, 1 << 20):
                pass
        logger.removeHandler(handler)
    os.close(reading)


def test_a_line_waits_outside_the_hosts_log_while_its_pipe_is_full(
    opened: Probe, full_pipe: tuple[int, logging.Handler]
) -> None:
    reading, handler = full_pipe
    assert opened.path is not None
    ring = RingReader(opened.path)
    opened.emitted(None, None)  # type: ignore[arg-type]  # there is a line to write
    heartbeats = {ring.heartbeat_ns()}
    until(lambda: heartbeats.add(ring.heartbeat_ns()) or len(heartbeats) > 3, 5)
    ring.close()
    # `logging.shutdown` takes it at exit.
    assert handler.lock is not None
    assert handler.lock.acquire(timeout=0)
    handler.release()
    assert opened._life.has_messages
    found = b""
    while b"emitted() was left out" not in found:
        found = found[-4096:] + os.read(reading, 1 << 16)


def test_pending_lines_are_bounded(opened: Probe, full_pipe: tuple[int, logging.Handler]) -> None:
    for number in range(1000):
        opened.warn(f"line {number}")
    assert len(opened._life._messages) == 16
    assert opened._life._messages[-1] == "line 999"


def test_a_failure_within_the_hosts_log_does_not_wait_for_it(
    opened: Probe, blocking: Blocking
) -> None:
    opened.fail(ValueError("lost count"))
    assert not opened.on
    until(lambda: len(blocking.threads) == 1)
    assert threading.main_thread() not in blocking.threads


def test_a_timer_of_ones_own_is_still_called_under_the_lock(tmp_path: Path) -> None:
    owned: list[bool] = []

    class Timer(HostTimer):
        def start(self, step: int, now_ns: int, mode: str, cold: bool, dummy: bool) -> None:
            owned.append(probe._log.lock._is_owned())  # type: ignore[attr-defined]
            super().start(step, now_ns, mode, cold, dummy)

    probe = make_probe(tmp_path, FakeClock(), timer=Timer())
    probe.start(1)
    assert owned == [True]
    probe.close()
