"""Observing a process that runs already: on Python ≥ 3.14 a debugger may hand it a script.

`sys.remote_exec` wants both interpreters to be of one minor version, and the right to trace the
other process. The script does what `inferscope run` does before a program begins.
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
    """Return what runs a script in another process; None where Python cannot, or may not."""
    if os.environ.get(ALLOW_VARIABLE) == "0":
        return None
    found: Execute | None = getattr(sys, "remote_exec", None)
    return found


def script(rings: Path) -> str:
    """Return what is run in the process: it writes its rings where we look for them."""
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
    """Have a process observe itself; tell whether it has a ring by now.

    Raises:
        InferScopeError: it may not be traced, or is of another version of Python.
    """
    with tempfile.NamedTemporaryFile("w", suffix=".py", prefix="inferscope-") as file:
        file.write(script(rings))
        file.flush()
        try:
            execute(pid, file.name)
        except (OSError, RuntimeError, ValueError) as error:
            raise InferScopeError(
                f"process {pid} lets nobody in ({error}). It must be of this Python's version, and "
                "yours to trace: run as its user, with ptrace allowed, or as root."
            ) from None
        # The file must stay until the process has come to read it.
        end_s = time.monotonic() + patience_s
        while time.monotonic() < end_s:
            if has_ring():
                return True
            time.sleep(0.1)
    return has_ring()
