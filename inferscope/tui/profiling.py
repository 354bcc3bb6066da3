"""Profile of a running engine, made by the command `profile` in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from tempfile import gettempdir

import msgspec

from inferscope.errors import InferScopeError
from inferscope.foreign import one_line
from inferscope.insight import ProfileDocument

PROFILE_S = 3.0
_PATIENCE_S = 180.0


def profile_engine(engine_id: str) -> ProfileDocument:
    """Profile an engine for `PROFILE_S` and return its kernels; the trace stays in a file.

    Raises:
        InferScopeError: no profile was made; the error has the command's reason.
    """
    trace = Path(gettempdir()) / f"inferscope-profile-{engine_id}.json"
    command = [sys.executable, "-m", "inferscope", "profile", engine_id, "--json"]
    command += ["--seconds", f"{PROFILE_S:g}", "--out", str(trace)]
    try:
        done = subprocess.run(
            command, capture_output=True, stdin=subprocess.DEVNULL, timeout=_PATIENCE_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise InferScopeError(f"no profile was made within {_PATIENCE_S:.0f} s.") from None
    if done.returncode:
        last = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
        reason = one_line(last[0]) if last else f"exit code {done.returncode}"
        raise InferScopeError(reason.removeprefix("inferscope: "))
    return msgspec.json.decode(done.stdout, type=ProfileDocument)
