from __future__ import annotations

import json
from pathlib import Path

import pytest

from inferscope.cli.main import COMMANDS
from tests.cli.running import inferscope


def test_help_names_every_command(tmp_path: Path) -> None:
    said = inferscope("--help", rings=tmp_path).stdout
    for command in COMMANDS:
        assert f"\n    {command}" in said


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(tmp_path: Path, command: str) -> None:
    done = inferscope(command, "--help", rings=tmp_path)
    assert done.returncode == 0
    assert done.stderr == ""
    assert len(done.stdout.splitlines()) > 5


def test_no_command_is_a_usage_error(tmp_path: Path) -> None:
    assert inferscope(rings=tmp_path).returncode == 2


def test_doctor_says_how_to_get_what_is_missing(tmp_path: Path) -> None:
    rows = json.loads(inferscope("doctor", "--json", rings=tmp_path).stdout)
    by_name = {row["name"]: row for row in rows}
    assert by_name["ring folder"]["is_fine"]
    assert "inferscope demo" in by_name["engines"]["fix"]
