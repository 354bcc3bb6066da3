"""Steps that are noted without the lock, over a stand-in for torch that refuses what CUDA does."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferscope.probe import EventTimer, HostTimer, Marks, Probe, TorchEvents
from inferscope.records import ProbeHealth, StepSpan
from inferscope.ring import layout
from tests.probe.cuda import StrictCuda
from tests.probe.fakes import FakeClock, make_probe, of

MS = 1_000_000


class Bench:
    """A probe with a device, whose steps are noted without the lock."""

    def __init__(self, folder: Path, *, pool_steps: int = 64, has_switch: bool = False) -> None:
        self.clock = FakeClock()
        self.cuda = StrictCuda(self.clock)
        self.within: Callable[[], object] | None = None
        """Called within the next recording of an event."""
        events = TorchEvents(0, cuda=self.cuda, exchange=self.cuda.exchange)
        record = events.record

        def recorded(event: Any) -> None:
            within, self.within = self.within, None
            if within is not None:
                within()
            record(event)

        events.record = recorded  # type: ignore[method-assign]
        self.timer = EventTimer(events, pool_steps=pool_steps, now=self.clock.monotonic_ns)
        self.probe = make_probe(folder, self.clock, timer=self.timer, has_switch=has_switch)
        marks = self.probe.marks()
        assert marks is not None
        self.marks: Marks = marks
        self.next_step = 0

    def begin(self) -> int:
        step, self.next_step = self.next_step, self.next_step + 1
        self.marks.begin(step)
        self.clock.now_ns += MS
        return step

    def end(self, step: int) -> None:
        self.clock.now_ns += MS
        self.marks.end(step, padded_tokens=8)
        self.clock.now_ns += MS

    def step(self) -> int:
        """Execute a step, and sign the one before behind its launch, as vLLM's worker does."""
        step = self.begin()
        self.marks.device_start()
        self.sign(step - 1)
        self.end(step)
        return step

    def sign(self, step: int) -> None:
        self.probe.sign(step, tokens=[1], digest=5, mode="graph")

    def steady(self) -> int:
        """Execute steps until they are noted without the lock; return the last one."""
        for _ in range(4):
            step = self.step()
        assert list(self.timer.marked), "not by the probe"
        return step

    def tend(self, after_ns: int = 100 * MS) -> None:
        """Run one round of the thread beside the engine."""
        self.clock.now_ns += after_ns
        beside = threading.Thread(target=self.probe._keeper.tend)
        beside.start()
        beside.join()

    @property
    def path(self) -> Path:
        assert self.probe.path is not None
        return self.probe.path

    def spans(self) -> list[StepSpan]:
        return of(StepSpan, self.path)

    def steps(self) -> list[int]:
        return [span.step for span in self.spans()]

    def pending_ns(self) -> int:
        """Return what readers find."""
        with self.path.open("rb") as ring:
            ring.seek(layout.PENDING)
            return int(layout.WORD.unpack(ring.read(layout.WORD.size))[0])


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    assert made.probe.on, "no call has failed"
    assert made.cuda.misuses == []
    made.probe.close()


@contextmanager
def busy(probe: Probe) -> Iterator[None]:
    """Hold the probe's lock on another thread."""
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with probe._log.lock:
            held.set()
            done.wait(10)

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait(10)
    try:
        yield
    finally:
        done.set()
        holder.join()


def test_where_the_host_computes_steps_are_not_noted(tmp_path: Path) -> None:
    probe = make_probe(tmp_path, FakeClock(), timer=HostTimer())
    assert probe.marks() is None
    probe.close()


def test_a_step_is_noted_without_the_lock_and_booked_behind_the_next_launch(bench: Bench) -> None:
    last = bench.steady()
    before = bench.steps()
    with busy(bench.probe):
        step = bench.begin()
        bench.marks.device_start()
        bench.end(step)
    assert bench.probe._log.num_lost_calls == 0
    assert bench.steps() == before
    begun = bench.begin()
    bench.sign(step)
    assert bench.steps() == [*range(last + 1), step]
    bench.end(begun)
    span = bench.spans()[-1]
    assert (span.step, span.mode, span.padded_tokens, span.digest) == (step, "graph", 8, 5)
    assert span.launch_end_ns - span.launch_start_ns == 2 * MS
    assert span.device_start_ns is not None
    assert span.device_end_ns is not None
    assert span.device_end_ns - span.device_start_ns == MS
    assert bench.timer.dropped == 0


