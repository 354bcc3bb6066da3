"""Whatever fails inside, wherever it is touched from: nothing gets out but one warning."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from inferscope.probe import EngineInfo, HostTimer, Probe
from inferscope.probe.requests import RequestTable
from inferscope.records import CLOSED, FAILED, ON, ProbeHealth
from inferscope.ring.control import open_control
from inferscope.ring.reader import RingReader
from tests.probe.fakes import FakeClock, make_ring, of
from tests.ring.test_damage import until

PARTS = ("ring", "switch", "timer", "clock", "requests", "budget")
CALLS: dict[str, Callable[[Probe, Any], object]] = {
    "received": lambda probe, index: probe.received("r", attributes={"a": "b"}),
    "tokenised": lambda probe, index: probe.tokenised(index, 3),
    "queued": lambda probe, index: probe.queued("r", prompt_tokens=3),
    "admitted": lambda probe, index: probe.admitted(index),
    "preempted": lambda probe, index: probe.preempted(index),
    "resumed": lambda probe, index: probe.resumed(index),
    "transferred": lambda probe, index: probe.transferred(index, 9, start_ns=0, end_ns=1, peer="p"),
    "cache_lookup": lambda probe, index: probe.cache_lookup(index, tokens={"hit": 3}),
    "prompt_likeness": lambda probe, index: probe.prompt_likeness(index, index, diverged_at=2),
    "compare_prompt": lambda probe, index: (
        probe.compare_prompt(index, range(40)),
        probe.compare_prompt(index, range(40)),
    ),
    "cache_sample": lambda probe, index: probe.cache_sample(
        index, block_tokens=16, num_blocks=1, rate=1.0, digests=[1]
    ),
    "first_byte": lambda probe, index: probe.first_byte(index),
    "last_byte": lambda probe, index: probe.last_byte(index),
    "finished": lambda probe, index: probe.finished(index, "stop"),
    "paused": lambda probe, index: probe.paused(),
    "unpaused": lambda probe, index: (probe.paused(), probe.unpaused()),
    "plan": lambda probe, index: probe.plan(2, start_ns=0, end_ns=1, waiting=0, running=1),
    "start": lambda probe, index: probe.start(2),
    "device_start": lambda probe, index: probe.device_start(),
    "device_end": lambda probe, index: probe.device_end(),
    "stop": lambda probe, index: probe.stop(1),
    "slices": lambda probe, index: probe.slices(
        1, requests=[index], phases=[1], tokens=[1], contexts=[1]
    ),
    "same_step": lambda probe, index: probe.same_step(
        2, start_ns=0, end_ns=1, waiting=0, running=1, emitted_step=1
    ),
    "routed": lambda probe, index: probe.routed(1, [[1, 0], [0, 1]], per_token=1),
    "sign": lambda probe, index: probe.sign(1, requests=[index], tokens=[1]),
    "emitted": lambda probe, index: probe.emitted([index], [1], step=1),
    "unsupported": lambda probe, index: probe.unsupported("pauses: gone"),
    "on": lambda probe, index: probe.on,
    "path": lambda probe, index: probe.path,
    "live_requests": lambda probe, index: probe.live_requests,
    "close": lambda probe, index: probe.close(),
    "abandon": lambda probe, index: probe.abandon(),
    "the thread beside": lambda probe, index: probe._keeper.tend(),
}
MADE_OTHERWISE = {
    "is_shedding",
    "hidden",
    "open",
    "disabled",
    "clock",
    "fail",
    "warn",
    "defer",
    "look_after",
    "marks",
}
_OF_THE_TIMER_ALONE = {"device_start", "device_end"}
SURELY_TOUCHES = {
    *(
        ("clock", call)
        for call in CALLS.keys() - {"on", "path", "live_requests"} - _OF_THE_TIMER_ALONE
    ),
    *(
        ("ring", call)
        for call in CALLS.keys() - {"on", "path", "live_requests", "stop"} - _OF_THE_TIMER_ALONE
    ),
    *(
        ("timer", call)
        for call in (
            "start",
            "stop",
            "slices",
            "same_step",
            "sign",
            "close",
            "abandon",
            "the thread beside",
        )
    ),
    *(("timer", call) for call in (*_OF_THE_TIMER_ALONE, "unsupported")),
    *(
        ("requests", call)
        for call in CALLS.keys() - {"on", "path", "stop", "unsupported"} - _OF_THE_TIMER_ALONE
    ),
    *(("budget", call) for call in ("slices", "sign", "the thread beside")),
    *(("switch", call) for call in ("close", "abandon", "the thread beside")),
}
"""Or the injection would miss what it is meant for; a keyframe is due, so that all write much."""


class Faulty:
    """Stands before a part and, once it is armed, raises wherever the part is touched."""

    def __init__(self, real: object) -> None:
        self.__dict__.update(real=real, is_armed=False, num_raised=0)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.real, name)
        if not callable(value):
            self._touch()
            return value

        def call(*given: Any, **named: Any) -> Any:
            self._touch()
            return value(*given, **named)

        return call

    def __setattr__(self, name: str, value: object) -> None:
        if name in self.__dict__:
            self.__dict__[name] = value
        else:
            setattr(self.real, name, value)

    def _touch(self) -> None:
        if self.is_armed:
            self.num_raised += 1
            raise OSError(f"injected failure {self.num_raised}")


def faulty_probe(folder: Path) -> tuple[Probe, dict[str, Any]]:
    """Return a probe in the midst of a step, a report and a keyframe due, and its parts."""
    ring, clock = make_ring(folder), FakeClock()
    parts: dict[str, Any] = {
        "ring": Faulty(ring),
        "switch": Faulty(open_control(ring.path)),
        "timer": Faulty(HostTimer()),
        "clock": Faulty(clock),
        "requests": Faulty(RequestTable()),
    }
    probe = Probe(
        parts["ring"],
        parts["switch"],
        EngineInfo(0, "test"),
        timer=parts["timer"],
        clock=parts["clock"],
    )
    probe._log.requests = parts["requests"]
    parts["budget"] = probe._life._budget = Faulty(probe._life._budget)  # type: ignore[assignment]
    return probe, parts


def under_way(probe: Probe, parts: dict[str, Any]) -> Any:
    index = probe.queued("r", prompt_tokens=3)
    probe.start(0)
    probe.stop(0)
    probe.start(1)
    probe.slices(1, requests=[index], phases=[1], tokens=[1], contexts=[1], sampled=[1])
    probe.stop(1)
    parts["clock"].real.now_ns += 20_000_000_000
    return index


def warnings(probe: Probe, caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return what is in the host's log once pending messages are written."""
    probe._life.write_messages()
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def test_every_public_name_of_a_probe_is_called_here(tmp_path: Path) -> None:
    probe, _ = faulty_probe(tmp_path)
    public = {name for name in dir(probe) if not name.startswith("_")}
    assert public - MADE_OTHERWISE == CALLS.keys() - {"the thread beside"}
    probe.close()


