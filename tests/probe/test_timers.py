from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager

from inferscope.probe.timers import ANCHOR_AGAIN_NS, ANCHOR_NS, EventTimer, HostTimer
from tests.probe.fakes import FakeClock

US, MS = 1000, 1_000_000


class Event:
    def __init__(self) -> None:
        self.at_ns: float | None = None
        self.done_ns = 0


class FakeDevice:
    """A device with a clock that drifts, a queue that lags behind, and events that fail."""

    def __init__(self, clock: FakeClock, *, lag_ns: int = 0, drift: float = 0.0) -> None:
        self.clock, self.lag_ns, self.drift = clock, lag_ns, drift
        self.aside_lag_ns = 2 * US
        self.num_made = 0
        self.num_resets = 0
        self.fails: set[str] = set()
        self.failing: set[Event] = set()

    def new(self) -> Event:
        self.num_made += 1
        return Event()

    def record(self, event: Event) -> None:
        self._record(event, self.lag_ns)

    def record_aside(self, event: Event) -> None:
        self._record(event, self.aside_lag_ns)

    def is_done(self, event: Event) -> bool:
        if "is_done" in self.fails or event in self.failing:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        self.clock.now_ns += 500
        return self.clock.now_ns >= event.done_ns

    def elapsed_ms(self, start: Event, end: Event) -> float:
        assert start.at_ns is not None
        assert end.at_ns is not None
        exact_ms = (end.at_ns - start.at_ns) * (1 + self.drift) / 1e6
        return float(struct.unpack("f", struct.pack("f", exact_ms))[0])

    def is_capturing(self) -> bool:
        return False

    @contextmanager
    def aside(self) -> Iterator[bool]:
        yield True

    def reset(self) -> None:
        self.num_resets += 1

    def _record(self, event: Event, lag_ns: int) -> None:
        if "record" in self.fails:
            raise RuntimeError("CUDA error")
        event.done_ns = self.clock.now_ns + lag_ns
        event.at_ns = event.done_ns


def made(
    *, lag_ns: int = 0, drift: float = 0.0, pool_steps: int = 64
) -> tuple[FakeClock, FakeDevice, EventTimer]:
    clock = FakeClock()
    device = FakeDevice(clock, lag_ns=lag_ns, drift=drift)
    return clock, device, EventTimer(device, pool_steps=pool_steps, now=clock.monotonic_ns)


def run(clock: FakeClock, timer: EventTimer, step: int, took_ns: int = 5 * MS) -> None:
    timer.start(step, clock.now_ns, mode="eager", cold=False, dummy=False)
    clock.now_ns += took_ns
    timer.stop(clock.now_ns, padded_tokens=0)


def test_a_span_appears_when_the_device_has_passed_it_and_not_before() -> None:
    clock, _, timer = made(lag_ns=20 * MS)
    started_ns = clock.now_ns
    run(clock, timer, 1)
    assert timer.reap(clock.now_ns) == []
    assert started_ns <= timer.pending_ns <= started_ns + MS
    clock.now_ns += 20 * MS
    (span,) = timer.reap(clock.now_ns)
    assert span.step == 1
    assert span.device_start_ns is not None
    assert span.device_end_ns is not None
    assert abs(span.device_end_ns - span.device_start_ns - 5 * MS) < 20 * US
    assert timer.pending_ns == 0


def test_late_steps_come_in_order_even_if_a_later_one_is_through_first() -> None:
    clock, device, timer = made()
    device.lag_ns = 50 * MS
    run(clock, timer, 1)
    device.lag_ns = 0
    run(clock, timer, 2)
    assert timer.reap(clock.now_ns) == []
    clock.now_ns += 100 * MS
    assert [span.step for span in timer.reap(clock.now_ns)] == [1, 2]


def test_the_first_steps_wait_for_the_first_anchor_and_none_is_lost() -> None:
    clock, device, timer = made()
    device.aside_lag_ns = 30 * MS
    run(clock, timer, 1)
    assert timer.reap(clock.now_ns) == []
    assert timer.pending_ns
    clock.now_ns += 30 * MS
    (span,) = timer.reap(clock.now_ns)
    assert timer.dropped == 0
    # The step began before the anchor was passed: its offset is negative, and right.
    assert span.device_start_ns is not None
    assert -31 * MS < span.device_start_ns < -29 * MS


