"""Files hold what the JSON Lines hold, to the nanosecond, in the hour it belongs to."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path

import pytest
from inferscope_jsonl.exporter import request_row
from msgspec.structs import replace

from inferscope.errors import BadInput
from inferscope.fold.final_records import KvTransfer
from inferscope.readers.source import catch_up, open_source
from inferscope.records import Record, Tick
from tests.cli.running import inferscope
from tests.daemon.test_scrape import exported
from tests.exporters.finals import HOUR_S, T0_S, look, step
from tests.exporters.otlp.conftest import Finals
from tests.insight.test_why import SAMPLE

pytest.importorskip(
    "pyarrow", reason='pyarrow is not installed: pip install "inferscope-llm[parquet]"'
)

import pyarrow.parquet as pq
from inferscope_parquet import FolderExport

from tests.exporters.parquet.reading import lines, table


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the sample, exported by the command line."""
    folder = tmp_path_factory.mktemp("sample")
    target = folder / "demo.parquet"
    done = inferscope(
        "export", str(SAMPLE), "--format", "parquet", "-o", str(target), rings=folder
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == f"wrote {target}\n"
    assert [path.name for path in folder.iterdir()] == ["demo.parquet"]
    return target


@pytest.mark.thorough
def test_every_step_and_request_is_that_of_the_json_lines(sample: Path, tmp_path: Path) -> None:
    rows = exported(SAMPLE, tmp_path / "demo.jsonl")
    rows = [row for row in rows if row["kind"] in ("step", "request")]
    assert sum(row["kind"] == "request" for row in rows) > 10
    found = lines(sample)
    for kind in ("step", "request"):
        assert [r for r in found if r["kind"] == kind] == [r for r in rows if r["kind"] == kind]


@pytest.mark.thorough
def test_dictionaries_are_of_all_but_what_seldom_comes_again(sample: Path) -> None:
    apart = {
        "requests": {"tbt_ns.list.element": "DELTA_BINARY_PACKED"},
        "steps": {},
        "slices": {"request": "PLAIN", "ns": "DELTA_BINARY_PACKED"},
    }
    for name, expected in apart.items():
        files = list((sample / name).rglob("*.parquet"))
        assert files
        for path in files:
            group = pq.read_metadata(path).row_group(0)
            columns = [group.column(at) for at in range(group.num_columns)]
            found = {
                each.path_in_schema: each.encodings
                for each in columns
                if not each.has_dictionary_page and each.physical_type != "BOOLEAN"
            }
            assert found.keys() == expected.keys()
            assert all(expected[path] in encodings for path, encodings in found.items())


@pytest.mark.thorough
def test_the_rows_know_model_and_wall_time(sample: Path) -> None:
    offsets_ns = set[int]()

    def listen(ring: int, record: Record) -> None:
        if isinstance(record, Tick):
            offsets_ns.add(record.real_ns - record.t_ns)

    source = open_source(SAMPLE, listen=listen)
    catch_up(source)
    (engine,) = source.snapshot(1).engines
    source.close()
    assert offsets_ns
    for row in table(sample, "requests").to_pylist():
        assert (row["model"], row["synthetic"]) == (engine.model, engine.is_synthetic)
        for edge in ("arrived", "delivered"):
            difference_ns = round(row[f"{edge}_utc"].timestamp() * 1e6) * 1000 - row[f"{edge}_ns"]
            assert min(abs(difference_ns - offset_ns) for offset_ns in offsets_ns) < 2_000_000


def test_only_the_owner_can_read_them(sample: Path) -> None:
    for path in (sample, *sample.rglob("*")):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600)


def test_rows_stand_in_the_hour_they_belong_to(tmp_path: Path) -> None:
    exporter = FolderExport(tmp_path)
    exporter.on_snapshot(look(0))
    for number in range(30):
        exporter.on_step(step(number, number * HOUR_S / 10))
    exporter.close()
    for name, rows_an_hour in (("steps", 10), ("slices", 20)):
        files = sorted(tmp_path.glob(f"{name}/date=*/hour=*/*.parquet"))
        assert len(files) == 3
        for hour, file in enumerate(files):
            at = datetime.fromtimestamp(T0_S + hour * HOUR_S, timezone.utc)
            assert file.parent.name == f"hour={at:%H}"
            assert file.parent.parent.name == f"date={at:%Y-%m-%d}"
            table_read = pq.ParquetFile(file).read()
            assert table_read.num_rows == rows_an_hour
            assert {each.hour for each in table_read["started_utc"].to_pylist()} == {at.hour}
    assert table(tmp_path, "steps")["step"].to_pylist() == list(range(30))


