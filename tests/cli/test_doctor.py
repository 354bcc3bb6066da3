from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import msgspec
import pytest

from inferscope.adapters.needs.vllm import VLLM
from inferscope.calibration import CACHE_VARIABLE, cpu_name, store
from inferscope.cli.doctor.command import examine
from inferscope.cli.doctor.device import devices, tracing
from inferscope.ring import discovery
from inferscope.ring.discovery import boot_id
from inferscope.ring.layout import MIN_CAPACITY, Identity
from inferscope.ring.writer import RingWriter
from inferscope.sampler.source import has_nvidia
from tests.adapters.engine_source import environment
from tests.cli.namesake import unpack
from tests.cli.running import inferscope
from tests.test_calibration import HERE


@pytest.mark.thorough
def test_every_row_states_whether_it_is_fine_and_each_that_lacks_an_extra_how_to_get_it(
    tmp_path: Path,
) -> None:
    cache = str(tmp_path / "cache")
    done = inferscope("doctor", "--json", rings=tmp_path, INFERSCOPE_CACHE=cache)
    assert done.returncode == 0, done.stderr
    rows = {row["name"]: row for row in json.loads(done.stdout)["checks"]}
    assert all(row["found"] and isinstance(row["is_fine"], bool) for row in rows.values())
    assert "calibrate --device cpu --threads 1" in rows["CPU, 1 thread"]["fix"]
    assert rows["sampler"]["found"] == "not running"
    assert "inferscope sampler" in rows["sampler"]["fix"]
    assert {f"extra {name}" for name in ("reader", "load", "grpc", "gpu")} <= rows.keys()
    for name, row in rows.items():
        if name.startswith("extra") and not row["is_fine"]:
            assert row["fix"].startswith("pip install")


@pytest.mark.skipif(has_nvidia(), reason="for machines without a GPU")
def test_a_machine_without_a_gpu_gets_one_row_and_none_that_a_gpu_would_have() -> None:
    names = [finding.name for finding in devices([], num_threads=[1])]
    assert names == ["CPU, 1 thread", "GPU"]


def test_a_calibrated_cpu_is_fine_for_the_threads_it_was_calibrated_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    store(HERE)
    found = {each.name: each for each in devices([HERE], num_threads=[1, 2])}
    assert not found["CPU, 1 thread"].is_fine
    assert found["CPU, 2 threads"].is_fine
    assert "7 GB/s" in found["CPU, 2 threads"].found
    elsewhere = msgspec.structs.replace(HERE, device=f"not {cpu_name()}")
    assert not next(iter(devices([elsewhere], num_threads=[2]))).is_fine


@pytest.mark.parametrize(
    ("scope", "is_fine", "words"),
    [(0, True, "same user"), (1, False, "children"), (2, False, "root"), (3, False, "no process")],
)
def test_the_kernel_s_rule_on_tracing_is_reported_in_words(
    tmp_path: Path, scope: int, is_fine: bool, words: str
) -> None:
    present, absent = tmp_path / "scope", tmp_path / "absent"
    present.write_text(f"{scope}\n")
    (finding,) = tracing(present, absent)
    assert finding.is_fine is is_fine
    assert words in finding.found
    assert ("sysctl" in finding.fix) is not is_fine


def test_a_kernel_without_the_setting_is_not_guessed_about(tmp_path: Path) -> None:
    assert list(tracing(tmp_path / "no", tmp_path / "nor this")) == []
    (tmp_path / "odd").write_text("perhaps")
    assert list(tracing(tmp_path / "odd", tmp_path / "odd")) == []


def test_the_folders_that_are_searched_are_listed_with_what_is_in_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery, "_TMP", tmp_path)
    monkeypatch.delenv("INFERSCOPE_DIR", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    home = tmp_path / "inferscope" / "engine"
    home.mkdir(parents=True)
    me = Identity("engine", "core", 0, 1, "host", boot_id(), 1, 2)
    ring = RingWriter(home / "core-0-1.ring", me, capacity=MIN_CAPACITY)
    ring.beat(time.monotonic_ns())
    found = [row.found for row in examine() if row.name == "searched"]
    assert found[0].startswith(
        f"{tmp_path / f'inferscope-{os.getuid()}'}: engines: 0 running, 0 ended"
    )
    assert found[0].endswith("probes started with this environment write to it")
    assert f"{tmp_path / 'inferscope'}: engines: 1 running, 0 ended" in found
    ring.close()


@pytest.mark.thorough
def test_the_engines_of_another_environment_are_checked_feature_by_feature(tmp_path: Path) -> None:
    target = "vllm.v1.core.sched.scheduler:Scheduler.set_pause_state"
    python = environment(tmp_path, VLLM, "0.28.0", without=target)
    done = inferscope("doctor", "--json", "--python", python, rings=tmp_path)
    assert done.returncode == 0, done.stderr
    checks = json.loads(done.stdout)["checks"]
    rows = [(row["name"], row["is_fine"], row["found"]) for row in checks]
    (mine,) = (row for row in rows if row[0] == "its Python")
    assert mine[1]
    engine, lack = (row for row in rows if row[0] == "vllm")
    assert engine[1]
    assert engine[2].startswith("0.28.0; observe it with: ")
    assert lack == ("vllm", False, f"unsupported: pauses: {target.replace(':', '.')} is missing")


def test_an_environment_without_inferscope_is_given_the_line_that_installs_it(
    tmp_path: Path,
) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    python.chmod(0o700)
    rows = {row.name: row for row in examine(str(python))}
    assert not rows["its Python"].is_fine
    assert rows["its Python"].fix.endswith(f"{python} -m pip install inferscope-llm")
    assert rows["its engines"].found == "no supported engine is installed there"


@pytest.mark.thorough
def test_the_package_of_another_project_is_named_with_the_lines_that_replace_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(unpack(tmp_path / "site")))
    own = examine()[0]
    assert not own.is_fine
    assert "inferscope 0.1.1 (Python-package for inferscope mlops service)" in own.found
    assert own.fix.endswith("-m pip install inferscope-llm")
    monkeypatch.delenv("PYTHONPATH")
    assert examine()[0].is_fine


def test_a_program_that_no_python_runs_has_no_engines_to_check(tmp_path: Path) -> None:
    done = inferscope("doctor", "--python", "/bin/ls", rings=tmp_path)
    assert done.returncode == 2
    assert "/bin/ls is not a Python program" in done.stderr
