"""How examples are drawn, and one headless demo for all tests that read what it leaves."""

from __future__ import annotations

import fcntl
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
    """Run the demo for eight seconds, once for all workers: the first to ask for it does."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder, rings, snapshot = base / "demo", base / "rings", base / "demo.json"
    with (base / "demo.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not snapshot.exists():
            done = inferscope(
                *("demo", "--headless", "--duration", "8", "--seed", "1", "--json"),
                *("--out", str(folder)),
                rings=rings,
                timeout_s=110,
            )
            assert done.returncode == 0, done.stderr
            snapshot.write_text(done.stdout, encoding="utf-8")
    lines = (folder / "demo.jsonl").read_text(encoding="utf-8").splitlines()
    said = json.loads(snapshot.read_text(encoding="utf-8"))
    return Run(folder, rings, said, [json.loads(line) for line in lines])