def test_adapters_and_transfers_are_those_of_the_json_lines(tmp_path: Path) -> None:
    finals = Finals()
    source = open_source(SAMPLE, sinks=(finals,))
    catch_up(source)
    source.close()
    moved = KvTransfer(5, 9, 4096, "10.0.0.7:5600"), KvTransfer(6, 9, 512, "prefill-0", "theirs")
    finished = [
        replace(finals.requests[0], adapter="sql", transfers=moved),
        replace(finals.requests[1], adapter="", transfers=()),
    ]
    exporter = FolderExport(tmp_path)
    exporter.on_snapshot(look(0))
    for request in finished:
        exporter.on_request(request)
    exporter.close()
    rows = table(tmp_path, "requests").to_pylist()
    for row, line in zip(rows, map(request_row, finished), strict=True):
        assert {name: row[name] for name in ("request", "adapter", "transfers")} == {
            name: line[name] for name in ("request", "adapter", "transfers")
        }
    assert rows[0]["transfers"][1]["peer_request"] == "theirs"
    assert (rows[1]["adapter"], rows[1]["transfers"]) == (None, None)


@pytest.mark.thorough
def test_a_request_without_a_ledger_has_nulls_in_place_of_its_maps(tmp_path: Path) -> None:
    finals = Finals()
    source = open_source(SAMPLE, sinks=(finals,))
    catch_up(source)
    source.close()
    missing = replace(finals.requests[1], ledger_missing="core not observed", blame=())
    exporter = FolderExport(tmp_path)
    exporter.on_snapshot(look(0))
    for request in (finals.requests[0], missing, finals.requests[2]):
        exporter.on_request(request)
    exporter.close()
    before, row, after = table(tmp_path, "requests").to_pylist()
    for whole, request in ((before, finals.requests[0]), (after, finals.requests[2])):
        assert dict(whole["ledger_ns"]) == request.ledger_ns
        assert dict(whole["ttft_ledger_ns"]) == request.ttft_ledger_ns
        assert whole["compute_ns"]["prefill"] == request.prefill_ns
        assert whole["ledger_missing"] is None
    assert row["ledger_missing"] == "core not observed"
    for name in ("ledger_ns", "ttft_ledger_ns", "compute_ns", "by_phase", "saved_by_cache"):
        assert row[name] is None
    assert row["first_token_ns"] == missing.first_token_ns


def test_a_clock_that_is_set_holds_from_then_on(tmp_path: Path) -> None:
    exporter = FolderExport(tmp_path)
    exporter.on_step(step(0, 0))  # before anybody knows the time
    exporter.on_snapshot(look(0))
    exporter.on_step(step(1, 1))
    exporter.on_snapshot(look(2, set_by_s=2 * HOUR_S))
    exporter.on_step(step(2, 3))
    exporter.close()
    began = [row["started_utc"].timestamp() - T0_S for row in table(tmp_path, "steps").to_pylist()]
    assert began == [0, 1, 3 + 2 * HOUR_S]


def test_phases_of_a_later_version_are_kept_as_numbers(tmp_path: Path) -> None:
    exporter = FolderExport(tmp_path)
    exporter.on_snapshot(look(0))
    strange = step(0, 0, num_slices=3)
    strange.phases[2] = 9
    exporter.on_step(strange)
    exporter.close()
    assert table(tmp_path, "slices")["phase"].to_pylist() == ["prefill", "decode", "9"]


def test_a_run_without_a_wall_clock_is_refused(tmp_path: Path) -> None:
    exporter = FolderExport(tmp_path)
    exporter.on_step(step(0, 0))
    with pytest.raises(BadInput, match="no wall clock"):
        exporter.close()


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    target = tmp_path / "mine"
    target.mkdir()
    (target / "letter").write_text("dear", encoding="utf-8")
    for out, why in ((str(target), "not an empty folder"), ("-", "writes a folder")):
        done = inferscope(
            "export", str(SAMPLE), "--format", "parquet", "-o", out, rings=tmp_path
        )  # fmt: skip
        assert (done.returncode, done.stdout) == (2, "")
        assert why in done.stderr
    assert [path.name for path in target.iterdir()] == ["letter"]


def test_every_column_is_on_the_page_about_files() -> None:
    from inferscope_parquet.tables import SCHEMAS

    page = (Path(__file__).parents[3] / "docs" / "files.md").read_text(encoding="utf-8")
    names = {field.name for schema in SCHEMAS.values() for field in schema}
    assert {name for name in names if f"`{name}`" not in page and f'"{name}"' not in page} == set()


def test_the_schema_states_its_version(sample: Path) -> None:
    for file in sample.rglob("*.parquet"):
        assert pq.ParquetFile(file).schema_arrow.metadata[b"inferscope.schema"] == b"1"


def test_columns_are_those_of_the_list() -> None:
    """A new one comes at the end of its table; who reads older files finds all others in place."""
    from inferscope_parquet.tables import SCHEMAS

    columns = [f"{name} {field.name} {field.type}" for name in SCHEMAS for field in SCHEMAS[name]]
    listed = Path(__file__).parents[2] / "golden" / "parquet.txt"
    assert columns == listed.read_text(encoding="utf-8").splitlines()
