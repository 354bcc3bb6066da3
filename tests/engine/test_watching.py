from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import inferscope
from inferscope.engine import Engine
from inferscope.engine.request import Sampling
from inferscope.errors import BadInput
from inferscope.records import StepSlices
from tests.probe.fakes import of

GREEDY = Sampling(max_tokens=5, ignore_eos=True)


@pytest.fixture(autouse=True)
def _rings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFERSCOPE_DIR", str(tmp_path))
    monkeypatch.setenv("INFERSCOPE_RING_MB", "1")


def test_engine_is_observed_until_the_handle_is_closed(tiny_engine: Callable[..., Engine]) -> None:
    engine = tiny_engine()
    before = engine.probe
    with inferscope.observe(engine) as seen:
        engine.generate([[1, 2, 3]], GREEDY)
    engine.generate([[1, 2, 3]], GREEDY)
    assert engine.probe is before
    assert len(of(StepSlices, seen.path)) == 5


def test_an_engine_with_requests_is_refused(tiny_engine: Callable[..., Engine]) -> None:
    engine = tiny_engine()
    engine.submit([1, 2, 3], GREEDY)
    with pytest.raises(BadInput, match="between two"):
        inferscope.observe(engine)
    engine.close()
