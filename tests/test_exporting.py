from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from inferscope.errors import BadInput
from inferscope.exporting import (
    exporter_names,
    live_exporter_names,
    load_exporter,
    load_folder_exporter,
    load_live_exporter,
)
from tests.cli.running import Run, inferscope

_THIRD_PARTY = """
import json

class CountingExporter:
    def __init__(self, out):
        self.out, self.steps, self.requests = out, 0, 0
    def on_step(self, step):
        self.steps += 1
    def on_request(self, request):
        self.requests += 1
    def close(self, devices, totals):
        counts = {"steps": self.steps, "requests": self.requests, "records": totals.num_records}
        self.out.write(json.dumps(counts).encode())
"""


def install(folder: Path, name: str, target: str, code: str) -> None:
    """Lay out a package as pip would, with an exporter's entry point."""
    (folder / "third_party.py").write_text(code, encoding="utf-8")
    info = folder / "third_party-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: third-party\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[inferscope.exporters]\n{name} = {target}\n")


def test_ours_are_found_by_entry_point() -> None:
    assert exporter_names() == ["jsonl", "parquet", "perfetto"]


def test_live_ones_are_apart() -> None:
    assert "prometheus" in live_exporter_names()
    assert set(live_exporter_names()) & set(exporter_names()) == {"parquet"}
    with pytest.raises(BadInput, match="inferscope collect"):
        load_exporter("prometheus")
    with pytest.raises(BadInput, match="--format jsonl"):
        load_live_exporter("jsonl")


def test_one_that_writes_a_folder_is_of_both_kinds_and_takes_no_file() -> None:
    assert load_live_exporter("parquet").is_live
    assert load_folder_exporter("parquet") is not None
    assert load_folder_exporter("jsonl") is None
    with pytest.raises(BadInput, match="writes a folder"):
        load_exporter("parquet")


def test_an_unknown_name_lists_those_there_are() -> None:
    with pytest.raises(BadInput, match="jsonl, parquet, perfetto"):
        load_exporter("csv")


@pytest.mark.thorough
def test_a_third_partys_exporter_loads_the_same_way(tmp_path: Path, demo: Run) -> None:
    install(tmp_path, "counting", "third_party:CountingExporter", _THIRD_PARTY)
    done = inferscope(
        "export", str(demo.folder / "demo.isr"), "--format", "counting", "-o", "-",
        rings=tmp_path, PYTHONPATH=str(tmp_path),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    counted = json.loads(done.stdout)
    assert counted["steps"] == len(demo.of_kind("step"))
    assert counted["requests"] == len(demo.of_kind("request"))
    assert counted["records"] == demo.of_kind("run")[0]["records"]


def test_exporter_without_its_extra_names_what_to_install(tmp_path: Path, demo: Run) -> None:
    install(tmp_path, "columns", "third_party:Nothing", "import a_heavy_dependency\n")
    done = inferscope(
        "export", str(demo.folder / "demo.isr"), "--format", "columns", "-o", "-",
        rings=tmp_path, PYTHONPATH=str(tmp_path),
    )  # fmt: skip
    assert done.returncode == 2
    assert "needs a_heavy_dependency" in done.stderr
    assert "Install what third-party says that it needs." in done.stderr
    assert "pip install" not in done.stderr


def test_the_core_loads_no_exporter_by_itself() -> None:
    code = "import sys, inferscope.exporting; print([m for m in sys.modules if 'inferscope_' in m])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