def test_readers_see_that_a_step_is_under_way_before_its_launch(bench: Bench) -> None:
    bench.steady()
    bench.tend()
    assert bench.timer.pending_ns == 0
    begun_ns = bench.clock.now_ns
    step = bench.begin()
    assert bench.timer.is_marking
    assert bench.pending_ns() == begun_ns
    bench.tend()  # the launch hangs
    assert bench.pending_ns() == begun_ns
    assert of(ProbeHealth, bench.path)[-1].complete_through_ns <= begun_ns
    bench.end(step)
    bench.tend()
    bench.probe._log.ring.beat(bench.clock.now_ns)  # type: ignore[union-attr]
    assert bench.pending_ns() == 0


def test_the_thread_beside_that_finds_no_step_hides_none_that_begins_meanwhile(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.steady()
    ring = bench.probe._log.ring
    assert ring is not None
    publish = ring.set_pending

    def late(start_ns: int) -> None:
        monkeypatch.undo()
        assert start_ns == 0
        bench.begin()
        publish(start_ns)

    monkeypatch.setattr(ring, "set_pending", late)
    bench.tend()
    assert bench.timer.is_marking
    assert bench.pending_ns() == bench.timer.pending_ns != 0
    bench.end(bench.next_step - 1)


def test_the_device_is_not_asked_from_beside_while_a_step_is_open(bench: Bench) -> None:
    bench.steady()
    bench.cuda.lag_ns = 50 * MS
    bench.step()
    step = bench.begin()
    with bench.cuda.capture():
        asked = bench.cuda.num_asked
        for _ in range(3):
            bench.tend()
        assert bench.cuda.num_asked == asked
    bench.end(step)
    bench.tend()
    assert bench.steps() == list(range(step + 1))


def test_a_step_without_an_end_has_no_span(bench: Bench) -> None:
    bench.steady()
    lost = bench.begin()
    bench.step()
    bench.tend()
    assert bench.steps() == [step for step in range(bench.next_step) if step != lost]
    assert bench.timer.dropped == 1


def test_an_end_without_a_beginning_ends_no_other_step(bench: Bench) -> None:
    last = bench.steady()
    open_step = bench.begin()
    bench.marks.end(last)  # again: a later one has begun
    assert bench.timer.is_marking
    bench.marks.end(open_step + 1)
    bench.next_step += 1
    bench.step()
    bench.tend()
    gone = (open_step, open_step + 1)
    assert bench.steps() == [step for step in range(bench.next_step) if step not in gone]
    assert bench.timer.dropped == 1


@pytest.mark.parametrize("call", ["begin", "device_start", "end"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, TimeoutError])
def test_an_exception_of_a_signal_handler_passes_through(
    bench: Bench, call: str, error: type[BaseException]
) -> None:
    bench.steady()

    def handle(number: int, frame: object) -> None:
        raise error

    def interrupt() -> None:
        signal.raise_signal(signal.SIGUSR1)

    former = signal.signal(signal.SIGUSR1, handle)
    try:
        step = bench.next_step
        if call != "begin":
            bench.begin()
        else:
            bench.next_step += 1
        bench.within = interrupt
        with pytest.raises(error):
            getattr(bench.marks, call)(*((step,) if call in ("begin", "end") else ()))
    finally:
        signal.signal(signal.SIGUSR1, former)
    bench.clock.now_ns += 200 * MS  # after what is taken for a failure the device is left alone
    for _ in range(4):
        bench.step()
    bench.tend()
    steps = bench.steps()
    assert steps == sorted(set(steps))
    assert steps[-4:] == list(range(step + 1, bench.next_step))


def test_a_step_within_a_step_leaves_each_its_own_events(bench: Bench) -> None:
    bench.steady()

    def another() -> None:
        bench.marks.begin(1000)
        bench.marks.end(1000)

    for _ in range(2):
        bench.within = another
        bench.step()
        bench.step()
    bench.tend()
    steps = bench.steps()
    assert [step for step in steps if step < 1000] == list(range(bench.next_step))
    timer = bench.timer
    events = [*timer._free, *(event for one in timer.spare for event in (one.start, one.end))]
    assert len(set(map(id, events))) == len(events)


def test_a_signal_handler_that_closes_the_probe_within_a_step_ends_it(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    last = bench.steady()
    for call in (lambda: bench.marks.begin(last + 1), lambda: bench.marks.end(last + 1)):
        bench.within = bench.probe.close
        call()
    bench.step()
    assert bench.steps() == list(range(last + 1))
    assert not bench.probe.on


def test_a_device_that_is_lost_within_the_end_of_a_step_costs_the_host_nothing(
    bench: Bench,
) -> None:
    bench.steady()
    num_dropped, step = bench.timer.dropped, bench.begin()
    bench.marks.device_start()

    def lose(frame: object, event: str, called: Any) -> None:
        if event == "c_return" and called.__name__ == "append" and called.__self__ is marked:
            sys.setprofile(None)
            bench.timer.lose_marking(0)  # as the probe's thread does

    marked = bench.timer.marked
    sys.setprofile(lose)
    try:
        bench.end(step)
    finally:
        sys.setprofile(None)
    assert not bench.timer.marking
    assert bench.timer.dropped > num_dropped


def test_a_lost_device_costs_the_steps_in_flight_and_timing_starts_again(bench: Bench) -> None:
    bench.steady()
    bench.step()
    before = bench.steps()
    bench.cuda.lose_context(0)
    lost = bench.step()
    bench.clock.now_ns += 200 * MS
    for _ in range(4):
        bench.step()
    bench.tend()
    assert bench.steps() == [*before, *range(lost + 1, bench.next_step)]
    assert bench.timer.dropped == lost + 1 - len(before)


def test_a_step_that_is_switched_off_between_its_calls_and_on_again(tmp_path: Path) -> None:
    bench = Bench(tmp_path, has_switch=True)
    bench.steady()
    step = bench.begin()
    bench.probe._life.want(is_on=False)
    bench.end(step)
    off = [bench.step() for _ in range(2)]
    bench.probe._life.want(is_on=True)
    bench.probe.plan(bench.next_step, start_ns=0, end_ns=1, waiting=0, running=0)
    for _ in range(5):
        bench.step()
    bench.tend()
    assert bench.steps() == [one for one in range(bench.next_step) if one not in off]
    assert bench.probe.on
    bench.probe.close()


def test_dummy_steps_and_steps_in_a_capture_keep_the_order(bench: Bench) -> None:
    bench.steady()
    bench.step()
    bench.probe.start(-1, dummy=True)
    bench.probe.stop(-1)
    with bench.cuda.capture():
        captured = bench.begin()
        bench.end(captured)
    bench.step()
    bench.tend()
    steps = [step for step in range(bench.next_step) if step != captured]
    assert bench.steps() == [*steps[:-1], -1, steps[-1]]
    assert bench.timer.dropped == 1


def test_without_a_look_at_the_device_no_more_than_the_pool_is_held(tmp_path: Path) -> None:
    bench = Bench(tmp_path, pool_steps=8)
    bench.steady()
    for _ in range(50):
        bench.end(bench.begin())
    assert len(bench.timer._flights) + len(bench.timer.marked) <= 9
    bench.tend()
    steps = bench.steps()
    assert steps == sorted(set(steps))
    assert len(steps) + bench.timer.dropped == bench.next_step
    bench.probe.close()


def test_a_forked_child_writes_nothing_into_its_parents_ring(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.steady()
    bench.tend()
    before = bench.path.read_bytes()
    child = os.fork()
    if not child:
        for _ in range(3):
            bench.step()
        os._exit(int(bench.probe.on))
    assert os.waitpid(child, 0)[1] == 0
    assert bench.path.read_bytes() == before
    bench.probe.close()


CALLS = st.lists(
    st.sampled_from(
        [
            *("step", "step", "step", "begin", "end", "end again", "sign", "tend", "idle"),
            *("lag", "no lag", "device", "by the probe", "dummy", "within"),
        ]
    ),
    max_size=40,
)


@settings(max_examples=60, deadline=None)
@given(calls=CALLS)
def test_each_step_has_one_span_or_is_counted(calls: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder))
        open_step: int | None = None
        num_begun = num_lost = 0
        for call in calls:
            if call == "step":
                num_lost += open_step is not None
                open_step, num_begun = None, num_begun + 1
                bench.step()
            elif call == "begin":
                num_lost += open_step is not None
                open_step, num_begun = bench.begin(), num_begun + 1
            elif call == "end" and open_step is not None:
                bench.end(open_step)
                open_step = None
            elif call == "end again":
                bench.marks.end(-1)
            elif call == "sign":
                bench.sign(bench.next_step - 1)
            elif call == "tend":
                bench.tend(10 * MS)
            elif call == "idle":
                bench.tend()
            elif call in ("lag", "no lag"):
                bench.cuda.lag_ns = 20 * MS if call == "lag" else 0
            elif call == "device":
                bench.marks.device_start()
            elif call in ("by the probe", "dummy"):
                num_lost += open_step is not None
                open_step, num_begun = None, num_begun + 1
                bench.probe.start(bench.next_step, dummy=call == "dummy")
                bench.probe.stop(bench.next_step)
                bench.next_step += 1
            elif call == "within":
                bench.within = bench.probe._keeper.tend
            started = bench.timer.pending_ns
            assert bench.probe._spans.pending_ns == started
        if open_step is not None:
            bench.end(open_step)
        bench.clock.now_ns += 100 * MS
        bench.tend()
        steps = bench.steps()
        assert steps == sorted(set(steps))
        assert len(steps) == num_begun - num_lost
        assert bench.timer.dropped == num_lost
        assert bench.timer.pending_ns == 0
        assert bench.probe.on
        assert bench.cuda.misuses == []
        bench.probe.close()


def test_a_step_that_begins_with_the_forward_records_no_event_at_its_launch(bench: Bench) -> None:
    bench.steady()
    assert bench.marks.has_moved
    num_begun = bench.next_step
    with pytest.MonkeyPatch.context() as patch:
        for call in ("record", "is_capturing"):
            patch.setattr(bench.marks, f"_{call}", None)
        bench.marks.begin(num_begun, "eager", False, False, False)
    bench.next_step += 1
    bench.clock.now_ns += MS
    bench.marks.device_start()
    bench.clock.now_ns += 2 * MS
    bench.end(num_begun)
    bench.tend()
    span = bench.spans()[-1]
    assert span.step == num_begun
    assert span.device_start_ns is not None
    assert span.device_end_ns is not None
    assert span.device_end_ns - span.device_start_ns == 3 * MS
    assert span.launch_end_ns - span.launch_start_ns == 4 * MS


def test_one_that_ends_without_its_forward_has_no_span_and_the_next_one_begins_at_once(
    bench: Bench,
) -> None:
    bench.steady()
    lost = bench.next_step
    bench.marks.begin(lost, "eager", False, False, False)
    bench.next_step += 1
    bench.end(lost)
    assert not bench.marks.has_moved
    step = bench.begin()
    bench.end(step)
    bench.tend()
    assert bench.steps() == [one for one in range(bench.next_step) if one != lost]
    assert bench.timer.dropped == 1


@pytest.mark.parametrize("starts", [True, False])
def test_a_forward_in_two_parts_begins_with_the_first(bench: Bench, starts: bool) -> None:
    step = bench.steady() + 1
    bench.marks.begin(step, "eager", False, False, starts)
    bench.next_step += 1
    bench.clock.now_ns += MS
    for _ in range(2):
        bench.marks.device_start()
        bench.clock.now_ns += 2 * MS
    bench.end(step)
    bench.tend()
    span = bench.spans()[-1]
    assert span.step == step
    assert span.device_start_ns is not None
    assert span.device_end_ns is not None
    assert span.device_end_ns - span.device_start_ns == 5 * MS


def test_a_step_without_a_forward_makes_the_next_one_begin_at_its_launch(bench: Bench) -> None:
    bench.steady()
    step = bench.begin()
    bench.end(step)
    assert not bench.marks.has_moved
    bench.tend()
    assert bench.steps() == list(range(bench.next_step))


@pytest.mark.parametrize("call", ["begin", "device_start", "end"])
def test_what_an_event_takes_is_counted_as_the_probes_cost(tmp_path: Path, call: str) -> None:
    bench = Bench(tmp_path)
    bench.steady()
    step = bench.next_step
    calls: dict[str, Callable[[], object]] = {
        "begin": lambda: bench.marks.begin(step),
        "device_start": bench.marks.device_start,
        "end": lambda: bench.marks.end(step),
    }
    cost_ns = bench.probe._log.cost_ns

    def take_long() -> None:
        bench.clock.now_ns += 3 * MS

    for name, run in calls.items():
        if name == call:
            bench.within = take_long
        run()
    bench.marks.book()
    assert bench.within is None
    assert bench.probe._log.cost_ns - cost_ns >= 3 * MS
    bench.probe.close()
