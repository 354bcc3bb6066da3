"""Completion as a shell does it, from the script that a user installs."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.cli.running import inferscope

shtab = pytest.importorskip("shtab", reason="shtab is not installed: the extra `completion`")


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the script for bash."""
    folder = tmp_path_factory.mktemp("completion")
    done = inferscope("completion", "bash", rings=folder)
    assert (done.returncode, done.stderr) == (0, "")
    (folder / "inferscope").write_text(done.stdout, encoding="utf-8")
    return folder / "inferscope"


def completed(script: Path, line: str, folder: Path) -> set[str]:
    """Return what bash offers for the last word of a line."""
    words = line.split(" ")
    program = f"""
        source {script}
        COMP_WORDS=({" ".join(f"'{word}'" for word in words)})
        COMP_CWORD={len(words) - 1}
        compopt() {{ :; }}  # refused outside of a completion
        $(complete -p inferscope | sed 's/.*-F \\([^ ]*\\).*/\\1/') inferscope
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(
        ["bash", "-c", program], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    return {word.strip() for word in done.stdout.splitlines()}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("inferscope at", {"attach"}),
        ("inferscope attach --js", {"--json"}),
        ("inferscope slo ch", {"check"}),
        ("inferscope load http://x --kind r", {"rag"}),
        ("inferscope export run", {"run.isr"}),
        ("inferscope export run.isr --out tr", {"trace.json"}),
    ],
)
def test_bash_completes_commands_options_choices_and_files(
    script: Path, tmp_path: Path, line: str, offered: set[str]
) -> None:
    for name in ("run.isr", "trace.json", "other"):
        (tmp_path / name).touch()
    assert completed(script, line, tmp_path) == offered


@pytest.mark.thorough
@pytest.mark.parametrize("shell", ["zsh", "fish", "tcsh"])
def test_each_shell_has_a_script_with_every_command(tmp_path: Path, shell: str) -> None:
    if shell not in shtab.SUPPORTED_SHELLS:
        pytest.skip(f"this shtab does not know {shell}")
    done = inferscope("completion", shell, rings=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "attach" in done.stdout
    assert "since" in done.stdout
    if shell == "zsh" and shutil.which("zsh"):
        subprocess.run(["zsh", "-n"], input=done.stdout, text=True, check=True)
