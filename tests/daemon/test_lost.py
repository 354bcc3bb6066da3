"""Engines that end without a shutdown record, on a clock that only the test moves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from inferscope.daemon.config import PinSettings, SloSettings
from inferscope.daemon.engines import Engines
from inferscope.daemon.incidents import Incidents
from inferscope.daemon.pins import Pins
from inferscope.slo.verdicts import Judged
from tests.daemon.rings import SECOND_NS, Ring, Time
from tests.fold.scripts import Finals
from tests.slo.requests import FINE


class Watch:
    """A collector's loop, with pins on `engine_lost` alone."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.time = Time()
        self.engines = Engines(folder, sink=Finals(), clock=self.time)
        settings = PinSettings(folder / "pins", before_s=1, after_s=1, on=("engine_lost",))
        self._pins = Pins(settings, self.engines.rings, clock=self.time, log_line=lambda _: None)
        self._incidents = Incidents(self._pins, on=settings.on, slo=SloSettings())

    def go_on(self, seconds: float, *rings: Ring) -> None:
        """Advance the clock; these rings write heartbeats."""
        for tick in range(round(2 * seconds)):
            self.time.now_ns += SECOND_NS // 2
            for ring in rings:
                ring.write_all()
            self.engines.advance()
            if tick % 2:
                self._incidents.on_snapshot(self.engines.snapshot())
            self._pins.advance()

    def pinned(self) -> list[str]:
        """End; return why there was a pin, for each."""
        self._pins.close()
        self.engines.close()
        return [path.stem.split("-", 2)[2] for path in (self.folder / "pins").glob("*.isr")]


@pytest.fixture
def watch(tmp_path: Path) -> Watch:
    return Watch(tmp_path)


def test_a_core_that_dies_is_a_loss_though_its_front_end_exits_later(watch: Watch) -> None:
    core, front = Ring(watch.folder, watch.time), Ring(watch.folder, watch.time, role="frontend")
    watch.go_on(20, core, front)
    core.close()
    watch.go_on(2, front)
    front.close()  # one that knows that its core died writes no shutdown record
    watch.go_on(60)
    (view,) = watch.engines.snapshot().engines
    assert (view.is_alive, view.has_ended, view.health.probe_state) == (False, False, "on")
    assert watch.pinned() == ["engine_lost"]


@pytest.mark.parametrize("away_s", [0.5, 30])
def test_an_engine_stopped_by_its_front_end_and_started_again_is_no_loss(
    watch: Watch, away_s: float
) -> None:
    for pid in (1, 2):
        core = Ring(watch.folder, watch.time, pid=pid)
        front = Ring(watch.folder, watch.time, role="frontend", pid=10 + pid)
        watch.go_on(90, core, front)  # the rings of the run before are dropped meanwhile
        front.shut_down()
        core.close()
        watch.go_on(away_s)
    watch.go_on(60)
    (view,) = watch.engines.snapshot().engines
    assert (view.is_alive, view.has_ended, view.num_replaced) == (False, True, 0)
    assert watch.pinned() == []


def test_of_several_front_ends_none_stops_the_core(watch: Watch) -> None:
    core = Ring(watch.folder, watch.time)
    fronts = [Ring(watch.folder, watch.time, role="frontend", rank=rank) for rank in (0, 1)]
    watch.go_on(20, core, *fronts)
    core.close()
    watch.go_on(1, *fronts)
    for front in fronts:  # their supervisor ends them
        front.shut_down()
    watch.go_on(60)
    assert watch.pinned() == ["engine_lost"]


def test_a_front_end_that_ends_long_after_its_core_has_not_stopped_it(watch: Watch) -> None:
    core, front = Ring(watch.folder, watch.time), Ring(watch.folder, watch.time, role="frontend")
    watch.go_on(20, core, front)
    core.close()
    watch.go_on(60, front)
    front.shut_down()
    watch.go_on(60)
    assert watch.pinned() == ["engine_lost"]


def test_a_core_that_outlives_its_front_end_is_not_stopped(watch: Watch) -> None:
    core, front = Ring(watch.folder, watch.time), Ring(watch.folder, watch.time, role="frontend")
    watch.go_on(20, core, front)
    front.shut_down()
    watch.go_on(20, core)
    (view,) = watch.engines.snapshot().engines
    assert (view.is_alive, view.has_ended) == (True, False)
    core.close()
    watch.go_on(60)
    assert watch.pinned() == ["engine_lost"]


