"""Handling of Debian programs that tests run: installed, or reported as missing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LINE = "prometheus and prometheus-alertmanager cannot be installed here: their tests are skipped"
WANTED = ("prometheus", "promtool", "amtool", "alertmanager")


def path_with(folder: Path, *names: str) -> str:
    """Return a PATH on which there is little else."""
    for name in ("bash", "env", "id", *names):
        program = shutil.which(name)
        (folder / name).symlink_to(program or "/bin/true")
    return str(folder)


@pytest.mark.parametrize(("there", "message"), [(WANTED, ""), (WANTED[1:], LINE), ((), LINE)])
def test_what_is_missing_and_cannot_be_installed_is_one_line(
    tmp_path: Path, there: tuple[str, ...], message: str
) -> None:
    done = subprocess.run(
        [ROOT / ".ci" / "monitoring"],
        env={"PATH": path_with(tmp_path, *there)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr.strip()) == (0, "", message)


@pytest.mark.thorough
def test_the_last_lines_state_which_tests_were_skipped_for_want_of_it(tmp_path: Path) -> None:
    file = "tests/slo/test_rule_files.py"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", file, "-k", "objectives"],
        cwd=ROOT,
        env={**os.environ, "PATH": path_with(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    output = (
        "1 tests with a real Prometheus or Alertmanager were skipped: apt-get install prometheus"
    )
    assert done.stdout.splitlines().count(output) == 1, done.stdout
