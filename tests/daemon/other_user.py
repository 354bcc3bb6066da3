"""Commands run as another user of this machine, by root, with groups of his own."""

from __future__ import annotations

import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def as_user(uid: int, *groups: int) -> tuple[str, ...]:
    """Return the words before a command that have it run as this user, in these groups only.

    Where the interpreter lies in a folder that is closed to others (root's home, say), it is shown
    to him there all the same: in a mount namespace of his own.
    """
    become = ("setpriv", f"--reuid={uid}", f"--regid={groups[0] if groups else uid}")
    become += (f"--groups={','.join(map(str, groups))}",) if groups else ("--clear-groups",)
    prefix = Path(sys.base_prefix)
    closed = [path for path in (prefix, *prefix.parents) if not path.stat().st_mode & 0o001]
    if not closed:
        return become
    inside = Path("/mnt") / prefix.relative_to(closed[-1])
    shown = f"""
        mount -t tmpfs -o mode=0755 none /mnt && mkdir -p {shlex.quote(str(inside))} &&
        mount --bind {shlex.quote(str(prefix))} {shlex.quote(str(inside))} &&
        mount --rbind /mnt {shlex.quote(str(closed[-1]))} && exec "$@"
    """
    return ("unshare", "--mount", "sh", "-c", shown, "sh", *become)


def can_run_as(uid: int) -> bool:
    """Return whether this user may switch to that one, who may run this interpreter."""
    words = [*as_user(uid), sys.executable, "-c", "import inferscope"]
    try:
        return subprocess.run(words, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


@contextmanager
def open_folder() -> Iterator[Path]:
    """Make a folder that all users may look into, as pytest's are not."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder
