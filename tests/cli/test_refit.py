from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from inferscope.cli.main import main
from inferscope.cli.why import request_source_of
from inferscope.readers.source import final_books, open_replay, recorded
from inferscope.ring.recording import RecordingWriter
from tests.cost.truth import Truth, traffic
from tests.fold.scripts import MS, Finals, Script, assert_all_closes

pytestmark = pytest.mark.thorough

NUM_STEPS = 120


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a recording of steps whose times follow a made-up device, one request per slice."""
    script = Script()
    core = script.ring()
    truth = Truth(random.Random(3), noise=0.02)
    at_ms = 1.0
    for step, batch in enumerate(traffic(random.Random(3), NUM_STEPS)):
        script.at(at_ms)
        members = [core.queued(f"r{step}-{n}") for n in range(len(batch.context))]
        for index in members:
            core.admitted(index)
        took_ms = truth.step_ns(batch) / MS
        columns = zip(members, batch.tokens.tolist(), batch.context.tolist(), strict=True)
        core.step(step, list(columns), start_ms=at_ms, end_ms=at_ms + took_ms)
        for index in members:
            core.finished(index)
        at_ms += took_ms + 0.5
    path = tmp_path_factory.mktemp("refit") / "run.isr"
    writer = RecordingWriter(path)
    for item in script.items(until_ms=at_ms + 2_000):
        writer.write(recorded(item))
    writer.close()
    return path


def folded(path: Path, *, refit: bool) -> Finals:
    finals = Finals()
    books = final_books(path) if refit else None
    source = open_replay(path, sinks=(finals,), books=books)
    source.advance()
    source.close()
    assert_all_closes(source.collector, finals)
    return finals


def test_refit_prices_every_step_with_one_model_and_labels_it(recording: Path) -> None:
    before, after = (folded(recording, refit=refit) for refit in (False, True))
    assert len({step.fit_id for step in before.steps}) > 5
    assert {step.fit_id for step in after.steps} == {f"refit-eager-{NUM_STEPS}"}
    assert [step.is_provisional for step in before.steps[:64]] == [True] * 64
    assert not any(step.is_provisional for step in after.steps)

    def error(finals: Finals) -> float:
        """Return the median error of the model over the first 64 steps."""
        return sorted(abs(step.model_residual) for step in finals.steps[:64])[32]

    assert error(after) < 0.05
    assert error(after) < 0.5 * error(before)


def test_refit_twice_gives_the_same_digest(recording: Path) -> None:
    digests = []
    for _ in range(2):
        source = open_replay(recording, books=final_books(recording))
        source.advance()
        source.close()
        assert any("refit" in note for note in source.notes())
        digests.append(source.collector.digest())
    assert digests[0] == digests[1]


def test_commands_label_what_they_price_again(
    recording: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.jsonl"
    assert main(["export", str(recording), "--refit", "-o", str(out)]) == 0
    assert "refit" in capsys.readouterr().err
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    steps = [row for row in rows if row["kind"] == "step"]
    assert {row["fit"] for row in steps} == {f"refit-eager-{NUM_STEPS}"}
    assert {row["provisional"] for row in steps} == {False}
    digests = []
    for more in ([], ["--refit"]):
        assert main(["replay", str(recording), "--check", *more]) == 0
        digests.append(capsys.readouterr().out)
    assert digests[0] != digests[1]
    assert main(["shares", str(recording), "--refit", "--json"]) == 0
    assert "refit" in capsys.readouterr().err
    assert main(["findings", str(recording), "--refit", "--json"]) == 0
    assert "refit" in capsys.readouterr().err


def test_a_report_states_that_it_prices_again_and_its_evidence_agrees(
    recording: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pages = {}
    for refit in (False, True):
        target = tmp_path / f"report-{refit}.html"
        more = ["--refit"] if refit else []
        assert main(["report", str(recording), "-o", str(target), *more]) == 0
        pages[refit] = target.read_text(encoding="utf-8")
        assert ("refit: all steps are priced" in capsys.readouterr().err) == refit
    assert f"refit-eager-{NUM_STEPS}" in pages[True]
    assert "refit" not in pages[False]
    assert "priced by the final cost models" in pages[True]
    assert "all steps are priced by the cost models of the whole recording" in pages[True]
    source = request_source_of(str(recording), refit=True)
    slowest = sorted(folded(recording, refit=True).requests, key=lambda each: each.arrived_ns)[:3]
    explained = source.facts_of_run(slowest)
    assert set(explained) == {each.request_id for each in slowest}, "else their ledgers differ"
    before = folded(recording, refit=False).requests
    early = {each.request_id: each.ledger_ns for each in before}
    assert any(early[each.request_id] != each.ledger_ns for each in slowest)


def test_refit_of_a_running_engine_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in ("shares", "report"):
        assert main([verb, "4711", "--refit"]) == 2
        assert "--refit" in capsys.readouterr().err