def test_a_failing_event_costs_the_steps_in_flight_and_timing_starts_again() -> None:
    clock, device, timer = made(lag_ns=MS)
    for step in range(3):
        run(clock, timer, step)
    device.failing.add(timer._flights[1].end)
    clock.now_ns += 10 * MS
    assert [span.step for span in timer.reap(clock.now_ns)] == [0]
    assert timer.dropped == 2
    assert timer.pending_ns == 0
    assert device.num_resets == 1
    run(clock, timer, 3)  # too soon after the failure
    assert timer.dropped == 3
    clock.now_ns += ANCHOR_AGAIN_NS
    run(clock, timer, 4)
    clock.now_ns += 10 * MS
    assert [span.step for span in timer.reap(clock.now_ns)] == [4]
    assert timer.dropped == 3
    assert not device.failing & set(timer._free)


def test_device_offsets_go_on_where_they_were_after_a_restart() -> None:
    clock, device, timer = made()
    run(clock, timer, 0)
    (before,) = timer.anchors()
    timer.reap(clock.now_ns)
    device.fails.add("record")
    clock.now_ns += 1000 * MS
    run(clock, timer, 1)
    device.fails.clear()
    clock.now_ns += ANCHOR_AGAIN_NS
    started_ns = clock.now_ns
    run(clock, timer, 2)
    (span,) = timer.reap(clock.now_ns)
    (after,) = timer.anchors()
    assert after.device_ns - before.device_ns == after.host_ns - before.host_ns
    assert span.device_start_ns is not None
    assert abs(after.host_ns + span.device_start_ns - after.device_ns - started_ns) < 20 * US


def test_events_that_cannot_be_recorded_cost_steps_and_never_raise() -> None:
    clock, device, timer = made()
    device.fails.add("record")
    for step in range(200):
        run(clock, timer, step)
    assert timer.dropped == 200
    device.fails.clear()
    clock.now_ns += ANCHOR_AGAIN_NS
    run(clock, timer, 200)
    assert [span.step for span in timer.reap(clock.now_ns + MS)] == [200]


def test_an_exhausted_pool_drops_steps_counts_them_and_recovers() -> None:
    clock, device, timer = made(lag_ns=10_000 * MS, pool_steps=4)
    for step in range(10):
        run(clock, timer, step)
    assert timer.dropped == 6
    assert device.num_made <= 10
    clock.now_ns += 20_000 * MS
    assert [span.step for span in timer.reap(clock.now_ns)] == [0, 1, 2, 3]
    device.lag_ns = 0
    run(clock, timer, 10)
    assert [span.step for span in timer.reap(clock.now_ns + MS)] == [10]
    assert device.num_made <= 10


def test_a_step_begun_twice_or_never_stopped_is_counted() -> None:
    clock, device, timer = made()
    for step in range(500):
        timer.start(step, clock.now_ns, mode="eager", cold=False, dummy=False)
    assert timer.dropped == 499
    run(clock, timer, 500)
    assert [span.step for span in timer.reap(clock.now_ns + MS)] == [500]
    host = HostTimer()
    host.start(1, 1, mode="eager", cold=False, dummy=False)
    host.start(2, 2, mode="eager", cold=False, dummy=False)
    host.stop(3, padded_tokens=0)
    assert host.dropped == 1
    assert [span.step for span in host.reap(4)] == [2]
    assert device.num_made < 600


def test_forgetting_gives_up_everything_under_way() -> None:
    clock, _, timer = made(lag_ns=10 * MS)
    run(clock, timer, 1)
    timer.start(2, clock.now_ns, mode="eager", cold=False, dummy=False)
    timer.forget()
    assert timer.pending_ns == 0
    timer.stop(clock.now_ns, padded_tokens=0)
    clock.now_ns += 100 * MS
    assert timer.reap(clock.now_ns) == []


def test_an_anchor_is_a_few_microseconds_wide_however_busy_the_device_is() -> None:
    clock, _, timer = made(lag_ns=500 * MS)
    run(clock, timer, 1)
    (anchor,) = timer.anchors()
    assert anchor.error_ns <= 3 * US
    assert anchor.device_ns == 0


def test_an_anchor_that_is_slow_states_how_little_it_knows() -> None:
    clock, device, timer = made()
    device.aside_lag_ns = 40 * MS
    at_ns = clock.now_ns + 40 * MS
    run(clock, timer, 1)
    timer.reap(clock.now_ns)
    clock.now_ns += 50 * MS
    timer.reap(clock.now_ns)
    (anchor,) = timer.anchors()
    assert abs(anchor.host_ns - at_ns) <= anchor.error_ns


