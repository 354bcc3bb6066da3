"""The GPU evidence kit without a GPU: what runs does, what cannot says why, no part is lost."""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

KIT = Path(__file__).parents[1] / "benchmarks" / "gpu"


def runner() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_kit", KIT / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_all_limits_together_fit_into_nine_minutes() -> None:
    kit = runner()
    assert sum(part.limit_s for part in kit.PARTS.values()) <= kit.MOST_S < 9 * 60
    assert all((KIT / part.program).exists() for part in kit.PARTS.values())
    assert all(part.seconds < part.limit_s for part in kit.PARTS.values())


@pytest.mark.parametrize(
    ("program", "status", "reason"),
    [
        ("import sys; sys.exit(3)", "failed", "left no result"),
        ("import time; time.sleep(60)", "failed", "not done in 1 s"),
        ("import os; os.kill(os.getpid(), 9)", "failed", "ended with -9"),
        (
            "import sys; open(sys.argv[2], 'w').write('{\"status\": \"measured\"}')",
            "measured",
            "",
        ),
    ],
)
def test_a_part_that_breaks_is_told_and_costs_the_others_nothing(
    tmp_path: Path, program: str, status: str, reason: str
) -> None:
    kit = runner()
    path = tmp_path / "part.py"
    path.write_text(program)
    kit.PARTS["x"] = kit.Part(str(path), 1, 1 if "sleep" in program else 20)
    options = argparse.Namespace(out=tmp_path, model="m", device="cuda:0", dry_run=False)
    kit.HERE = tmp_path
    result = kit.run("x", options)
    assert result["status"] == status
    assert reason in result.get("reason", "")


@pytest.mark.slow
def test_a_dry_run_measures_what_a_cpu_can_and_says_what_the_others_need(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            str(KIT / "run.py"),
            "--out",
            str(tmp_path),
            "--parts",
            "g,d",
            "--dry-run",
        ],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    parts = json.loads((tmp_path / "evidence.json").read_text())["parts"]
    assert parts["g"]["status"] == "unmet"
    assert "GPU" in parts["g"]["reason"]
    assert parts["d"]["status"] == "dry"
    assert [row["batch"] for row in parts["d"]["rows"]] == [1, 4]
    table = (tmp_path / "evidence.txt").read_text()
    assert "(g) unmet" in table
    assert "batch 4" in table