@pytest.mark.parametrize("role", ["core", "frontend"])
def test_an_engine_is_stopped_if_its_core_or_its_front_end_shuts_down(
    watch: Watch, role: str
) -> None:
    core, front = Ring(watch.folder, watch.time), Ring(watch.folder, watch.time, role="frontend")
    watch.go_on(20, core, front)
    stopped, killed = (core, front) if role == "core" else (front, core)
    stopped.shut_down()
    killed.close()
    watch.go_on(60)
    (view,) = watch.engines.snapshot().engines
    assert (view.is_alive, view.has_ended) == (False, True)
    assert watch.pinned() == []


def test_front_ends_alone_have_ended_when_all_have(watch: Watch) -> None:
    one = Ring(watch.folder, watch.time, role="frontend")
    other = Ring(watch.folder, watch.time, role="embedder")
    watch.go_on(20, one, other)
    one.shut_down()
    other.close()
    watch.go_on(60)
    assert watch.pinned() == ["engine_lost"]


@pytest.mark.parametrize("away_s", [0.5, 30])
@pytest.mark.parametrize("is_killed", [True, False])
def test_an_engine_started_again_is_one_and_its_loss_is_one_pin(
    watch: Watch, away_s: float, is_killed: bool
) -> None:
    first = Ring(watch.folder, watch.time)
    watch.go_on(20, first)
    if is_killed:
        first.close()
    else:
        first.shut_down()
    (before,) = watch.engines.snapshot().engines
    watch.go_on(away_s)
    second = Ring(watch.folder, watch.time, pid=2)
    watch.go_on(30, second)
    (view,) = watch.engines.snapshot().engines
    assert (view.is_alive, view.health.probe_state, view.pids) == (True, "on", (2,))
    (device,) = view.devices
    assert sum(device.seconds_by_ns.values()) == device.wall_ns
    # The time between the incarnations is not counted, with the five seconds of detection.
    passed_s = (device.wall_ns - before.devices[0].wall_ns) / SECOND_NS
    assert passed_s == pytest.approx(30, abs=8)
    second.shut_down()
    watch.go_on(30)
    assert watch.pinned() == ["engine_lost"] * is_killed


class Noting(Pins):
    """Writes down what is to be pinned."""

    def __init__(self, folder: Path, time: Time) -> None:
        super().__init__(PinSettings(folder), list, clock=time, log_line=lambda _: None)
        self.pin_calls: list[tuple[str, int, int]] = []

    def pin(self, why: str, first_ns: int, last_ns: int) -> None:
        self.pin_calls.append((why, first_ns, last_ns))


@pytest.mark.parametrize("on", ["breach", "stall"])
def test_what_missed_an_objective_is_a_breach(tmp_path: Path, on: str) -> None:
    pins = Noting(tmp_path, Time())
    incidents = Incidents(pins, on=(on,), slo=SloSettings())
    for results in ({}, {"ttft": True}, {"ttft": True, "availability": False}):
        incidents.on_request(structs.replace(FINE, judged=Judged(results)))
    incidents.on_request(FINE)
    assert pins.pin_calls == [("breach", FINE.arrived_ns, FINE.delivered_ns)] * (on == "breach")


@pytest.mark.parametrize(
    ("stands_s", "step_s", "num_running", "state", "num_pins"),
    [
        (12, 0.1, 1, "on", 1),
        (60, 0.1, 1, "paused", 0),
        (9, 0.1, 1, "on", 0),
        (12, 0.1, 0, "on", 0),
        (12, 0.1, 1, "off", 0),
        (40, 5.0, 1, "on", 0),
        (60, 5.0, 1, "on", 1),
    ],
)
def test_an_engine_that_has_requests_and_makes_no_step_stalls(
    tmp_path: Path, stands_s: int, step_s: float, num_running: int, state: str, num_pins: int
) -> None:
    time = Time()
    ring = Ring(tmp_path, time)
    engines = Engines(tmp_path, sink=Finals(), clock=time)
    pins = Noting(tmp_path / "pins", time)
    incidents = Incidents(pins, on=("stall",), slo=SloSettings())
    ring.pass_time(2)
    engines.advance()
    look = engines.snapshot()
    (view,) = look.engines
    step = replace(view.step, num=1, p99_ns=step_s * SECOND_NS)
    is_paused = state == "paused"
    health = replace(view.health, probe_state="on" if is_paused else state)
    view = replace(view, is_paused=is_paused)
    began_ns = time.now_ns
    for second in range(stands_s + 1):
        # The window is ten seconds: after that it holds no step.
        steps = step if second < 10 else view.step
        at_ns = began_ns + second * SECOND_NS
        now = replace(view, num_running=num_running, step=steps, health=health, folded_ns=at_ns)
        incidents.on_snapshot(replace(look, mono_ns=at_ns, engines=(now,)))
    engines.close()
    ring.close()
    assert [why for why, _, _ in pins.pin_calls] == ["stall"] * num_pins
    for _, first_ns, _ in pins.pin_calls:
        assert first_ns == began_ns