def test_after_a_failed_anchor_timing_starts_again_soon() -> None:
    clock, device, timer = made()
    device.fails.add("is_done")
    run(clock, timer, 1)
    assert timer.anchors() == []
    assert timer.dropped == 1
    device.fails.clear()
    clock.now_ns += ANCHOR_AGAIN_NS
    run(clock, timer, 2)
    assert len(timer.anchors()) == 1
    assert [span.step for span in timer.reap(clock.now_ns + MS)] == [2]
    assert timer.dropped == 1


def test_anchors_show_a_drifting_clock_and_spans_stay_placed_after_an_hour() -> None:
    clock, _, timer = made(drift=50e-6)
    anchors, worst_ns = [], 0
    for step in range(1800):
        started_ns = clock.now_ns
        run(clock, timer, step)
        (span,) = timer.reap(clock.now_ns)
        anchors += timer.anchors()
        last = anchors[-1]
        assert span.device_start_ns is not None
        placed_ns = last.host_ns + (span.device_start_ns - last.device_ns)
        worst_ns = max(worst_ns, abs(placed_ns - started_ns))
        clock.now_ns += ANCHOR_NS
    assert len(anchors) == 1800
    # Float32 milliseconds would be 0.25 ms by now, had all been taken from the first anchor.
    assert worst_ns < 40 * US
    host_ns = anchors[-1].host_ns - anchors[0].host_ns
    assert abs((anchors[-1].device_ns / host_ns - 1) - 50e-6) < 1e-6


def test_a_device_span_starts_and_ends_at_its_own_marks_and_host_times_stay() -> None:
    clock, _, timer = made()
    launched_ns = clock.now_ns
    timer.start(1, clock.now_ns, mode="eager", cold=False, dummy=False)
    clock.now_ns += 3 * MS  # inputs are prepared
    timer.device_start()
    clock.now_ns += 5 * MS  # the model, and the sampler
    timer.device_end()
    clock.now_ns += 7 * MS  # the host waits for the tokens
    timer.stop(clock.now_ns, padded_tokens=0)
    stopped_ns = clock.now_ns
    (span,) = timer.reap(clock.now_ns)
    assert span.device_start_ns is not None
    assert span.device_end_ns is not None
    assert abs(span.device_end_ns - span.device_start_ns - 5 * MS) < 20 * US
    # `start` looks at the clock some times for the anchor.
    assert (span.launch_start_ns, span.launch_end_ns) == (launched_ns, stopped_ns)


def test_without_its_start_or_end_a_device_span_is_as_wide_as_the_step() -> None:
    for has_start, has_end, took_ms in ((False, True, 8), (True, False, 12), (False, False, 15)):
        clock, _, timer = made()
        timer.start(1, clock.now_ns, mode="eager", cold=False, dummy=False)
        clock.now_ns += 3 * MS
        if has_start:
            timer.device_start()
        clock.now_ns += 5 * MS
        if has_end:
            timer.device_end()
        clock.now_ns += 7 * MS
        timer.stop(clock.now_ns, padded_tokens=0)
        (span,) = timer.reap(clock.now_ns)
        assert span.device_start_ns is not None
        assert span.device_end_ns is not None
        took_ns = span.device_end_ns - span.device_start_ns
        assert abs(took_ns - took_ms * MS) < 50 * US


def test_no_event_is_lost_to_steps_that_end_early_twice_or_never() -> None:
    clock, device, timer = made(pool_steps=4)
    for step in range(50):
        timer.device_start()  # no step is open
        timer.device_end()
        timer.start(step, clock.now_ns, mode="eager", cold=False, dummy=False)
        timer.device_end()
        timer.device_start()  # too late
        timer.device_end()
        if step % 3 == 1:
            timer.forget()
        elif step % 3:
            timer.stop(clock.now_ns, padded_tokens=0)
        clock.now_ns += 5 * MS
        timer.reap(clock.now_ns)
    assert device.num_made <= 2 * 4 + 2
    device.fails = {"record"}
    timer.start(99, clock.now_ns, mode="eager", cold=False, dummy=False)
    device.fails = set()
    timer.start(100, clock.now_ns, mode="eager", cold=False, dummy=False)
    device.fails = {"record"}
    timer.device_start()
    device.fails = set()
    timer.stop(clock.now_ns, padded_tokens=0)
    assert timer.pending_ns == 0
