"""Files are whole or not there, whatever happens to who writes them; the fold never waits."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from inferscope.errors import BadInput
from tests.children import child
from tests.cli.running import inferscope
from tests.daemon.running import collecting, engine_by_hand, eventually
from tests.daemon.test_scrape import exported
from tests.exporters.finals import HOUR_S, SECOND_NS, T0_S, look, step
from tests.insight.test_why import SAMPLE

pytest.importorskip(
    "pyarrow", reason='pyarrow is not installed: pip install "inferscope-llm[parquet]"'
)

import pyarrow.parquet as pq
from inferscope_parquet import ParquetExporter, writer
from inferscope_parquet.batches import RowBatch
from inferscope_parquet.folder import Folder
from inferscope_parquet.settings import ParquetSettings

from tests.exporters.parquet.reading import lines, table

ROOT = Path(__file__).parents[3]


def write(folder: Folder, *numbers: int, every_s: float = 1.0) -> None:
    """Write steps into files of their own."""
    steps = [step(number, number * every_s, num_slices=500) for number in numbers]
    folder.write(RowBatch(steps, offset_ns=T0_S * SECOND_NS, ends_files=True))


@pytest.mark.thorough
def test_a_writer_that_is_killed_leaves_whole_files_only(tmp_path: Path) -> None:
    with child(
        [sys.executable, "-m", "tests.exporters.parquet.writing", str(tmp_path)],
        stdout=subprocess.PIPE,
        cwd=ROOT,
    ) as writer:
        assert writer.stdout is not None
        for _ in range(4):
            assert writer.stdout.readline()
    partial = list(tmp_path.rglob("*.partial"))
    assert partial, "it was killed in the middle of a file"
    whole = table(tmp_path, "steps")["step"].to_pylist()
    assert whole == list(range(len(whole)))
    assert len(whole) >= 900
    assert table(tmp_path, "slices").num_rows % 4000 == 0
    Folder(ParquetSettings(tmp_path))
    assert not list(tmp_path.rglob("*.partial"))
    assert table(tmp_path, "steps")["step"].to_pylist() == whole


def test_open_file_is_not_removed_by_other_writers(tmp_path: Path) -> None:
    first = Folder(ParquetSettings(tmp_path))
    first.write(RowBatch([step(0, 0)], offset_ns=T0_S * SECOND_NS))
    Folder(ParquetSettings(tmp_path))
    assert len(list(tmp_path.rglob("*.partial"))) == 2
    first.end_files()
    assert table(tmp_path, "steps").num_rows == 1


@pytest.mark.thorough
def test_a_full_disk_costs_the_files_it_hits(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.exporters.parquet.full_disk", str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    assert done.stdout.splitlines()[0] == "File too large"
    assert done.stdout.splitlines()[1] == str(10 + 10 * 5000)
    assert not list(tmp_path.rglob("*.partial"))
    assert table(tmp_path, "steps")["step"].to_pylist() == [*range(10), *range(20, 30)]
    assert table(tmp_path, "slices").num_rows == 20 * 5000


def test_a_large_file_is_ended(tmp_path: Path) -> None:
    folder = Folder(ParquetSettings(tmp_path, rotate_mb=0.01))
    for number in range(20):
        folder.write(RowBatch([step(number, number, num_slices=9000)], offset_ns=T0_S * SECOND_NS))
    assert len(list(tmp_path.glob("slices/**/*.parquet"))) > 2
    folder.end_files()
    assert table(tmp_path, "slices").num_rows == 20 * 9000


@pytest.mark.thorough
def test_the_oldest_go_when_it_is_too_much(tmp_path: Path) -> None:
    foreign = tmp_path / "steps" / "date=2000-01-01" / "hour=00" / "other-000000-0.parquet"
    foreign.parent.mkdir(parents=True)
    foreign.write_bytes(b"another host's")
    folder = Folder(ParquetSettings(tmp_path, host="mine", max_mb=0.05))
    for number in range(40):
        write(folder, number, every_s=HOUR_S)
    left = table_without(foreign, tmp_path)
    assert left == list(range(40))[-len(left) :]
    assert 1 < len(left) < 40
    num_bytes = sum(path.stat().st_size for path in tmp_path.rglob("mine-*.parquet"))
    assert 0.03e6 < num_bytes <= 0.05e6
    assert foreign.exists()
    hours = [path for path in tmp_path.glob("steps/date=*/hour=*") if path != foreign.parent]
    assert len(hours) == len(left), "empty folders go, too"


def test_old_hours_go(tmp_path: Path) -> None:
    folder = Folder(ParquetSettings(tmp_path, host="mine", keep_hours=5))
    for number in range(20):
        write(folder, number, every_s=HOUR_S)
    assert table(tmp_path, "steps")["step"].to_pylist() == list(range(14, 20))


@pytest.mark.parametrize("is_set_back", [True, False])
def test_a_wall_clock_that_is_set_years_ahead_makes_no_file_old(
    tmp_path: Path, is_set_back: bool
) -> None:
    folder, year_s = Folder(ParquetSettings(tmp_path, host="mine", keep_hours=5)), 365 * 24 * HOUR_S
    for number in range(6):
        is_ahead = number == 2 or (number > 2 and not is_set_back)
        offset_ns = (T0_S + (year_s if is_ahead else 0)) * SECOND_NS
        one = step(number, number, num_slices=5)
        folder.write(RowBatch([one], offset_ns=offset_ns, ends_files=True))
    assert sorted(table(tmp_path, "steps")["step"].to_pylist()) == list(range(6))


def test_a_wall_clock_that_is_set_back_by_years_keeps_what_comes(tmp_path: Path) -> None:
    folder, year_s = Folder(ParquetSettings(tmp_path, host="mine", keep_hours=5)), 365 * 24 * HOUR_S
    for number in range(4):
        offset_ns = (T0_S - (year_s if number > 1 else 0)) * SECOND_NS
        one = step(number, number, num_slices=5)
        folder.write(RowBatch([one], offset_ns=offset_ns, ends_files=True))
    assert {2, 3} <= set(table(tmp_path, "steps")["step"].to_pylist())


def table_without(foreign: Path, folder: Path) -> list[int]:
    files = [path for path in sorted(folder.glob("steps/**/*.parquet")) if path != foreign]
    return [number for file in files for number in pq.ParquetFile(file).read()["step"].to_pylist()]


def opened(folder: Path, **settings: object) -> ParquetExporter:
    """Return an exporter as a collector has it."""
    exporter = ParquetExporter({"folder": str(folder), **settings})
    exporter.open()
    exporter.on_snapshot(look(0))
    return exporter


def test_what_is_old_enough_can_be_read_while_it_goes_on(tmp_path: Path) -> None:
    exporter = opened(tmp_path, rotate_s=10, tables=["steps"])
    exporter.on_step(step(0, 0))
    exporter.on_snapshot(look(9))
    exporter.on_snapshot(look(10))
    eventually(lambda: bool(list(tmp_path.rglob("*.parquet"))))
    exporter.on_step(step(1, 11))
    exporter.close()
    assert table(tmp_path, "steps")["step"].to_pylist() == [0, 1]
    assert [path.name for path in tmp_path.iterdir()] == ["steps"]


def test_the_fold_goes_on_while_the_disk_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write = threading.Event()
    wait_and_write = slowly(Folder.write, may_write)
    monkeypatch.setattr(Folder, "write", wait_and_write)
    exporter = opened(tmp_path, tables=["steps"])
    num_steps = 60
    for number in range(num_steps):
        exporter.on_step(step(number, number, num_slices=20_000))
    assert exporter.num_dropped["queue_full"] > 0
    may_write.set()
    exporter.close()
    written = table(tmp_path, "steps")["step"].to_pylist()
    assert written == sorted(set(written))
    assert exporter.num_dropped == {
        "queue_full": num_steps - len(written),
        "not_written": 0,
        "closed": 0,
    }


def test_the_end_does_not_wait_for_a_disk_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write = threading.Event()
    monkeypatch.setattr(Folder, "write", slowly(Folder.write, may_write))
    monkeypatch.setattr(writer, "_FLUSH_S", 0.1)
    exporter = opened(tmp_path, tables=["steps", "slices"])
    exporter.on_step(step(0, 0, num_slices=7))
    exporter.close()
    assert exporter.num_dropped == {"queue_full": 0, "not_written": 0, "closed": 8}
    may_write.set()


def test_a_disk_that_refuses_costs_rows_that_are_counted(tmp_path: Path) -> None:
    exporter = opened(tmp_path, rotate_s=1, tables=["steps"])
    (tmp_path / "steps").write_bytes(b"where a folder should be")
    exporter.on_step(step(0, 0))
    exporter.on_snapshot(look(2))
    eventually(lambda: exporter.num_dropped["not_written"] == 1)
    (tmp_path / "steps").unlink()
    exporter.on_step(step(1, 3))
    exporter.close()
    assert table(tmp_path, "steps")["step"].to_pylist() == [1]
    assert exporter.num_dropped == {"queue_full": 0, "not_written": 1, "closed": 0}


def slowly(
    write: Callable[[Folder, RowBatch], None], may_write: threading.Event
) -> Callable[[Folder, RowBatch], None]:
    def wait_and_write(folder: Folder, batch: RowBatch) -> None:
        assert may_write.wait(60)
        write(folder, batch)

    return wait_and_write


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({}, "folder is None"),
        ({"folder": "x", "rotate_h": 1}, "Did you mean rotate_s"),
        ({"folder": "x", "tables": ["slice"]}, "requests, steps, slices"),
        ({"folder": "x", "rotate_s": 0}, "rotate_s is 0"),
        ({"folder": "x", "max_mb": True}, "max_mb is True"),
        ({"folder": "x", "host": "../up"}, "host is"),
        ({"folder": "x", "keep_hours": "day"}, "keep_hours is 'day'"),
    ],
)
def test_a_wrong_setting_is_named(settings: dict[str, object], why: str) -> None:
    with pytest.raises(BadInput, match=why):
        ParquetExporter(settings)


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    exporter = ParquetExporter({"folder": str(tmp_path / "file" / "below")})
    with pytest.raises(BadInput, match="Choose another folder"):
        exporter.open()


def test_a_missing_pyarrow_states_what_to_install(tmp_path: Path) -> None:
    missing = "raise ModuleNotFoundError('not here', name='pyarrow')\n"
    (tmp_path / "pyarrow.py").write_text(missing, encoding="utf-8")
    done = inferscope(
        "export", str(SAMPLE), "--format", "parquet", "-o", str(tmp_path / "out"),
        rings=tmp_path, PYTHONPATH=str(tmp_path),
    )  # fmt: skip
    assert done.returncode == 2
    assert 'pip install "inferscope-llm[parquet]"' in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.thorough
def test_a_collectors_files_are_the_export_of_the_same_run(tmp_path: Path) -> None:
    rings, files = tmp_path / "rings", tmp_path / "files"
    config = f"  parquet: {{folder: {files}, host: here}}\npins: off\n"
    with (
        collecting(rings, tmp_path, config) as collector,
        engine_by_hand(rings, "under-test") as engine,
    ):
        engine.do("begin a", "begin b", "go a 5", "go b 3", "go a 4")
        engine.do("end a stop", "end b length")
        eventually(lambda: collector.scrape().total("inferscope_requests_total") == 2)
        engine.do("quit")
        assert collector.stop() == 0
        assert f"parquet: writes requests, steps, slices to {files}" in collector.log()
    exported_rows = exported(rings, tmp_path / "run.jsonl")
    found = lines(files)
    for kind in ("step", "request"):
        assert [r for r in found if r["kind"] == kind] == [
            r for r in exported_rows if r["kind"] == kind
        ]
    rows = table(files, "requests").to_pylist()
    assert {row["host"] for row in rows} == {"here"}
