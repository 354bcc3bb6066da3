"""Check of the project's language on the lines that were added since a commit.

python -m tests.word_check [BASE | --all]

BASE is the merge base with origin/main, or the commit before HEAD where that is HEAD itself or is
not there. A shallow clone may have neither: then the lines that are not committed are checked.
`--all` counts flagged lines of the whole tree. A line with "words: ok" is exempt.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

FILES = ("--", "*.py", "*.md")
EXEMPT = "words: ok"
RULES = {
    "name personifies": re.compile(  # words: ok
        r"^\s*(?:async )?(?:def|class) \w*?(?i:(?<![a-z])(?:told|heirs?|chiefs?|wish(?:es)?"
        r"|tenths?|who|who[m]|whose|some[b]ody|no[b]ody|spoken|together|lives|heard))(?![a-z])"
    ),
    "docstring has no head noun or verb of effect": re.compile(
        r'^\s*"""(?:Of|That|Whose|Who|By|Likewise|Say|Tell|Give|Let|Have)\b'
    ),
    "personification": re.compile(
        r"\b(?:[Ss]omebody|[Nn]obody|[Ww]hoever|whom|goodbye|own word|spoken of"  # words: ok
        r"|(?:is|was) told)\b"
    ),
    "give the number or the limit": re.compile(
        r"\bso (?:many|much|long|often)\b(?! (?:as|that|of))"
    ),
    "negate the verb": re.compile(r"\w(?<!here) is no (?!longer|more)[a-z]"),
}
"""Pattern of each fault, by what is wrong with the line."""


def fault(line: str) -> str | None:
    """Return what is wrong with a line; None for a good one."""
    if EXEMPT in line:
        return None
    return next((name for name, pattern in RULES.items() if pattern.search(line)), None)


def added(diff: Iterable[str]) -> Iterator[tuple[str, int, str]]:
    """Yield path, line number and text of each added line of a diff without context."""
    path, number, left = "", 0, 0
    for line in diff:
        if left == 0 and line.startswith("+++ "):
            path = line[4:].removeprefix("b/")
        elif hunk := left == 0 and re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", line):
            number, left = int(hunk[1]), int(hunk[2] or 1)
        elif left and line.startswith("+"):
            yield path, number, line[1:]
            number, left = number + 1, left - 1


def base_commit(folder: Path) -> str:
    """Return the commit that lines are compared with."""
    head = _git(folder, "rev-parse", "HEAD")
    merge_base = _git(folder, "merge-base", "HEAD", "origin/main")
    if merge_base not in ("", head):
        return merge_base
    return _git(folder, "rev-parse", "--verify", "--quiet", "HEAD~1") or "HEAD"


def _git(folder: Path, *arguments: str) -> str:
    """Return what git prints; nothing where it fails."""
    command = ["git", "-C", str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def main(arguments: list[str], folder: Path = Path()) -> int:
    """Print the flagged lines and return the exit code."""
    if arguments == ["--all"]:
        paths = _git(folder, "ls-files", *FILES).splitlines()
        lines = [x for path in paths for x in (folder / path).read_text("utf-8").splitlines()]
        sys.stdout.write(f"{sum(fault(line) is not None for line in lines)} lines\n")
        return 0
    base = arguments[0] if arguments else base_commit(folder)
    diff = ["git", "-C", str(folder), "diff", "--unified=0", "--no-ext-diff", "--no-color", base]
    done = subprocess.run([*diff, *FILES], capture_output=True, encoding="utf-8", check=False)
    if done.returncode:
        sys.stderr.write(f"word check: cannot compare with {base}: {done.stderr.strip()}\n")
        return 0 if not arguments and not _git(folder, "rev-parse", "HEAD") else 1
    num_flagged = 0
    for path, number, line in added(done.stdout.split("\n")):
        if name := fault(line):
            num_flagged += 1
            sys.stdout.write(f"{path}:{number}: {name}: {line.strip()}\n")
    return 1 if num_flagged else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
