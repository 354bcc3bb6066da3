"""What the screen shows of a run's findings is what the command prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from inferscope.cli.main import main
from inferscope.insight.findings import RunSummarizer, findings
from inferscope.insight.judged_source import JudgedSource
from inferscope.readers.source import catch_up, open_source

SAMPLE = Path(__file__).parents[2] / "samples" / "demo.isr"


@pytest.mark.thorough
def test_a_snapshot_carries_the_findings_of_the_run() -> None:
    watch = RunSummarizer()
    source = JudgedSource(open_source(SAMPLE, sinks=(watch,), listen=watch.on_record), watch)
    source.focus = "chat-0001"
    catch_up(source.source)
    (view,) = source.snapshot(60_000_000_000).engines
    (engine,) = findings(watch)
    assert engine.findings
    assert [(found.id, found.severity) for found in view.findings] == [
        (finding.id, finding.severity) for finding in engine.findings
    ]
    assert source.source.focus == source.focus == "chat-0001"
    source.close()


@pytest.mark.thorough
def test_one_look_prints_the_runs_finding_as_its_problem(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["attach", str(SAMPLE), "--once", "--json"]) == 0
    assert '"findings":[{"id":"' in capsys.readouterr().out.replace(" ", "")
