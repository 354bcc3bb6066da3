"""A short run of the forensics' cost in the reference engine: what it times is called."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest


@pytest.mark.thorough
def test_each_kind_of_prompt_and_an_evicted_block_have_a_cost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend("benchmarks")
    for name in ("INFERSCOPE_DIR", "INFERSCOPE_RING_MB", "INFERSCOPE_BUDGET"):
        monkeypatch.setenv(name, "")  # the benchmark sets them
    core = importlib.import_module("cache_core")
    out = tmp_path / "cost.json"
    arguments = ["cache_core.py", "--tokens", "640", "--rounds", "2", "--out", str(out)]
    monkeypatch.setattr("sys.argv", arguments)
    assert core.main() == 0
    found = json.loads(out.read_text())
    assert found["engine"] == "reference"
    for name in ("new_us", "hit_us", "evicted_us", "submitted_us"):
        assert 0 < found[name]["min"] <= found[name]["median"]
    assert "median" in found["evicted_block_us"]