@pytest.mark.parametrize(
    ("stands_s", "num_admissible", "admits", "state", "num_pins"),
    [
        (12, 6, False, "on", 1),
        (9, 6, False, "on", 0),
        (60, 0, False, "on", 0),
        (60, None, False, "on", 0),
        (60, 6, True, "on", 0),
        (60, 6, False, "off", 0),
        (60, 6, False, "paused", 0),
    ],
)
def test_an_engine_that_admits_none_of_its_queue_stalls(
    tmp_path: Path,
    stands_s: int,
    num_admissible: int | None,
    admits: bool,
    state: str,
    num_pins: int,
) -> None:
    time = Time()
    ring = Ring(tmp_path, time)
    engines = Engines(tmp_path, sink=Finals(), clock=time)
    pins = Noting(tmp_path / "pins", time)
    incidents = Incidents(pins, on=("stall",), slo=SloSettings())
    ring.pass_time(2)
    engines.advance()
    look = engines.snapshot()
    (view,) = look.engines
    is_paused = state == "paused"
    health = replace(view.health, probe_state="on" if is_paused else state)
    view = replace(view, health=health, is_paused=is_paused, num_running=0)
    began_ns = time.now_ns
    for second in range(stands_s + 1):
        at_ns = began_ns + second * SECOND_NS
        num_admissions = 7 + second // 8 if admits else 7
        now = replace(
            view, num_admissible=num_admissible, num_admissions=num_admissions, folded_ns=at_ns
        )
        incidents.on_snapshot(replace(look, mono_ns=at_ns, engines=(now,)))
    engines.close()
    ring.close()
    assert pins.pin_calls == [("stall", began_ns, began_ns + 11 * SECOND_NS)] * num_pins


def test_a_fold_that_is_far_behind_has_not_seen_a_stall(tmp_path: Path) -> None:
    time = Time()
    ring = Ring(tmp_path, time)
    engines = Engines(tmp_path, sink=Finals(), clock=time)
    pins = Noting(tmp_path / "pins", time)
    incidents = Incidents(pins, on=("stall",), slo=SloSettings())
    ring.pass_time(2)
    engines.advance()
    (view,) = engines.snapshot().engines
    folded_ns = view.folded_ns
    assert 0 <= time.now_ns - folded_ns < SECOND_NS
    for _ in range(60):  # a minute in which no turn comes to this engine, which makes steps
        ring.pass_time(1)
        look = engines.snapshot()
        (view,) = look.engines
        assert view.folded_ns == folded_ns
        incidents.on_snapshot(replace(look, engines=(replace(view, num_running=1),)))
    assert pins.pin_calls == []
    while engines.advance():
        pass
    look = engines.snapshot()
    (view,) = look.engines
    assert time.now_ns - view.folded_ns < SECOND_NS
    # Folded, the minute has brought no step: that was one.
    incidents.on_snapshot(replace(look, engines=(replace(view, num_running=1),)))
    assert [why for why, _, _ in pins.pin_calls] == ["stall"]
    engines.close()
    ring.close()


def test_clean_exit_is_not_lost_before_its_shutdown_record_is_folded(tmp_path: Path) -> None:
    time = Time()
    ring = Ring(tmp_path, time)
    engines = Engines(tmp_path, sink=Finals(), clock=time)
    pins = Noting(tmp_path / "pins", time)
    incidents = Incidents(pins, on=("engine_lost",), slo=SloSettings())
    ring.pass_time(2)
    engines.advance()
    incidents.on_snapshot(engines.snapshot())
    for _ in range(3000):  # more than a turn takes
        ring.write_all()
    ring.shut_down()
    time.now_ns += 10 * SECOND_NS
    assert engines.advance()
    for _ in range(3):
        (view,) = engines.snapshot().engines
        assert (view.is_alive, view.has_ended) == (True, False)
        incidents.on_snapshot(engines.snapshot())
    while engines.advance():
        pass
    (view,) = engines.snapshot().engines
    assert (view.is_alive, view.has_ended) == (False, True)
    incidents.on_snapshot(engines.snapshot())
    assert pins.pin_calls == []
    engines.close()
