"""Findings of a run, and why a request missed its objectives, as a user asks for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.running import inferscope
from tests.cli.test_bad_input import one_line
from tests.insight.test_why import SAMPLE


def engines(*asked: str, rings: Path) -> list[dict[str, Any]]:
    """Return what is found, by engine."""
    done = inferscope(*asked, "--json", rings=rings)
    found: list[dict[str, Any]] = json.loads(done.stdout)["engines"]
    return found


@pytest.mark.thorough
def test_a_recording_is_judged_in_sentences_and_in_json(tmp_path: Path) -> None:
    report = inferscope("findings", str(SAMPLE), "--ascii", rings=tmp_path)
    assert (report.returncode, report.stderr) == (0, "")
    assert report.stdout.isascii()
    assert max(map(len, report.stdout.splitlines())) <= 100
    assert "102 finished requests" in report.stdout
    assert "First-order and modelled" in report.stdout
    (engine,) = engines("findings", str(SAMPLE), rings=tmp_path)
    assert engine["num_requests"] == 102
    titles = [finding["title"] for finding in engine["findings"]]
    assert all(title in report.stdout for title in titles)
    words = " ".join(report.stdout.split())
    numbers = [number for finding in engine["findings"] for number in finding["evidence"]]
    modelled = [number["name"] for number in numbers if number["provenance"] == "modelled"]
    assert modelled
    assert all(name in words for name in modelled)
    assert all(
        {"id", "severity", "lost_share", "sentences", "evidence", "try", "counterfactual"}
        <= finding.keys()
        for finding in engine["findings"]
    )
    apart = engine["disaggregation"]
    assert apart["tbt_without_interference"]["mean_ns"] < apart["tbt"]["mean_ns"]


@pytest.mark.thorough
def test_missed_objectives_are_listed_with_the_findings(tmp_path: Path) -> None:
    slo = tmp_path / "slo.yaml"
    slo.write_text(
        "slos:\n"
        "  - {metric: ttft, threshold: 300ms, objective: 99%, window: 30d}\n"
        "  - {metric: availability, objective: 99%, window: 30d}\n"
        "  - {metric: e2e, threshold: 1s, objective: 1%, window: 30d, model: another}\n",
        encoding="utf-8",
    )
    asked = ("findings", str(SAMPLE), "--slo", str(slo))
    (engine,) = engines(*asked, rings=tmp_path)
    checked = inferscope("slo", "check", str(slo), str(SAMPLE), "--json", rings=tmp_path)
    assert engine["objectives"] == json.loads(checked.stdout)["engines"][0]["counts"]
    ttft, availability = engine["objectives"]
    missed, *others = engine["findings"]
    assert (missed["id"], missed["severity"]) == ("objective_missed", "high")
    assert missed["objective"]["slo"] == "ttft"
    assert missed["objective"]["num_bad"] == ttft["num_bad"] > 10
    allowed = 0.01 * (ttft["num_good"] + ttft["num_bad"])
    assert missed["objective"]["burn"] == pytest.approx(ttft["num_bad"] / allowed)
    assert 0 < missed["lost_share"] < 1
    evidence = {number["name"]: number["value"] for number in missed["evidence"]}
    assert evidence["top_cause_requests"] == max(ttft["causes"].values())
    assert ttft["causes"][evidence["top_cause"]] == evidence["top_cause_requests"]
    assert 0 < evidence["would_have_passed_without_top_cause"] <= ttft["num_bad"]
    assert availability["num_bad"] == 0
    (without,) = engines(*asked[:2], rings=tmp_path)
    assert others == without["findings"]
    assert without["objectives"] is None
    report = inferscope(*asked, "--ascii", rings=tmp_path)
    assert (report.returncode, report.stderr) == (0, "")
    assert report.stdout.isascii()
    assert "The objective ttft is missed [high: " in report.stdout
    assert "    availability: 100.00% of 102 good" in report.stdout.splitlines()
    worst = evidence["worst_request"]
    assert f"inferscope why {worst} --slo FILE" in " ".join(report.stdout.split())
    why = inferscope("why", worst, str(SAMPLE), "--slo", str(slo), rings=tmp_path)
    assert "It missed TTFT 300.0 ms" in why.stdout


@pytest.mark.thorough
def test_objectives_that_are_kept_are_no_finding(tmp_path: Path) -> None:
    slo = tmp_path / "slo.yaml"
    slo.write_text(
        "slos:\n  - {metric: ttft, threshold: 1h, objective: 99%, window: 30d}\n", encoding="utf-8"
    )
    output = inferscope("findings", str(SAMPLE), "--slo", str(slo), rings=tmp_path).stdout
    assert "    ttft: 100.00% of " in output
    assert "is missed" not in output
    slo.write_text(
        "slos:\n  - {metric: tpot, threshold: 1ms, objective: 99%, window: 1d, model: other}\n",
        encoding="utf-8",
    )
    output = inferscope("findings", str(SAMPLE), "--slo", str(slo), rings=tmp_path).stdout
    assert "No objective is in force for its model." in output
    slo.write_text("slos: 3\n", encoding="utf-8")
    assert str(slo) in one_line("findings", str(SAMPLE), "--slo", str(slo), rings=tmp_path, code=2)


def test_what_cannot_be_judged_is_one_line(tmp_path: Path) -> None:
    missing = str(tmp_path / "none.isr")
    assert missing in one_line("findings", missing, rings=tmp_path, code=1)
    assert "no engine is running" in one_line("findings", rings=tmp_path, code=1)


@pytest.mark.thorough
def test_why_states_which_objectives_were_missed_and_what_would_have_let_it_pass(
    tmp_path: Path,
) -> None:
    asked = ("why", "fe-96", str(SAMPLE), "--ttft", "300ms", "--tpot", "20ms", "--e2e", "2s")
    output = " ".join(inferscope(*asked, rings=tmp_path).stdout.split())
    assert "It missed TTFT 300.0 ms by 91.3 ms." in output
    assert "It missed TPOT 20.0 ms by" in output
    assert "Without preempted (374.1 ms) it would have met the objective." in output
    assert "compliant requests of similar length: preempted +374.1 ms" in output
    assert "Main cause: preempted" in output
    assert "It met E2E 2.0 s." in output
    document = json.loads(inferscope(*asked, "--json", rings=tmp_path).stdout)
    assert [breach["metric"] for breach in document["facts"]["breaches"]] == ["ttft", "tpot"]
    assert document["facts"]["met"] == ["e2e"]


@pytest.mark.parametrize("latency", ["0ms", "fast", "500", "-1s", "1e3s"])
def test_a_latency_needs_a_number_and_a_unit(tmp_path: Path, latency: str) -> None:
    done = inferscope("why", "fe-96", str(SAMPLE), f"--ttft={latency}", rings=tmp_path)
    assert done.returncode == 2
    assert "500ms or 2s" in done.stderr