@pytest.mark.thorough
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("call", CALLS)
def test_a_failing_part_switches_the_probe_off_once_reports_it_once_and_never_raises(
    call: str, part: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    probe, parts = faulty_probe(tmp_path)
    index = under_way(probe, parts)
    assert probe.on
    parts[part].is_armed = True
    CALLS[call](probe, index)
    has_failed = parts[part].num_raised > 0
    assert has_failed or (part, call) not in SURELY_TOUCHES
    # Closed already when its control byte fails: nothing is lost then, and nothing logged.
    is_logged = has_failed and (call, part) != ("close", "switch")
    assert probe.on is not (has_failed or call in ("close", "abandon"))
    assert len(warnings(probe, caplog)) == is_logged
    # Off is off: no other call fails again, or logs it again, broken as the part still is.
    if has_failed:
        for other in CALLS.values():
            other(probe, index)
            assert not probe.on
        assert len(warnings(probe, caplog)) == is_logged
    parts[part].is_armed = False
    for other in CALLS.values():
        other(probe, index)
    assert len(warnings(probe, caplog)) == is_logged
    assert all("injected failure 1" in warning for warning in warnings(probe, caplog))
    last_word = of(ProbeHealth, tmp_path / "a.ring")[-1]
    # An abandoned ring holds its last report before its control byte fails.
    is_reported = is_logged and (call, part) != ("abandon", "switch")
    ended = ON if call == "abandon" else CLOSED
    assert last_word.errors == is_reported
    assert last_word.state == (FAILED if is_reported else ended)


@pytest.mark.parametrize("part", [None, *PARTS])
def test_a_caller_at_fault_switches_the_probe_off_and_it_reports_it_once(
    part: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    probe, parts = faulty_probe(tmp_path)
    if part is not None:
        parts[part].is_armed = True
    for _ in range(2):
        probe.fail(ValueError("the caller has lost count"))
        assert not probe.on
    assert ["lost count" in warning for warning in warnings(probe, caplog)] == [True]
    if part is None:
        assert of(ProbeHealth, tmp_path / "a.ring")[-1].state == FAILED
    probe.close()


@pytest.mark.parametrize("part", ["timer", "clock"])
def test_a_part_that_fails_while_opening_costs_the_probe_and_one_line(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("INFERSCOPE_DIR", str(tmp_path))
    monkeypatch.setenv("INFERSCOPE_RING_MB", "1")
    broken = {"timer": Faulty(HostTimer()), "clock": Faulty(FakeClock())}
    broken[part].is_armed = True
    probe = Probe.open(EngineInfo(0, "test"), **{part: broken[part]})  # type: ignore[arg-type]
    probe.start(1)
    assert not probe.on
    assert len(warnings(probe, caplog)) == 1
    probe.close()


def test_the_heart_beats_on_after_a_moment_without_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFERSCOPE_DIR", str(tmp_path))
    monkeypatch.setenv("INFERSCOPE_RING_MB", "0.1")
    probe = Probe.open(EngineInfo(0, "test"))
    assert probe.path is not None
    is_out = threading.Event()
    real = threading.Thread.__init__

    def thread(self: threading.Thread, *given: Any, **named: Any) -> None:
        if named.get("name") == "inferscope-log" and not is_out.is_set():
            is_out.set()
            raise MemoryError
        real(self, *given, **named)

    monkeypatch.setattr(threading.Thread, "__init__", thread)
    probe.warn("something is wrong")
    assert is_out.wait(10)
    reader = RingReader(probe.path)
    heartbeats = {reader.heartbeat_ns()}
    until(lambda: heartbeats.add(reader.heartbeat_ns()) or len(heartbeats) > 2, 5)
    until(lambda: not probe._life.has_messages)
    reader.close()
    probe.close()
