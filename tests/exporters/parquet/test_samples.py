"""The questions in samples/duckdb can be asked, and their answers agree with the export."""

from __future__ import annotations

import shutil
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from inferscope.fold.final_records import FinalRequest, FinalStep
from inferscope.readers.source import catch_up, open_source
from tests.cli.running import inferscope
from tests.daemon.test_scrape import exported
from tests.exporters.finals import look, step
from tests.insight.test_why import SAMPLE

pytest.importorskip("duckdb", reason="duckdb is not installed")
pytest.importorskip(
    "pyarrow", reason='pyarrow is not installed: pip install "inferscope-llm[parquet]"'
)

import duckdb
import pyarrow.parquet as pq
from inferscope_parquet import FolderExport
from inferscope_parquet.tables import SCHEMAS

from tests.exporters.parquet.reading import OLDER

QUESTIONS = sorted((SAMPLE.parent / "duckdb").glob("*.sql"))
Row = dict[str, Any]


@dataclass
class Requests:
    """A sink that keeps requests."""

    finished: list[FinalRequest] = field(default_factory=list)

    def on_step(self, step: FinalStep) -> None:
        """Leave a step be."""

    def on_request(self, request: FinalRequest) -> None:
        """Keep a request that is known from its beginning."""
        if not request.joined_late:
            self.finished.append(request)


@dataclass(frozen=True)
class Asked:
    """The sample as JSON Lines, and what its Parquet files answer, by question."""

    lines: list[dict[str, Any]]
    answers: dict[str, list[Row]]
    folder: Path
    """Columns of the files."""

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        """Return the lines of one kind."""
        return [line for line in self.lines if line["kind"] == kind]


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Asked:
    """Ask all questions, where the command line has left demo.parquet."""
    folder = tmp_path_factory.mktemp("asked")
    target = folder / "demo.parquet"
    done = inferscope("export", str(SAMPLE), "--format", "parquet", "-o", str(target), rings=folder)
    assert done.returncode == 0, done.stderr
    return Asked(exported(SAMPLE, folder / "demo.jsonl"), answers(folder), target)


