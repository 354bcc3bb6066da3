"""Compaction: every row exists exactly once, despite readers, writers and crashes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from tests.daemon.running import eventually
from tests.exporters.finals import HOUR_S, SECOND_NS, T0_S, step

pytest.importorskip(
    "pyarrow", reason='pyarrow is not installed: pip install "inferscope-llm[parquet]"'
)

import pyarrow as pa
import pyarrow.parquet as pq
from inferscope_parquet import compaction
from inferscope_parquet.batches import RowBatch
from inferscope_parquet.compaction import COMPACTING, Compactor, compact
from inferscope_parquet.exchange import exchange
from inferscope_parquet.folder import Folder
from inferscope_parquet.naming import is_written_by
from inferscope_parquet.settings import ParquetSettings
from inferscope_parquet.tables import SCHEMA_KEY, SCHEMAS

from tests.exporters.parquet.reading import OLDER, table

ROOT = Path(__file__).parents[3]
NUM = 6
HOUR = "date=*/hour=*"


def write(folder: Folder, *numbers: int, hour: float = 0.0) -> None:
    """Write steps into files of their own, a minute after the hour and after each other."""
    for number in numbers:
        at_s = hour * HOUR_S + 60 * number
        folder.write(
            RowBatch(
                [step(number, at_s, num_slices=50)], offset_ns=T0_S * SECOND_NS, ends_files=True
            )
        )


def files(folder: Path, name: str = "steps") -> list[Path]:
    return sorted(folder.glob(f"{name}/{HOUR}/*.parquet"))


def numbers(folder: Path) -> list[int]:
    """Return the steps that a reader of the folder finds, in their order in the files."""
    return [int(number) for number in table(folder, "steps")["step"].to_pylist()]


def the_hour(folder: Path) -> Path:
    (hour,) = folder.glob(f"steps/{HOUR}")
    return hour


def test_an_hour_that_is_over_is_one_file_a_table(tmp_path: Path) -> None:
    settings = ParquetSettings(tmp_path, host="mine", tables=("steps", "slices"))
    compactor = Compactor(settings)
    folder = Folder(settings, compactor=compactor)
    write(folder, *range(NUM))
    before = table(tmp_path, "slices")
    assert len(files(tmp_path)) == NUM, "the hour may have more to come"
    write(folder, NUM, hour=1)
    eventually(lambda: len(files(tmp_path)) == len(files(tmp_path, "slices")) == 2)
    eventually(lambda: not (tmp_path / COMPACTING).exists())
    assert numbers(tmp_path) == list(range(NUM + 1))
    assert table(tmp_path, "slices").slice(0, before.num_rows).equals(before)
    merged = files(tmp_path)[0]
    assert is_written_by(merged.name, "mine")
    assert pq.ParquetFile(merged).num_row_groups == 1
    assert merged.stat().st_mode & 0o777 == 0o600
    # What comes late joins it.
    write(folder, NUM - 1)
    assert len(files(tmp_path)) == 3
    write(folder, NUM + 1, hour=1)
    eventually(lambda: len(files(tmp_path)) == 3)
    assert len(table(tmp_path, "steps")) == NUM + 3
    folder.close()
    write(folder, *range(3), hour=2)
    assert len(files(tmp_path)) == 6, "it is closed"


def test_only_what_is_small_and_ours_and_understood_is_merged(tmp_path: Path) -> None:
    settings = ParquetSettings(tmp_path, host="mine", tables=("steps",), rotate_mb=0.05)
    write(Folder(settings), *range(NUM))
    write(Folder(ParquetSettings(tmp_path, host="mine-too", tables=("steps",))), 10, 11)
    hour = the_hour(tmp_path)
    large, newer, damaged, odd = (
        hour / f"mine-000{number}00-0123456{number}.parquet" for number in range(1, 5)
    )
    rows = pq.ParquetFile(files(tmp_path)[0]).read()
    padding = pa.array([os.urandom(30_000).hex()])
    pq.write_table(rows.append_column("more", padding), large, compression="none")
    pq.write_table(rows.append_column("more", pa.array([1])), newer)
    damaged.write_bytes(b"PAR1")
    pq.write_table(pa.table({"step": [1]}), odd)
    kept = {path: path.read_bytes() for path in (large, newer, damaged, odd)}
    assert compact(hour, "steps", settings)
    assert {path: path.read_bytes() for path in kept} == kept
    ours = [
        path for path in files(tmp_path) if is_written_by(path.name, "mine") and path not in kept
    ]
    assert len(ours) == 1
    assert pq.ParquetFile(ours[0]).read()["step"].to_pylist() == list(range(NUM))
    assert sum(is_written_by(path.name, "mine-too") for path in files(tmp_path)) == 2
    assert not compact(hour, "steps", settings)


def test_files_of_a_release_with_fewer_columns_are_filled_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ParquetSettings(tmp_path, host="mine", tables=("steps",))
    write(Folder(settings), 0, 1)
    later = SCHEMAS["steps"].append(pa.field("later", pa.int64()))
    monkeypatch.setitem(SCHEMAS, "steps", later)
    assert compact(the_hour(tmp_path), "steps", settings)
    (path,) = files(tmp_path)
    assert pq.ParquetFile(path).read()["later"].to_pylist() == [None, None]


def test_files_of_an_earlier_release_are_merged_with_those_of_this_one(tmp_path: Path) -> None:
    (older,) = (OLDER / "slices").rglob("*.parquet")
    before = pq.ParquetFile(older).read()
    write(Folder(settings := ParquetSettings(tmp_path, host="mine", tables=("slices",))), 0)
    (path,) = files(tmp_path, "slices")
    new = pq.ParquetFile(path).read()
    shutil.copy(older, path.with_name("mine-000000-00000000.parquet"))
    assert compact(path.parent, "slices", settings)
    (merged,) = files(tmp_path, "slices")
    table = pq.ParquetFile(merged).read()
    assert table.schema.equals(SCHEMAS["slices"])
    assert table["ns"].to_pylist() == before["ns"].to_pylist() + new["ns"].to_pylist()
    assert table["synthetic"].to_pylist() == [None] * len(before) + new["synthetic"].to_pylist()


def test_merged_files_are_bounded(tmp_path: Path) -> None:
    settings = ParquetSettings(tmp_path, host="mine", tables=("slices",))
    write(Folder(settings), *range(20))
    largest = max(path.stat().st_size for path in files(tmp_path, "slices"))
    small = ParquetSettings(tmp_path, host="mine", tables=("slices",), rotate_mb=4 * largest / 1e6)
    (hour,) = tmp_path.glob(f"slices/{HOUR}")
    assert compact(hour, "slices", small)
    assert 5 <= len(files(tmp_path, "slices")) <= 7
    assert table(tmp_path, "slices").num_rows == 20 * 50


@pytest.mark.thorough
def test_a_crash_at_any_point_leaves_every_row_once(tmp_path: Path) -> None:
    template = tmp_path / "template"
    settings = ParquetSettings(template, host="mine", tables=("steps",))
    write(Folder(settings), *range(3))
    write(Folder(ParquetSettings(template, host="other", tables=("steps",))), 3)
    copies = tmp_path / "copies"
    words = [sys.executable, "-m", "tests.exporters.parquet.compacting", template, copies]
    subprocess.run(words, cwd=ROOT, check=True)
    num_copies = len(list(copies.iterdir()))
    assert num_copies > 12, "there is more to it"
    outcomes = list[int]()
    for number in range(1, num_copies + 1):
        folder = copies / str(number)
        assert sorted(numbers(folder)) == [0, 1, 2, 3]
        outcomes.append(len(files(folder)))
        again = ParquetSettings(folder, host="mine", tables=("steps",))
        Folder(again)
        assert not (folder / COMPACTING).exists()
        compact(the_hour(folder), "steps", again)
        assert len(files(folder)) == 2
        assert sorted(numbers(folder)) == [0, 1, 2, 3]
    assert set(outcomes) == {4, 2}, "before and after, and nothing between"
    assert outcomes == sorted(outcomes, reverse=True)


def test_concurrent_writer_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ParquetSettings(tmp_path, host="mine", tables=("steps",))
    mine = Folder(settings)
    other = Folder(ParquetSettings(tmp_path, host="other", tables=("steps",)))
    write(mine, 0, 1)
    hour = the_hour(tmp_path)
    before_exchange: list[Callable[[], None]] = []
    merge = compaction._merge

    def merge_and(*arguments: object) -> None:
        merge(*arguments)  # type: ignore[arg-type]
        for each in before_exchange:
            each()

    monkeypatch.setattr(compaction, "_merge", merge_and)
    unfinished = RowBatch([step(2, 120)], offset_ns=T0_S * SECOND_NS)
    before_exchange[:] = [lambda: other.write(unfinished)]
    assert not compact(hour, "steps", settings), "a file is being written there"
    before_exchange[:] = []
    assert not compact(hour, "steps", settings)
    other.end_files()
    before_exchange[:] = [lambda: write(other, 3)]
    assert not compact(hour, "steps", settings), "a file came that is not in what was merged"
    before_exchange[:] = [lambda: min(hour.glob("other-*")).unlink()]
    with pytest.raises(FileNotFoundError):
        compact(hour, "steps", settings)
    assert sorted(numbers(tmp_path)) == [0, 1, 3]
    before_exchange[:] = []
    assert compact(hour, "steps", settings)
    assert sorted(numbers(tmp_path)) == [0, 1, 3]
    write(mine, 4)
    assert sorted(numbers(tmp_path)) == [0, 1, 3, 4]
    assert not list(tmp_path.rglob("*.partial"))


def test_a_file_system_without_exchange_keeps_small_files_and_reports_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(one: Path, other: Path) -> None:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(compaction, "exchange", refuse)
    settings = ParquetSettings(tmp_path, host="mine", tables=("steps",))
    folder = Folder(settings, compactor=Compactor(settings))
    write(folder, *range(NUM))
    for number in range(3):
        write(folder, NUM + number, hour=1 + number)
    eventually(lambda: bool(caplog.records))
    folder.close()
    assert len(caplog.records) == 1
    assert "small files stay" in caplog.text
    assert len(files(tmp_path)) == NUM + 3
    assert not (tmp_path / COMPACTING).exists()


def test_a_damaged_file_keeps_its_own_hour_from_being_merged_and_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = ParquetSettings(tmp_path, host="mine", tables=("steps",))
    compactor = Compactor(settings)
    folder = Folder(settings, compactor=compactor)
    write(folder, 0, 1)
    damaged, _ = files(tmp_path)
    content = bytearray(damaged.read_bytes())
    footer_at = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    content[4:footer_at] = bytes(footer_at - 4)  # its columns, not its schema
    damaged.write_bytes(content)
    pq.read_schema(damaged)
    for hour in (1, 2, 3):
        write(folder, 2 * hour, 2 * hour + 1, hour=hour)
    eventually(lambda: len(files(tmp_path)) == 6)
    eventually(lambda: bool(caplog.records))
    write(folder, 8, hour=4)
    eventually(lambda: len(files(tmp_path)) == 6)
    folder.close()
    assert damaged.exists()
    assert damaged.read_bytes() == content
    assert [record.getMessage().count("small files stay for now") for record in caplog.records] == [
        1
    ]


def test_files_of_a_release_in_which_columns_mean_something_else_are_left_alone(
    tmp_path: Path,
) -> None:
    settings = ParquetSettings(tmp_path, host="mine", tables=("steps",))
    write(Folder(settings), *range(4))
    others = files(tmp_path)[:2]
    for path in others:
        rows = pq.ParquetFile(path).read()
        pq.write_table(rows.replace_schema_metadata({SCHEMA_KEY: "2"}), path)
    kept = [path.read_bytes() for path in others]
    assert compact(the_hour(tmp_path), "steps", settings)
    assert [path.read_bytes() for path in others] == kept
    assert len(files(tmp_path)) == 3
    assert numbers(tmp_path) == list(range(4))


def test_folders_that_cannot_change_places_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        exchange(tmp_path, tmp_path / "none")


@pytest.mark.thorough
def test_concurrent_reader_gets_the_right_sum_or_an_error(tmp_path: Path) -> None:
    duckdb = pytest.importorskip("duckdb", reason="duckdb is not installed")
    settings = ParquetSettings(tmp_path, host="mine", tables=("steps",))
    folder = Folder(settings)
    query = f"SELECT count(*), sum(step) FROM read_parquet('{tmp_path}/steps/*/*/*.parquet')"
    is_over, answers = threading.Event(), list[tuple[int, int]]()

    def ask() -> None:
        connection = duckdb.connect()
        while not is_over.is_set():
            # A file's name may be found, and the file be gone then.
            with suppress(duckdb.IOException):
                answers.append(connection.execute(query).fetchone())

    write(folder, *range(NUM))
    asking = threading.Thread(target=ask)
    asking.start()
    try:
        for turn in range(30):
            assert compact(the_hour(tmp_path), "steps", settings)
            (merged,) = files(tmp_path)
            rows = pq.ParquetFile(merged).read()
            # Apart again, in one step as well: as it was.
            apart = tmp_path / "apart"
            apart.mkdir()
            for number in range(NUM):
                name = f"mine-000{number}00-{turn:08x}.parquet"
                pq.write_table(rows.slice(number, 1), apart / name)
            exchange(apart, the_hour(tmp_path))
            shutil.rmtree(apart)
        num_before = len(answers)
        eventually(lambda: len(answers) > num_before)
    finally:
        is_over.set()
        asking.join()
    assert set(answers) == {(NUM, sum(range(NUM)))}
