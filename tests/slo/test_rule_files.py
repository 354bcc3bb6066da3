"""What `inferscope slo rules` writes, and what it refuses."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
import yaml

from inferscope.errors import BadInput
from inferscope.slo.objectives import read_objectives
from inferscope.slo.rules import RuleOptions, burn_lines, rule_file
from tests.cli.running import inferscope
from tests.cli.test_docs import ROOT
from tests.dashboards.kubernetes_schema import Manifest, PrometheusRule
from tests.slo.promtool import OBJECTIVES, run_promtool

pytestmark = pytest.mark.process


def written(folder: Path, *options: str, slos: str = OBJECTIVES) -> Path:
    """Write rules as a user would."""
    file = folder / "slo.yaml"
    file.write_text(slos, encoding="utf-8")
    out = folder / "out"
    done = inferscope("slo", "rules", str(file), "--out", str(out), *options, rings=folder)
    assert done.returncode == 0, done.stderr
    return out


def test_prometheus_takes_the_rules_whatever_the_models_are_called(tmp_path: Path) -> None:
    slos = yaml.safe_load(OBJECTIVES)
    slos["slos"].append(slos["slos"][0] | {"model": 'the "big\\one"'})
    out = written(tmp_path, "--dashboards", "https://g.example.org/", slos=yaml.safe_dump(slos))
    done = run_promtool("check", "rules", "inferscope-rules.yaml", folder=out)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SUCCESS" in done.stdout + done.stderr


def test_the_samples_objectives_make_rules(tmp_path: Path) -> None:
    out = written(tmp_path, slos=(ROOT / "samples" / "slo.yaml").read_text(encoding="utf-8"))
    done = run_promtool("check", "rules", "inferscope-rules.yaml", folder=out)
    assert done.returncode == 0, done.stdout + done.stderr


def test_labels_of_alerts_are_model_slo_and_severity_only(tmp_path: Path) -> None:
    file = tmp_path / "slo.yaml"
    file.write_text(OBJECTIVES, encoding="utf-8")
    rules = rule_file(read_objectives(file), RuleOptions(runbooks="https://r.example.org/books/"))
    alerts = [rule for group in rules["groups"] for rule in group["rules"] if "alert" in rule]
    assert len(alerts) > 8
    for alert in alerts:
        assert {"severity"} <= set(alert["labels"]) <= {"model", "slo", "severity"}
        assert alert["labels"]["severity"] in ("page", "ticket")
        # Whatever an expression is made of, it ends in these labels.
        assert re.match(
            r"(count|sum|max) by \(model(, slo)?\)|\(?\s*model_slo:", alert["expr"].strip()
        )
        page = alert["annotations"]["runbook_url"]
        assert page.startswith("https://r.example.org/books/")
        assert (ROOT / "docs" / "runbooks" / page.rsplit("/", 1)[1]).is_file()


def test_every_runbook_is_some_alerts(tmp_path: Path) -> None:
    text = (written(tmp_path) / "inferscope-rules.yaml").read_text(encoding="utf-8")
    pages = sorted((ROOT / "docs" / "runbooks").glob("*.md"))
    assert len(pages) == 10
    for page in pages:
        assert f"runbook_url: docs/runbooks/{page.name}" in text
        names = re.findall(r"InferScope\w+", page.read_text(encoding="utf-8").splitlines()[0])
        assert [name for name in names if f"alert: {name}" in text]


def test_floors_are_printed_and_configurable(tmp_path: Path) -> None:
    file = tmp_path / "slo.yaml"
    file.write_text(OBJECTIVES, encoding="utf-8")
    words = ("--floor", "33", "--page-rate", "0", "--out", str(tmp_path / "out"))
    done = inferscope("slo", "rules", str(file), *words, rings=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) > 10
    assert all("33 bad" in line and "/s" not in line for line in lines[1:])
    rules = yaml.safe_load((tmp_path / "out" / "inferscope-rules.yaml").read_text())
    alerts = [rule for group in rules["groups"] for rule in group["rules"] if "alert" in rule]
    burning = [rule["expr"] for rule in alerts if "Budget" in rule["alert"]]
    assert all(">= 33" in expr for expr in burning)
    printed = inferscope("slo", "rules", str(file), *words[:4], rings=tmp_path)
    assert yaml.safe_load(printed.stdout) == rules


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((), "runbook_url is relative (docs/runbooks/…): give --runbooks BASE; "
             "there is no dashboard_url: give --dashboards URL"),
        (("--runbooks", "https://r"), "there is no dashboard_url: give --dashboards URL"),
        (("--dashboards", "https://g"),
         "runbook_url is relative (docs/runbooks/…): give --runbooks BASE"),
        (("--runbooks", "https://r", "--dashboards", "https://g"), None),
    ],
)  # fmt: skip
def test_links_that_lead_nowhere_are_a_line(
    tmp_path: Path, given: tuple[str, ...], message: str | None
) -> None:
    file = tmp_path / "slo.yaml"
    file.write_text(OBJECTIVES, encoding="utf-8")
    done = inferscope("slo", "rules", str(file), *given, rings=tmp_path)
    assert done.returncode == 0
    assert done.stderr == ("" if message is None else f"inferscope: links in alerts: {message}\n")


def test_the_operators_object_holds_the_same_rules(tmp_path: Path) -> None:
    plain = yaml.safe_load((written(tmp_path) / "inferscope-rules.yaml").read_text())
    out = written(tmp_path, "--kubernetes")
    text = (out / "inferscope-prometheusrule.yaml").read_text(encoding="utf-8")
    manifest = msgspec.convert(yaml.safe_load(text), Manifest)
    assert isinstance(manifest, PrometheusRule)
    assert yaml.safe_load(text)["spec"] == plain
    assert (out / "alertmanager.yaml").is_file()
    printed = inferscope("slo", "rules", str(tmp_path / "slo.yaml"), "--kubernetes", rings=tmp_path)
    assert printed.stdout == text


@pytest.mark.thorough
def test_more_rules_than_the_operators_object_takes_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "slo.yaml"
    slo = {"metric": "ttft", "threshold": "1s", "objective": "99%", "window": "30d"}
    slos = [slo | {"model": f"model-{number}"} for number in range(99)]
    file.write_text(yaml.safe_dump({"slos": slos}), encoding="utf-8")
    done = inferscope("slo", "rules", str(file), "--kubernetes", rings=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert re.search(r"rules are \d{3,} KiB, .* has 512 at most\. Give fewer objectives", line)


@pytest.mark.parametrize(
    ("objective", "window", "message"),
    [
        ("90%", "30d", "has the target 0.9, so 0.1 may be bad; .* 14.4 times that would need "
                       "1.44 .* "
                       "Give an objective above 0.9306"),
        (0.5, "30d", "0.5 may be bad; .* 14.4 times that would need 7.2"),
        ("99%", "30m", "has a window of 30m, and the shortest rule looks back for 1h"),
    ],
)  # fmt: skip
def test_what_could_never_fire_is_refused_with_the_arithmetic(
    tmp_path: Path, objective: str | float, window: str, message: str
) -> None:
    file = tmp_path / "slo.yaml"
    slo = {"metric": "ttft", "threshold": "1s", "objective": objective, "window": window}
    file.write_text(yaml.safe_dump({"slos": [slo]}), encoding="utf-8")
    done = inferscope("slo", "rules", str(file), rings=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert re.fullmatch(f"inferscope: {re.escape(str(file))}: ttft .*{message}.*", line)


def test_what_just_can_fire_is_taken(tmp_path: Path) -> None:
    file = tmp_path / "slo.yaml"
    slo = {"metric": "ttft", "threshold": "1s", "objective": 0.931, "window": "30d"}
    file.write_text(yaml.safe_dump({"slos": [slo]}), encoding="utf-8")
    assert rule_file(read_objectives(file), RuleOptions())["groups"]


@pytest.mark.parametrize("scale", [1, 2, 30, 60])
def test_the_windows_that_are_printed_are_those_of_the_rules(tmp_path: Path, scale: int) -> None:
    file = tmp_path / "slo.yaml"
    file.write_text(OBJECTIVES, encoding="utf-8")
    options = RuleOptions(scale=scale, scrape_s=1)
    objectives = read_objectives(file)
    rules = [rule for group in rule_file(objectives, options)["groups"] for rule in group["rules"]]
    burning = "".join(rule["expr"] for rule in rules if "Budget" in rule.get("alert", ""))
    head, *lines = burn_lines(objectives, options)
    at = head.index("over")
    printed = {
        span for line in lines for span in re.findall(r"\b\d+m?[smhd]\b", line[at : at + 14])
    }
    assert len(printed) == 7
    assert printed <= set(re.findall(r":(?:num|share)(\d+m?[smhd])\b", burning))


def test_windows_shorter_than_four_scrapes_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "slo.yaml"
    file.write_text(OBJECTIVES, encoding="utf-8")
    with pytest.raises(BadInput, match=r"shortest window is 5 s and the scrape interval 15 s"):
        rule_file(read_objectives(file), RuleOptions(scale=60))
    with pytest.raises(BadInput, match=r"Scrape every 2\.5 s .* --scrape, or a lower --scale"):
        rule_file(read_objectives(file), RuleOptions(scale=30))
    assert rule_file(read_objectives(file), RuleOptions(scale=30, scrape_s=2.5))
    rules = rule_file(read_objectives(file), RuleOptions(scale=60, scrape_s=1))
    assert rules["groups"][0]["interval"] == "500ms"