def answers(folder: Path) -> dict[str, list[Row]]:
    """Ask all questions of the demo.parquet in a folder."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for question in QUESTIONS:
            answer = duckdb.sql(question.read_text(encoding="utf-8"))
            rows = answer.fetchall()
            found[question.stem] = [dict(zip(answer.columns, r, strict=True)) for r in rows]
    return found


@pytest.mark.thorough
def test_every_question_is_known_here(asked: Asked) -> None:
    assert set(asked.answers) == {
        "causes",
        "conservation",
        "neighbours",
        "phases",
        "slow_requests",
        "tenants",
    }


@pytest.mark.thorough
def test_everything_adds_up(asked: Asked) -> None:
    assert asked.answers["conservation"] == []


@pytest.mark.thorough
def test_what_does_not_add_up_is_found(asked: Asked, tmp_path: Path) -> None:
    question = next(each for each in QUESTIONS if each.stem == "conservation")
    target = tmp_path / "demo.parquet"
    exporter = FolderExport(target)
    exporter.on_snapshot(look(0))
    exporter.on_step(step(0, 0))
    exporter.on_step(replace(step(1, 1), padding_ns=7))
    requests = Requests()
    source = open_source(SAMPLE, sinks=(requests,))
    catch_up(source)
    source.close()
    whole, other = requests.finished[:2]
    exporter.on_request(whole)
    exporter.on_request(replace(other, delivered_ns=other.delivered_ns + 5))
    exporter.close()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        found = duckdb.sql(question.read_text(encoding="utf-8")).fetchall()
    assert sorted(found) == [
        ("request", other.engine_id, other.request_id, -5),
        ("step", "engine", "1", 7),
    ]


def test_causes_are_the_ledgers_summed(asked: Asked) -> None:
    ns = Counter[str]()
    for line in asked.of_kind("request"):
        if not line["joined_late"]:
            ns.update(line["ledger_ns"])
    found = {row["cause"]: row["seconds"] for row in asked.answers["causes"]}
    assert found == pytest.approx({cause: each / 1e9 for cause, each in ns.items() if each})
    assert sum(row["percent"] for row in asked.answers["causes"]) == pytest.approx(100, abs=1)


def test_phases_are_the_shares_summed(asked: Asked) -> None:
    ns, tokens = Counter[str](), Counter[str]()
    for line in asked.of_kind("step"):
        for share in line["shares"]:
            phase = "prefill" if share["phase"] == "prefill" else "decode"
            ns[phase] += share["ns"]
            tokens[phase] += share["tokens"]
    found = Counter[str]()
    for row in asked.answers["phases"]:
        found[row["phase"]] += row["device_seconds"]
        tokens[row["phase"]] -= row["tokens"]
    assert found == pytest.approx({phase: each / 1e9 for phase, each in ns.items()})
    assert not any(tokens.values())


def test_latest_first_tokens_are_listed_latest_first(asked: Asked) -> None:
    requests = [line for line in asked.of_kind("request") if not line["joined_late"]]
    waited = sorted(
        ((line["first_token_ns"] - line["arrived_ns"]) / 1e6, line) for line in requests
        if line["first_token_ns"] is not None
    )  # fmt: skip
    found = asked.answers["slow_requests"]
    assert [row["ttft_ms"] for row in found] == [ms for ms, _ in reversed(waited[-10:])]
    for row, (_, line) in zip(found, reversed(waited[-10:]), strict=True):
        causes = line["ttft_ledger_ns"]
        assert causes[row["mostly"]] == max(causes.values())


def test_tenants_sum_to_the_requests(asked: Asked) -> None:
    requests = asked.of_kind("request")
    for column in ("prompt_tokens", "cached_tokens", "output_tokens"):
        total = sum(row[column] for row in asked.answers["tenants"])
        assert total == sum(line[column] for line in requests)
    seconds = sum(sum(line["compute_ns"].values()) for line in requests) / 1e9
    assert sum(r["device_seconds"] for r in asked.answers["tenants"]) == pytest.approx(seconds)


def test_steps_with_decodes_are_each_in_one_row(asked: Asked) -> None:
    num = sum(
        any(share["phase"] != "prefill" for share in line["shares"]) and not line["cold"]
        for line in asked.of_kind("step")
    )
    assert sum(row["steps"] for row in asked.answers["neighbours"]) == num > 0


def total(rows: list[Row], by: tuple[str, ...], *columns: str) -> dict[tuple[Any, ...], list[Any]]:
    """Return the sums of columns."""
    found: dict[tuple[Any, ...], list[Any]] = {}
    for row in rows:
        sums = found.setdefault(tuple(row[name] for name in by), [0] * len(columns))
        for at, name in enumerate(columns):
            sums[at] += row[name]
    return found


def test_files_of_an_earlier_release_are_queried_with_current_ones(
    asked: Asked, tmp_path: Path
) -> None:
    for name in ("old", "both"):
        shutil.copytree(OLDER, tmp_path / name / "demo.parquet")
    shutil.copytree(asked.folder, tmp_path / "both" / "demo.parquet", dirs_exist_ok=True)
    old, both = (answers(tmp_path / name) for name in ("old", "both"))
    for question, by, columns in (
        ("causes", ("cause",), ("seconds",)),
        ("neighbours", ("beside",), ("steps",)),
        ("phases", ("date", "hour", "phase"), ("device_seconds", "tokens")),
        ("tenants", ("model", "tenant"), ("requests", "output_tokens", "device_seconds")),
    ):
        apart = total(old[question] + asked.answers[question], by, *columns)
        together = total(both[question], by, *columns)
        assert together.keys() == apart.keys()
        assert all(together[key] == pytest.approx(apart[key]) for key in apart), question
        assert old[question]
    assert both["conservation"] == old["conservation"] == []
    latest = sorted(
        old["slow_requests"] + asked.answers["slow_requests"], key=lambda row: -row["ttft_ms"]
    )
    assert both["slow_requests"] == latest[:10]


def test_the_older_files_lack_what_came_since() -> None:
    for name, lacks in (
        (
            "requests",
            ("adapter", "transfers", "ledger_missing", "partial", "cache", "conversation"),
        ),
        ("steps", ("provisional", "bounded_ns")),
        ("slices", ("synthetic",)),
    ):
        (file,) = (OLDER / name).rglob("*.parquet")
        names = pq.read_schema(file).names
        assert [*names, *lacks] == SCHEMAS[name].names
