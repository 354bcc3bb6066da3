"""How examples are drawn, and one headless demo for all tests that read what it leaves."""

from __future__ import annotations

import json
import os

import pytest
from hypothesis import HealthCheck, settings

from tests.cli.running import Run, inferscope

# How long one example takes says something of the machine only. CI draws the same ones each time.
settings.register_profile(
    "inferscope",
    parent=settings.get_profile("ci" if os.environ.get("CI") else "default"),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("inferscope")

# What this machine was calibrated to is no part of any test.
os.environ["INFERSCOPE_CACHE"] = os.devnull


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run the demo for eight seconds."""
    folder = tmp_path_factory.mktemp("demo")
    rings = tmp_path_factory.mktemp("rings")
    done = inferscope(
        "demo", "--headless", "--duration", "8", "--seed", "1", "--json", "--out", str(folder),
        rings=rings, timeout_s=110,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = (folder / "demo.jsonl").read_text(encoding="utf-8").splitlines()
    return Run(folder, rings, json.loads(done.stdout), [json.loads(line) for line in lines])
