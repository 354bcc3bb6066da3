"""The word check flags added lines alone, in full clones, shallow ones and on main."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.word_check import base_commit, fault, main

BAD = "# Nobody reads this.\n"  # words: ok


@pytest.mark.parametrize(
    "line",
    [
        "def is_told_by(self):",  # words: ok
        "    class Lives:",  # words: ok
        '    """Of all devices."""',  # words: ok
        "It is told the records.",  # words: ok
        "A step takes so long here.",  # words: ok
        "A zero is no number.",  # words: ok
    ],
)
def test_a_line_of_the_dialect_is_flagged(line: str) -> None:
    assert fault(line)
    assert fault(f"{line}  # words: ok") is None  # words: ok


@pytest.mark.parametrize(
    "line",
    [
        "def outlives(self):",
        '    """Return the device."""',
        "There is no ring here, so long as nothing runs.",
        "It is no longer read.",
    ],
)
def test_plain_english_passes(line: str) -> None:
    assert fault(line) is None


def git(folder: Path, *arguments: str) -> str:
    settings = ("user.name=a", "user.email=a@example.org", "init.defaultBranch=main")
    author = [part for setting in settings for part in ("-c", setting)]
    command = ["git", "-C", str(folder), *author, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def commit(folder: Path, text: str) -> str:
    (folder / "a.py").write_text(text, encoding="utf-8")
    git(folder, "add", "a.py")
    git(folder, "commit", "-qm", "a")
    return git(folder, "rev-parse", "HEAD")


@pytest.mark.process
def test_lines_since_the_merge_base_are_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    origin, clone, shallow = (tmp_path / name for name in ("origin", "clone", "shallow"))
    origin.mkdir()
    git(origin, "init", "-q")
    first = commit(origin, BAD)
    second = commit(origin, f"{BAD}x = 1\n")
    git(tmp_path, "clone", "-q", str(origin), str(clone))
    git(tmp_path, "clone", "-q", "--depth=1", f"file://{origin}", str(shallow))

    assert base_commit(clone) == first  # on main: the last commit is what was added
    assert base_commit(shallow) == "HEAD"
    assert [main([], clone), main([], shallow)] == [0, 0]

    commit(clone, f"{BAD}x = 1\ny = 1\n")
    commit(clone, f"{BAD}x = 1\ny = 1\nz = 1\n")
    assert base_commit(clone) == second
    for folder in (clone, shallow):
        (folder / "a.py").write_text(f"{BAD}x = 1\n++y\n{BAD}", encoding="utf-8")
        assert main([], folder) == 1
    assert (
        capsys.readouterr().out.splitlines()
        == [
            "a.py:4: personification: # Nobody reads this."  # words: ok
        ]
        * 2
    )
    assert main([first], clone) == 1
    assert main(["HEAD~9"], clone) == 1
