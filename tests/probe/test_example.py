from __future__ import annotations

import inspect
import runpy
from pathlib import Path

import pytest

from inferscope.probe import EngineInfo, Probe
from inferscope.records import Emitted, RequestEvent, StepPlan, StepSlices, StepSpan
from tests.probe.fakes import of

SAMPLE = Path(__file__).parents[2] / "samples" / "instrument_a_loop.py"


def test_a_loop_of_ones_own_is_instrumented_in_twenty_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFERSCOPE_DIR", str(tmp_path))
    monkeypatch.setenv("INFERSCOPE_RING_MB", "1")
    generate = runpy.run_path(str(SAMPLE))["generate"]
    body = inspect.getsource(generate).splitlines()[2:]
    assert len(body) <= 20
    probe = Probe.open(EngineInfo(0, "mine"))
    generate([12, 300, 45], max_tokens=5, probe=probe)
    path = probe.path
    probe.close()
    assert path is not None
    for kind in (StepPlan, StepSpan, StepSlices, Emitted):
        assert [record.step for record in of(kind, path)] == list(range(5))  # type: ignore[attr-defined]
    assert len(of(RequestEvent, path)) == 9
