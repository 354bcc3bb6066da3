"""Retention limits of a fold and its final records, which do not depend on them."""

from __future__ import annotations

from pathlib import Path

import pytest

from inferscope.fold.final_records import FinalRequest, FinalStep
from inferscope.fold.fold import Collector
from inferscope.fold.retention import ALL, Retention
from inferscope.fold.snapshots import NO_QUANTILES, EngineView
from inferscope.fold.view import snapshot
from inferscope.records import decode
from inferscope.ring.recording import RecordingReader

DEMO = Path(__file__).parents[2] / "samples" / "demo.isr"
LITTLE = Retention(seconds=20, durations=("step",), finished=0, digest=False)


class _Recorder:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def on_step(self, step: FinalStep) -> None:
        self.lines.append(repr((step.step, step.shares_ns.tolist(), step.request_ids)))

    def on_request(self, request: FinalRequest) -> None:
        self.lines.append(repr(request))


def _folded(keep: Retention) -> tuple[Collector, list[str], EngineView]:
    recorder = _Recorder()
    collector = Collector(recorder, keep=keep)
    reader = RecordingReader(DEMO)
    for frame in reader.frames():
        collector.fold(frame.ring, decode(frame.code, frame.payload))
    reader.close()
    collector.end()
    (view,) = snapshot(collector, window_ns=10_000_000_000, mode="ended").engines
    return collector, recorder.lines, view


@pytest.mark.thorough
def test_what_is_final_is_the_same_however_little_is_kept() -> None:
    whole, recorded, view = _folded(ALL)
    little, recorded_too, small = _folded(LITTLE)
    assert len(recorded) > 100
    assert recorded_too == recorded
    assert (small.devices, small.device_ns, small.step) == (view.devices, view.device_ns, view.step)
    assert view.ttft != NO_QUANTILES
    assert small.ttft == NO_QUANTILES
    assert len(small.requests) < len(view.requests)
    assert whole.digest()
    assert not little.digest()
