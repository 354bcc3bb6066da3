"""A collector brings this host's calibration to an engine that cannot read it, and to its pins."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from inferscope.calibration import store
from tests.children import child
from tests.daemon.running import collecting, eventually
from tests.daemon.test_scrape import exported
from tests.fold.test_calibrated import RATES

_ENGINE = """
import sys, time
from inferscope.probe import Probe
from tests.test_calibration import ENGINE

probe = Probe.open(ENGINE)
index = probe.queued("r", prompt_tokens=1)
probe.admitted(index)
for step in range(30):
    now = time.monotonic_ns()
    probe.plan(step, start_ns=now, end_ns=now, waiting=0, running=1)
    probe.start(step)
    time.sleep(0.002)
    probe.stop(step)
    probe.slices(step, requests=[index], phases=[1], tokens=[1], contexts=[step], sampled=[1])
    probe.emitted([index], [1], step=step)
probe.finished(index, "length")
print("done", flush=True)
sys.stdin.read()
probe.close()
"""


@pytest.mark.thorough
def test_a_collector_reports_what_the_engine_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFERSCOPE_CACHE", str(tmp_path / "cache"))
    store(RATES)
    rings, pins = tmp_path / "rings", tmp_path / "pins"
    setting = f"pins: {{folder: {pins}, before_s: 30, after_s: 0.5}}\n"
    with (
        collecting(rings, tmp_path, setting) as collector,
        child(
            [sys.executable, "-c", _ENGINE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={
                **os.environ,
                "INFERSCOPE_CACHE": os.devnull,
                "INFERSCOPE_DIR": str(rings),
                "INFERSCOPE_ENGINE_ID": "contained",
                "INFERSCOPE_RING_MB": "4",
            },
            cwd=Path(__file__).parents[2],
        ) as engine,
    ):
        assert engine.stdout is not None
        assert engine.stdout.readline() == b"done\n"
        name = "inferscope_cost_model_residual_ratio"
        eventually(lambda: bool(collector.scrape().all(name, source="calibration")))
        collector.process.send_signal(signal.SIGUSR1)
        eventually(lambda: any(pins.glob("*.isr")))
        engine.communicate()
        assert collector.stop() == 0
    (pin,) = pins.glob("*.isr")
    monkeypatch.setenv("INFERSCOPE_CACHE", os.devnull)
    steps = [row for row in exported(pin, tmp_path / "pin.jsonl") if row["kind"] == "step"]
    assert len(steps) == 30
    assert {step["fit"].partition("-")[0] for step in steps} == {"calibration"}
