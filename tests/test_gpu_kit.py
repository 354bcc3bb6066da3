"""The GPU evidence kit without a GPU: parts run or report why not, and none is lost."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from inferscope.sampler.cupti.library import PROFILERS

KIT = Path(__file__).parents[1] / "benchmarks" / "gpu"


def runner() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_kit", KIT / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_parts_that_are_all_late_and_slow_to_end_fit_into_ten_minutes() -> None:
    kit = runner()
    ending_s = sum(wait_s for _, wait_s in kit._ENDING)
    parts = [kit.WARM, *kit.PARTS.values()]
    assert sum(part.limit_s + ending_s for part in parts) < 10 * 60
    assert all((KIT / part.program).exists() for part in parts)
    assert all(part.seconds < part.limit_s for part in parts)


def test_the_order_is_that_in_which_answers_unblock_others() -> None:
    assert list(runner().PARTS) == ["a", "b", "c", "d", "e", "f", "g", "h"]


BANKED = (
    "import json, sys, time\n"
    "row = {'status': 'unfinished', 'rows': {'first': 1}, 'lines': ['first: 1']}\n"
    "open(sys.argv[2], 'w').write(json.dumps(row))\n"
)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("program", "status", "reason"),
    [
        ("import sys; sys.exit(3)", "failed", "ended with 3 and left no result"),
        ("import time; time.sleep(60)", "failed", "not done in 2 s and left no result"),
        ("import os; os.kill(os.getpid(), 9)", "failed", "ended with -9"),
        (f"{BANKED}time.sleep(60)", "failed", "not done in 2 s; the rows before that stand"),
        (f"{BANKED}sys.exit(5)", "failed", "ended with 5; the rows before that stand"),
        (
            "import sys; open(sys.argv[2], 'w').write('{\"status\": \"measured\"}')",
            "measured",
            "",
        ),
    ],
)
def test_failed_part_is_reported_and_others_still_run(
    tmp_path: Path, program: str, status: str, reason: str
) -> None:
    result = ran(runner(), tmp_path, program, 2 if "sleep" in program else 20)
    assert result["status"] == status
    assert reason in result.get("reason", "")
    assert ("rows" in result) is (BANKED in program)
    assert not list(tmp_path.glob("*.json"))  # what it left is taken over


def ran(
    kit: ModuleType, folder: Path, program: str, limit_s: int, *, despite: tuple[str, ...] = ()
) -> dict[str, Any]:
    path = folder / "part.py"
    path.write_text(program)
    kit.PARTS["x"] = kit.Part(str(path), 1, limit_s)
    options = argparse.Namespace(
        out=folder, model="m", device="cuda:0", dry_run=False, pm_despite=despite
    )
    result: dict[str, Any] = kit.run("x", options)
    return result


def test_programs_that_hold_no_counters_are_named_to_every_part(tmp_path: Path) -> None:
    kit = runner()
    assert kit.PROFILERS == PROFILERS
    program = (
        "import json, sys\n"
        "result = {'status': 'measured', 'lines': sys.argv}\n"
        "open(sys.argv[2], 'w').write(json.dumps(result))\n"
    )
    words = ran(kit, tmp_path, program, 20, despite=("nv-hostengine", "dcgm-exporter"))["lines"]
    assert words[-4:] == ["--pm-despite", "nv-hostengine", "--pm-despite", "dcgm-exporter"]


@pytest.mark.thorough
@pytest.mark.parametrize("ending", ["", "time.sleep(60)"])
def test_nothing_that_a_part_has_started_outlives_it(tmp_path: Path, ending: str) -> None:
    stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
    pid_path = tmp_path / "pid"
    program = (
        "import pathlib, subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-c', {stubborn!r}])\n"
        f"pathlib.Path({str(pid_path)!r}).write_text(str(child.pid))\n{ending}\n"
    )
    kit = runner()
    kit._ENDING = ((signal.SIGTERM, 0.5), (signal.SIGKILL, 2.0))
    ran(kit, tmp_path, program, 3)
    state = Path(f"/proc/{pid_path.read_text()}/stat")
    assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"


def test_the_table_is_there_after_every_part_and_nothing_else_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kit, out = runner(), tmp_path / "out"
    first = "import json, sys; result = {'status': 'measured', 'lines': ['one line']}\n"
    second = (
        "import json, pathlib, sys\n"
        "left = pathlib.Path(sys.argv[2])\n"
        "result = {'status': 'measured', 'lines': sorted(p.name for p in left.parent.iterdir())}\n"
    )
    for name, program in (("x", first), ("y", second)):
        path = tmp_path / f"{name}.py"
        path.write_text(f"{program}open(sys.argv[2], 'w').write(json.dumps(result))\n")
        kit.PARTS[name] = kit.Part(path.name, 1, 20)
    monkeypatch.setattr(kit, "HERE", tmp_path)
    (tmp_path / "warm.py").write_text("print('warm')\n")
    monkeypatch.setattr(sys, "argv", ["run.py", "--out", str(out), "--parts", "x,y"])
    assert kit.main() == 0
    names = ["evidence.json", "evidence.txt"]
    assert json.loads((out / "evidence.json").read_text())["parts"]["y"]["lines"] == names
    assert sorted(path.name for path in out.iterdir()) == names
    content = json.loads((out / "evidence.json").read_text())
    assert content["uname_r"] == os.uname().release
    assert content["warm"]["ended"] == "ended with 0"
    table = (out / "evidence.txt").read_text()
    assert "(x) measured\n    one line\n(y) measured" in table
    assert table in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_a_dry_run_measures_what_a_cpu_can_and_states_what_the_others_need(tmp_path: Path) -> None:
    command = [sys.executable, str(KIT / "run.py"), "--out", str(tmp_path), "--dry-run"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=480, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    parts = json.loads((tmp_path / "evidence.json").read_text())["parts"]
    for name in "bcg":
        assert (parts[name]["status"], parts[name]["reason"]) == ("unmet", "needs an NVIDIA GPU")
    assert [parts[name]["status"] for name in "adef"] == ["dry"] * 4
    assert parts["a"]["reason"] == "needs an NVIDIA GPU"
    assert list(parts["a"]["rows"]) == ["facts"]
    assert list(parts["d"]["rows"]) == ["batch 1", "batch 4"]
    assert {"ceilings", "decode 4", "prefill 64", "transformers 4"} <= parts["e"]["rows"].keys()
    assert parts["e"]["rows"]["transformers 4"]["over_engine"] > 0
    assert parts["f"]["rows"]["score"]["num_steps"] >= 1
    assert set(parts["f"]["rows"]["score"]["misallocated"]) == {"fair", "tokens", "equal"}
    table = (tmp_path / "evidence.txt").read_text()
    assert "(g) unmet: needs an NVIDIA GPU" in table
    assert "batch 4: step" in table
