"""Child processes of tests: started in a context that kills and reaps them, whatever ends it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

GRACE = "TEST_GRACE_S"
_GRACE_S = float(os.environ.get(GRACE, "10"))
"""For a process whose parent was killed to notice it; most take milliseconds."""


@contextlib.contextmanager
def child(words: Sequence[str | Path], **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """Run a command while the context lasts; then kill it, and its session if it has its own.

    Args:
        words: the command.
        options: those of `subprocess.Popen`.
    """
    process = subprocess.Popen(words, **options)
    try:
        yield process
    finally:
        if options.get("start_new_session"):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.wait()
        # No `communicate`: a grandchild that holds the pipe would be waited for.
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


def children() -> set[int]:
    """Return the process ids of this process's children, zombies included."""
    found = set[int]()
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):
            text = Path(f"/proc/self/task/{thread}/children").read_text(encoding="ascii")
            found.update(map(int, text.split()))
    return found


def started_in(variable: str, value: str) -> dict[int, str]:
    """Return the test that started each process whose environment has a variable.

    It finds orphans too, which `children` does not: a child inherits pytest's variables.
    """
    wanted = f"{variable}={value}".encode()
    found = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{name}/environ").read_bytes().split(b"\0")
            if wanted in words:
                key = b"PYTEST_CURRENT_TEST="
                test = next((word[len(key) :] for word in words if word.startswith(key)), b"")
                found[int(name)] = test.decode(errors="replace")
    return found


def remaining(pids: set[int], *, grace_s: float = _GRACE_S) -> dict[int, str]:
    """Return the command of each process that is still there after a grace period."""
    end_s = time.monotonic() + grace_s
    while there := {pid: _command(pid) for pid in pids if Path(f"/proc/{pid}").exists()}:
        if time.monotonic() > end_s:
            break
        time.sleep(0.02)
    return there


def _command(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return ""
    return words.replace(b"\0", b" ").decode(errors="replace").strip() or "a zombie"
