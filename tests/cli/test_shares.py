from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.cli.running import Run, inferscope


def table(demo: Run, *arguments: str) -> dict[str, Any]:
    done = inferscope(
        "shares", str(demo.folder / "demo.isr"), "--json", *arguments, rings=demo.rings
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("rule", ["fair", "phase", "token"])
def test_any_rule_divides_what_the_export_measured(demo: Run, rule: str) -> None:
    read = table(demo, "--rule", rule)
    assert read["rule"] == rule
    assert read["measured_ns"] == sum(step["measured_ns"] for step in demo.of_kind("step"))
    beside_ns = read["padding_ns"] + read["idle_ns"] + read["unattributed_ns"]
    assert sum(row["share_ns"] for row in read["rows"]) + beside_ns == read["measured_ns"]


def test_fair_shares_are_the_export_s(demo: Run) -> None:
    sums = Counter[str]()
    for step in demo.of_kind("step"):
        for share in step["shares"]:
            sums[share["request"]] += share["ns"]
    assert {row["name"]: row["share_ns"] for row in table(demo)["rows"]} == sums


@pytest.mark.thorough
def test_rings_are_read_as_the_recording_is(demo: Run) -> None:
    done = inferscope("shares", str(demo.rings), "--by", "phase", "--json", rings=demo.rings)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rows"] == table(demo, "--by", "phase")["rows"]


def test_the_table_names_its_rule_and_how_its_columns_came_about(demo: Run) -> None:
    file = str(demo.folder / "demo.isr")
    done = inferscope("shares", file, "--by", "model", "--rule", "phase", rings=demo.rings)
    assert done.returncode == 0, done.stderr
    for words in ("`phase` (Owen value", "builtin", "sum = measured", "apportioned", "modelled"):
        assert words.lower() in done.stdout.lower()
    assert "\x1b" not in done.stdout


def test_what_cannot_be_divided_is_named_in_one_line(demo: Run, tmp_path: Path) -> None:
    missing = inferscope("shares", str(tmp_path / "none.isr"), rings=tmp_path)
    assert missing.returncode == 1
    assert "none.isr does not exist" in missing.stderr
    assert len(missing.stderr.splitlines()) == 1
    empty = inferscope("shares", rings=tmp_path)
    assert empty.returncode == 1
    assert "no engine is running" in empty.stderr
    file = str(demo.folder / "demo.isr")
    wrong = inferscope("shares", file, "--rule", "mine", rings=demo.rings)
    assert wrong.returncode == 2
    assert "invalid choice: 'mine'" in wrong.stderr
