"""Steps on a device with a clock of its own: all are timed, none under the probe's lock."""

from __future__ import annotations

import random
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from inferscope.engine import Engine, EngineOptions, Sampling, load_engine
from inferscope.engine.load import describe
from inferscope.probe import EventTimer, Probe, StepTimer, TorchEvents
from inferscope.records import Emitted, StepPlan, StepSlices, StepSpan
from tests.probe.cuda import StrictCuda
from tests.probe.fakes import FakeClock, of

LOAD = Sampling(max_tokens=12, ignore_eos=True)


def prompts() -> list[list[int]]:
    draw = random.Random(3)
    return [draw.choices(range(100), k=draw.randint(1, 60)) for _ in range(6)]


def device_timer() -> StepTimer:
    clock = FakeClock()
    events = TorchEvents(0, cuda=StrictCuda(clock), exchange=lambda mode: mode)
    return EventTimer(events, now=clock.monotonic_ns)


def run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, timer: StepTimer | None
) -> tuple[Path, Mock]:
    """Serve the load; return the ring, and the calls of `Probe.start`."""
    folder.mkdir()
    monkeypatch.setenv("INFERSCOPE_DIR", str(folder))
    engine: Engine = load_engine(
        "random:tiny", EngineOptions(token_budget=24, max_running=3, dtype="float32")
    )
    if timer is not None:
        monkeypatch.setattr(engine._runner, "is_asynchronous", True)
    probe = engine.probe = Probe.open(describe(engine, name="tiny"), timer=timer)
    start = Mock(side_effect=probe.start)
    monkeypatch.setattr(probe, "start", start, raising=False)
    engine.generate(prompts(), LOAD)
    time.sleep(0.3)  # the last step's events are read from beside
    assert probe.path is not None
    probe.close()
    return probe.path, start


def test_every_step_is_timed_and_only_the_first_takes_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring, start = run(tmp_path / "device", monkeypatch, device_timer())
    steps = [plan.step for plan in of(StepPlan, ring)]
    assert [span.step for span in of(StepSpan, ring)] == steps
    assert all(span.device_start_ns is not None for span in of(StepSpan, ring))
    assert start.call_count <= 1 < len(steps)


def test_a_device_s_steps_have_the_facts_of_the_host_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rings = [
        run(tmp_path / name, monkeypatch, timer)[0]
        for name, timer in (("device", device_timer()), ("host", None))
    ]
    for kind, fields in (
        (StepPlan, ("step", "waiting", "running", "blocks_used", "binding")),
        (StepSlices, ("step", "digest", "requests", "phases", "tokens", "contexts", "sampled")),
        (Emitted, ("step", "requests", "tokens")),
    ):
        device, host = (
            [[getattr(record, field) for field in fields] for record in of(kind, ring)]
            for ring in rings
        )
        assert device
        assert device == host
