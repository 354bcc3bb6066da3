"""Observation of a process that is already running, through `sys.remote_exec` of Python 3.14.

`sys.remote_exec` runs a script in the other process. It needs the same minor version of Python in
both and the permission to trace the process. The script sets up what `inferscope run` sets up
before a program starts.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from inferscope.errors import InferScopeError

ALLOW_VARIABLE = "INFERSCOPE_REMOTE_EXEC"
PATIENCE_S = 10.0
_SCRIPT = """\
import os, sys
os.environ["INFERSCOPE"] = "1"
os.environ["INFERSCOPE_DIR"] = {rings!r}
if {home!r} not in sys.path:
    sys.path.append({home!r})
from inferscope.adapters.inject import install
install()
"""

Execute = Callable[[int, str], None]


def executor() -> Execute | None:
    """Return the function that runs a script in another process; None if missing or forbidden."""
    if os.environ.get(ALLOW_VARIABLE) == "0":
        return None
    found: Execute | None = getattr(sys, "remote_exec", None)
    return found


def script(rings: Path) -> str:
    """Return the script to run in the process, which makes it write its rings to `rings`."""
    home = Path(__file__).resolve().parents[2]
    return _SCRIPT.format(rings=str(rings), home=str(home))


def observe(
    pid: int,
    execute: Execute,
    *,
    rings: Path,
    has_ring: Callable[[], bool],
    patience_s: float = PATIENCE_S,
) -> bool:
    """Start the probe in a process, and return whether the process has a ring.

    Raises:
        InferScopeError: the process may not be traced, or runs another version of Python.
    """
    with tempfile.NamedTemporaryFile("w", suffix=".py", prefix="inferscope-") as file:
        file.write(script(rings))
        file.flush()
        try:
            execute(pid, file.name)
        except (OSError, RuntimeError, ValueError) as error:
            raise InferScopeError(
                f"cannot attach to process {pid}: {error}. It must run the same version of Python, "
                "and you need the permission to trace it: run as its user with ptrace allowed, or "
                "as root."
            ) from None
        # The file must exist until the process has read it.
        end_s = time.monotonic() + patience_s
        while time.monotonic() < end_s:
            if has_ring():
                return True
            time.sleep(0.1)
    return has_ring()
