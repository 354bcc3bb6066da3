"""A short run of simulated traffic: what the forensics of the prefix cache hold and record."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest


@pytest.mark.thorough
@pytest.mark.parametrize(("kind", "mean_tokens"), [("mixed", 900), ("short", 12)])
def test_memory_and_bytes_of_records_stay_within_their_bounds(
    kind: str, mean_tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend("benchmarks")
    monkeypatch.setenv("INFERSCOPE_DIR", str(tmp_path))
    bounds = importlib.import_module("cache_bounds")
    found = bounds.day(kind, hours=2, rate=0.15, seed=3)
    assert found["requests"] == 1080
    assert found["mean_prompt_tokens"] >= mean_tokens
    assert found["ring_bytes_per_request"].keys() == {
        *("CacheLookup", "CacheSample", "PromptLikeness")
    }
    assert 40 < found["ring_bytes_per_request_all"] <= 700
    assert found["peak_mb"] <= 64
    assert (found["ghosts"] > 1000) == (kind == "mixed")
    for hour in found["by_hour"]:
        assert 0 < hour["front_us"]["p10"] <= hour["front_us"]["median"]
        assert 0 < hour["core_us"]["p10"] <= hour["core_us"]["median"]
