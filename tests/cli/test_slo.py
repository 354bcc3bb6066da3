"""`inferscope slo check`: what is promised, and how a recording fares."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.children import child
from tests.cli.running import ANY_PORT, inferscope
from tests.insight.test_why import SAMPLE

_SLO = """
slos:
  - {metric: ttft, threshold: 400ms, objective: 99%, window: 30d}
  - {metric: ttft, threshold: 300ms, objective: 0.999, window: 1h, model: builtin}
  - {metric: tpot, threshold: 60ms, objective: 95%, window: 7d}
  - {metric: availability, objective: 99.9%, window: 30d}
  - {metric: goodput, objective: 95%, window: 30d}
"""


@pytest.fixture
def slo(tmp_path: Path) -> Path:
    file = tmp_path / "slo.yaml"
    file.write_text(_SLO, encoding="utf-8")
    return file


def test_check_prints_the_objectives(slo: Path, tmp_path: Path) -> None:
    done = inferscope("slo", "check", str(slo), rings=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "ttft, all models but builtin: first token within 400 ms, "
        "99 % of requests over 30 d; 1 of 100 may be bad",
        "ttft, builtin: first token within 300 ms, "
        "99.9 % of requests over 1 h; 1 of 1000 may be bad",
        "tpot, all models: mean time per token after the first within 60 ms, "
        "95 % of requests over 7 d; 1 of 20 may be bad",
        "availability, all models: not failed or shed by the server, "
        "99.9 % of requests over 30 d; 1 of 1000 may be bad",
        "goodput, all models: not failed or shed by the server, and every threshold met, "
        "95 % of requests over 30 d; 1 of 20 may be bad",
    ]


@pytest.mark.thorough
def test_check_judges_a_recording_as_its_export_has_it(slo: Path, tmp_path: Path) -> None:
    out = tmp_path / "sample.jsonl"
    done = inferscope("export", str(SAMPLE), "--format", "jsonl", "-o", str(out), rings=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    requests = [
        line for line in lines if line["kind"] == "request" and line["finish"] in ("stop", "length")
    ]
    assert len(requests) > 20
    done = inferscope("slo", "check", str(slo), str(SAMPLE), "--json", rings=tmp_path)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert len(document["slos"]) == 5
    (engine,) = document["engines"]
    assert engine["model"] == "builtin"
    by_name = {count["objective"]["name"]: count for count in engine["counts"]}
    assert list(by_name) == ["ttft", "tpot", "availability", "goodput"]
    for count in by_name.values():
        assert sum(count["causes"].values()) == count["num_bad"]
    ttft = by_name["ttft"]
    assert ttft["objective"]["threshold_ns"] == 300_000_000
    late = [
        line["first_token_ns"] - line["arrived_ns"] > 300_000_000
        for line in requests
        if not line["joined_late"]
    ]
    assert ttft["num_good"] + ttft["num_bad"] + ttft["num_warm_up"] == len(late)
    assert ttft["num_bad"] <= sum(late) <= ttft["num_bad"] + ttft["num_warm_up"]
    assert ttft["num_bad"] > 0


@pytest.mark.thorough
def test_the_sample_can_be_checked(tmp_path: Path) -> None:
    file = SAMPLE.with_name("slo.yaml")
    done = inferscope("slo", "check", str(file), str(SAMPLE), "--json", rings=tmp_path)
    assert done.returncode == 0, done.stderr
    (engine,) = json.loads(done.stdout)["engines"]
    assert [count["objective"]["name"] for count in engine["counts"]] == [
        *("ttft", "tbt", "availability", "goodput")
    ]


@pytest.mark.thorough
def test_a_table_names_the_causes(slo: Path, tmp_path: Path) -> None:
    done = inferscope("slo", "check", str(slo), str(SAMPLE), rings=tmp_path)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("  ttft: ")]
    assert " good, " in line
    assert " bad (" in line


@pytest.mark.thorough
def test_why_takes_the_thresholds_of_the_requests_model(slo: Path, tmp_path: Path) -> None:
    done = inferscope("why", "fe-96", str(SAMPLE), "--slo", str(slo), "--json", rings=tmp_path)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)["facts"]
    limits = {one["metric"]: one["limit_ns"] for one in facts["objectives"]}
    assert limits == {"ttft": 300_000_000, "tpot": 60_000_000}
    asked = ["why", "fe-96", str(SAMPLE), "--slo", str(slo), "--ttft", "10s", "--json"]
    facts = json.loads(inferscope(*asked, rings=tmp_path).stdout)["facts"]
    limits = {one["metric"]: one["limit_ns"] for one in facts["objectives"]}
    assert limits == {"ttft": 10_000_000_000, "tpot": 60_000_000}


@pytest.mark.thorough
def test_check_refuses_what_rules_refuses_and_judges_a_recording_by_it(tmp_path: Path) -> None:
    file = tmp_path / "slo.yaml"
    file.write_text("slos: [{metric: availability, objective: 90%, window: 30d}]", encoding="utf-8")
    check, rules = (
        inferscope("slo", verb, str(file), rings=tmp_path) for verb in ("check", "rules")
    )
    assert (check.returncode, check.stdout) == (rules.returncode, rules.stdout) == (2, "")
    assert check.stderr == rules.stderr
    assert "availability has the target 0.9" in check.stderr
    judged = inferscope("slo", "check", str(file), str(SAMPLE), rings=tmp_path)
    assert judged.returncode == 0
    assert " good" in judged.stdout
    assert f"inferscope: slo rules rejects {file}: availability has the target 0.9" in judged.stderr


@pytest.mark.thorough
def test_a_collector_prints_its_objectives_when_it_starts(slo: Path, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "inferscope",
        "collect",
        "--slo",
        str(slo),
        "--counters",
        "off",
    ]
    environment = {**os.environ, "INFERSCOPE_DIR": str(tmp_path / "rings"), **ANY_PORT}
    with child(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        lines = iter(process.stderr.readline, "")
        line = next(each for each in lines if "counting" in each)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    assert line == (
        "inferscope: counting good and bad requests: ttft 99% within 400 ms, "
        "ttft 99.9% within 300 ms for builtin, tpot 95% within 60 ms, availability 99.9%, "
        "goodput 95%\n"
    )


def test_a_collector_states_what_it_would_count_by(slo: Path, tmp_path: Path) -> None:
    done = inferscope("collect", "--slo", str(slo), "--check", rings=tmp_path / "rings", **ANY_PORT)
    assert (done.returncode, done.stderr) == (0, "")
    assert "breach      any objective\n" in done.stdout
    assert "slo         ttft, all models but builtin: first token within 400 ms" in done.stdout
    assert (
        f"budgets     kept in {tmp_path}/rings/.collector-{os.geteuid()}/slo-state.json\n"
        in done.stdout
    )
    assert not (tmp_path / "rings").exists()


def test_a_bad_file_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "slo.yaml"
    file.write_text("slos:\n  - metric: tfft\n", encoding="utf-8")
    for words in (["slo", "check", str(file)], ["collect", "--slo", str(file), "--check"]):
        done = inferscope(*words, rings=tmp_path)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.splitlines() == [
            f"inferscope: {file}:2: slos[1].metric is 'tfft'. Did you mean ttft?"
        ]
