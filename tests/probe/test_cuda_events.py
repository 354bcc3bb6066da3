"""Timing by CUDA events, over a stand-in for torch that refuses what CUDA refuses.

What only a GPU can say is at the end, marked `gpu`.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inferscope.probe import EngineInfo, EventTimer, Probe, TorchEvents
from inferscope.probe.cuda_events import exchange_by
from inferscope.probe.timers import ANCHOR_AGAIN_NS
from inferscope.records import ProbeHealth, StepSpan
from tests.probe.cuda import GLOBAL, THREAD_LOCAL, StrictCuda
from tests.probe.fakes import FakeClock, make_probe, of

MS = 1_000_000
CONSTRUCTOR_ERRORS = [
    RuntimeError("CUDA error: out of memory"),
    AssertionError("Torch not compiled with CUDA enabled"),
    AttributeError("no Event"),
    MemoryError(),
]


class Bench:
    """A probe whose timer runs on the stand-in, and the thread beside it."""

    def __init__(self, folder: Path, *, device: int | None = 0, exchanges: bool = True) -> None:
        self.clock = FakeClock()
        self.cuda = StrictCuda(self.clock)
        exchange = self.cuda.exchange if exchanges else lambda _: None
        events = TorchEvents(device, cuda=self.cuda, exchange=exchange)
        self.timer = EventTimer(events, now=self.clock.monotonic_ns)
        self.probe = make_probe(folder, self.clock, timer=self.timer)

    def step(self, step: int, within: Callable[[], object] = lambda: None) -> None:
        self.probe.start(step)
        self.clock.now_ns += 5 * MS
        within()
        self.probe.stop(step)

    def tend(self) -> None:
        """Run one round of the thread beside the engine, 100 ms later."""
        self.clock.now_ns += 100 * MS
        beside = threading.Thread(target=self.probe._keeper.tend)
        beside.start()
        beside.join()

    def steps(self) -> list[int]:
        assert self.probe.path is not None
        return [span.step for span in of(StepSpan, self.probe.path)]


def test_an_idle_engine_s_last_step_is_reaped_from_beside(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.step(0)
    bench.tend()
    assert bench.steps() == [0]
    assert bench.probe.on


def test_the_thread_beside_asks_nothing_while_a_step_is_open(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.cuda.lag_ns = 50 * MS
    bench.step(0)
    bench.probe.start(1)
    assert bench.timer.pending_ns
    with bench.cuda.capture():
        asked = bench.cuda.num_asked
        for _ in range(20):
            bench.tend()
        assert bench.cuda.num_asked == asked
    bench.probe.stop(1)
    bench.tend()
    assert bench.steps() == [0, 1]


def test_a_capture_outside_of_a_step_survives_the_thread_beside(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.step(0)
    with bench.cuda.capture():
        bench.tend()
    assert bench.steps() == [0]
    assert bench.cuda._on.mode == GLOBAL


def test_without_the_driver_s_function_spans_wait_for_the_next_step(tmp_path: Path) -> None:
    bench = Bench(tmp_path, exchanges=False)
    bench.step(0)
    with bench.cuda.capture():
        bench.tend()
    assert bench.steps() == []
    bench.step(1)
    assert bench.steps() == [0]
    assert bench.timer.dropped == 0


def test_a_step_within_a_capture_is_counted_and_records_nothing_in_the_graph(
    tmp_path: Path,
) -> None:
    bench = Bench(tmp_path)
    bench.step(0)
    with bench.cuda.capture():
        bench.step(1)
    bench.step(2)
    bench.tend()
    assert bench.steps() == [0, 2]
    assert bench.timer.dropped == 1
    assert bench.cuda.misuses == []


def test_before_the_first_step_nothing_reaches_the_device(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    with bench.cuda.capture():
        bench.tend()
    bench.probe.close()
    assert (bench.cuda.num_asked, bench.cuda.num_made, bench.cuda.contexts) == (0, 0, {})


def test_a_model_s_steps_are_timed_on_its_device_whichever_is_current(tmp_path: Path) -> None:
    bench = Bench(tmp_path, device=1)
    bench.step(0)
    bench.cuda.set_device(1)
    bench.step(1, within=lambda: bench.cuda.set_device(0))
    bench.tend()
    assert bench.steps() == [0, 1]
    assert set(bench.cuda.recorded) == {1}
    assert set(bench.cuda.contexts) == {1}


def test_the_thread_beside_makes_no_context_on_another_device(tmp_path: Path) -> None:
    bench = Bench(tmp_path, device=1)
    bench.cuda.set_device(1)
    bench.step(0)
    bench.tend()
    assert bench.steps() == [0]
    assert set(bench.cuda.contexts) == {1}


@pytest.mark.parametrize("when", ["idle", "in flight", "open"])
def test_a_lost_context_costs_what_was_in_flight_and_timing_starts_again(
    tmp_path: Path, when: str
) -> None:
    bench = Bench(tmp_path)
    bench.step(0)
    if when == "idle":
        bench.tend()
        bench.cuda.lose_context(0)
    elif when == "in flight":
        bench.cuda.lose_context(0)
    else:
        bench.step(1, within=lambda: bench.cuda.lose_context(0))
    for step in range(2, 12):
        bench.clock.now_ns += ANCHOR_AGAIN_NS // 4
        bench.step(step)
    bench.tend()
    steps = bench.steps()
    assert steps[-1] == 11
    num_begun = 11 + (when == "open")
    assert len(steps) + bench.timer.dropped == num_begun
    assert bench.timer.dropped <= 6
    bench.probe.close()
    assert bench.probe.path is not None
    last = of(ProbeHealth, bench.probe.path)[-1]
    assert (last.dropped, last.errors) == (bench.timer.dropped, 0)


@pytest.mark.parametrize("error", CONSTRUCTOR_ERRORS, ids=lambda error: type(error).__name__)
def test_events_that_cannot_be_made_leave_the_probe_on(tmp_path: Path, error: Exception) -> None:
    bench = Bench(tmp_path)
    bench.cuda.constructor_error = error
    for step in range(5):
        bench.step(step)
    assert bench.probe.on
    assert bench.timer.dropped == 5
    bench.cuda.constructor_error = None
    bench.clock.now_ns += ANCHOR_AGAIN_NS
    bench.step(5)
    bench.tend()
    assert bench.steps() == [5]


def test_a_device_that_stays_broken_is_asked_ten_times_a_second_at_most(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.cuda.constructor_error = RuntimeError("CUDA error: unspecified launch failure")
    num_tries = 0

    def fails(*, enable_timing: bool) -> None:
        nonlocal num_tries
        num_tries += 1
        raise RuntimeError

    bench.cuda.Event = fails  # type: ignore[method-assign, assignment]
    for step in range(200):  # 5 ms each
        bench.step(step)
    assert bench.timer.dropped == 200
    assert num_tries <= 11


def test_events_follow_the_current_stream_without_asking_for_it_each_time() -> None:
    cuda = StrictCuda(FakeClock())
    asked: list[object] = []
    current = ["stream 0"]

    def current_stream(device: int) -> object:
        asked.append(current[0])
        return current[0]

    key = SimpleNamespace(_C=SimpleNamespace(_cuda_getCurrentStream=lambda _: (current[0], 0, 1)))
    cuda.torch = key  # type: ignore[attr-defined]
    cuda.current_stream = current_stream  # type: ignore[method-assign, assignment]
    events, recorded = TorchEvents(0, cuda=cuda), []  # type: ignore[var-annotated]
    event = SimpleNamespace(record=recorded.append)
    for name in ("stream 0", "stream 0", "stream 1", "stream 0", "stream 0"):
        current[0] = name
        events.record(event)
    assert recorded == ["stream 0", "stream 0", "stream 1", "stream 0", "stream 0"]
    assert asked == ["stream 0", "stream 1", "stream 0"]
    events.reset()
    events.record(event)
    assert len(asked) == 4


ACTS = st.lists(
    st.one_of(
        st.tuples(st.just("step"), st.sampled_from([0, 3, 60])),
        st.tuples(st.sampled_from(["tend", "capture", "within", "lose", "mend"]), st.just(0)),
        st.tuples(st.just("device"), st.integers(0, 2)),
        st.tuples(st.just("fail"), st.sampled_from(range(len(CONSTRUCTOR_ERRORS)))),
        st.tuples(st.just("wait"), st.sampled_from([1, 50, 300, 3000])),
    ),
    max_size=30,
)


@settings(max_examples=60)
@given(acts=ACTS, exchanges=st.booleans())
def test_whatever_happens_to_the_device_no_capture_breaks_and_every_step_is_accounted_for(
    acts: list[tuple[str, int]], exchanges: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), device=1, exchanges=exchanges)
        num_steps = 0

        def step() -> None:
            nonlocal num_steps
            bench.step(num_steps)
            num_steps += 1

        for name, value in acts:
            if name == "step":
                bench.cuda.lag_ns = value * MS
                step()
            elif name == "tend":
                bench.tend()
            elif name == "capture":
                with bench.cuda.capture():
                    bench.tend()
                    step()
                    bench.tend()
            elif name == "within":
                with_capture = bench.cuda.capture()
                bench.probe.start(num_steps)
                with with_capture:
                    bench.tend()
                bench.probe.stop(num_steps)
                num_steps += 1
            elif name == "lose" and 1 in bench.cuda.contexts:
                bench.cuda.lose_context(1)
            elif name == "device":
                bench.cuda.set_device(value)
            elif name == "fail":
                bench.cuda.constructor_error = CONSTRUCTOR_ERRORS[value]
            elif name == "mend":
                bench.cuda.constructor_error = None
            elif name == "wait":
                bench.clock.now_ns += value * MS
        assert bench.probe.on
        steps = bench.steps()
        assert steps == sorted(set(steps))
        assert len(steps) + bench.timer.dropped + len(bench.timer._flights) == num_steps
        assert set(bench.cuda.recorded) <= {1}
        assert set(bench.cuda.contexts) <= {1}
        assert bench.cuda.misuses == []
        # Timing recovers from all of it.
        bench.cuda.constructor_error, bench.cuda.lag_ns = None, 0
        for _ in range(2):
            bench.clock.now_ns += ANCHOR_AGAIN_NS
            step()
        bench.clock.now_ns += ANCHOR_AGAIN_NS
        step()
        bench.probe.start(num_steps)
        assert bench.steps()[-1] == num_steps - 1
        bench.probe.close()


STUB = """
#include <stddef.h>
static _Thread_local int held = 0;
int cuThreadExchangeStreamCaptureMode(int *mode) {
    if (mode == NULL || *mode < 0 || *mode > 2) return 1;
    int former = held; held = *mode; *mode = former;
    return 0;
}
"""


def test_the_driver_s_function_is_called_as_its_header_declares_it(tmp_path: Path) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    (tmp_path / "stub.c").write_text(STUB)
    words = [compiler, "-shared", "-fPIC", "-o", "stub.so", "stub.c"]
    subprocess.run(words, cwd=tmp_path, check=True)
    library = ctypes.CDLL(str(tmp_path / "stub.so"))
    exchange = exchange_by(library.cuThreadExchangeStreamCaptureMode)
    assert exchange(THREAD_LOCAL) == GLOBAL
    assert exchange(7) is None
    assert exchange(GLOBAL) == THREAD_LOCAL


def _gpu_probe(folder: Path, monkeypatch: pytest.MonkeyPatch, device: int) -> Probe:
    monkeypatch.setenv("INFERSCOPE_DIR", str(folder))
    monkeypatch.setenv("INFERSCOPE_RING_MB", "1")
    return Probe.open(EngineInfo(0, "test"), timer=EventTimer(TorchEvents(device)))


def _wait_for_span(probe: Probe, step: int) -> StepSpan:
    assert probe.path is not None
    until = time.monotonic() + 10
    while time.monotonic() < until:
        found = [span for span in of(StepSpan, probe.path) if span.step == step]
        if found:
            return found[0]
        time.sleep(0.02)
    raise AssertionError(f"no span of step {step}")


@pytest.mark.gpu
def test_a_real_capture_survives_the_thread_beside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    probe = _gpu_probe(tmp_path, monkeypatch, 0)
    x = torch.ones(1024, 1024, device="cuda:0")
    (x @ x).sum().item()
    graph = torch.cuda.CUDAGraph()
    probe.start(0)
    y = x @ x
    probe.stop(0)
    with torch.cuda.graph(graph):
        y = x @ x
        _wait_for_span(probe, 0)  # the thread beside has asked by now
    graph.replay()
    torch.cuda.synchronize()
    assert float(y[0, 0]) == 1024.0
    probe.close()


@pytest.mark.gpu
def test_a_model_on_the_second_gpu_is_timed_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not torch.cuda.is_available() or torch.cuda.device_count() < 2:
        pytest.skip("no second GPU")
    probe = _gpu_probe(tmp_path, monkeypatch, 1)
    x = torch.ones(8192, 8192, device="cuda:1")
    (x @ x).sum().item()
    torch.cuda.synchronize(1)
    before_ns = time.monotonic_ns()
    probe.start(0)
    for _ in range(20):
        y = x @ x
    probe.stop(0)
    torch.cuda.synchronize(1)
    took_ns = time.monotonic_ns() - before_ns
    del y
    span = _wait_for_span(probe, 0)
    assert span.device_start_ns is not None
    assert span.device_end_ns is not None
    assert 0.5 * took_ns < span.device_end_ns - span.device_start_ns <= 1.1 * took_ns
    probe.close()
