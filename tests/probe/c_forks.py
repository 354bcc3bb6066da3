"""Children that C code forks from a process with a probe, and what the probe does in them.

No hook of Python's runs in such a child, and the interpreter's own locks are copied as they are:
where another thread waits for the interpreter, a child hangs in CPython itself. So these children
are forked from a process whose other threads sleep, which no worker of a test run promises.

    python -m tests.probe.c_forks FOLDER silent|silent-unwiped|own

prints one line of JSON: for each first call of the child, what it and its parent see.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from inferscope.probe import EngineInfo, Probe, process_mark
from inferscope.records import Emitted
from tests.probe.fakes import FakeClock, make_probe, of, records

FIRST_CALLS = ("on", "path", "emitted", "finished", "queued", "paused", "close", "fail")
_LONGEST_S = 30.0


def in_c_fork(child: Callable[[], object]) -> object:
    """Return what a function returns in a child that C code has forked, "hangs" after 30 s."""
    out, back = os.pipe()
    pid = ctypes.PyDLL(None).fork()
    if pid == 0:
        try:
            os.write(back, json.dumps(child()).encode())
        finally:
            os._exit(0)
    os.close(back)
    try:
        is_done, *_ = select.select([out], [], [], _LONGEST_S)
        return json.loads(os.read(out, 100)) if is_done else "hangs"
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(out)


def silent(folder: Path, first: str) -> dict[str, object]:
    """Fork a child that calls the parent's probe, one call before the others."""
    probe = make_probe(folder, FakeClock(step_ns=1000), name=first, capacity=1 << 18)
    path = probe.path
    assert path is not None
    before = path.read_bytes()

    def child() -> list[bool]:
        calls: dict[str, Callable[[], object]] = {
            "emitted": lambda: probe.emitted([0], [1]),
            "finished": lambda: probe.finished(0, "stop"),
            "queued": lambda: probe.queued("child's", prompt_tokens=1),
            "paused": probe.paused,
            "close": probe.close,
            "fail": lambda: probe.fail(ValueError("child's")),
            "on": lambda: probe.on,
            "path": lambda: probe.path,
        }
        calls[first]()
        is_silent = not probe.on and probe.path is None
        for other in calls.values():
            other()
        return [is_silent, not probe.on]

    seen = in_c_fork(child)
    is_unchanged, is_on = path.read_bytes() == before, probe.on
    probe.emitted([0], [5])
    num_emitted = len(of(Emitted, path))
    probe.close()
    return {"child": seen, "unchanged": is_unchanged, "on": is_on, "emitted": num_emitted}


def own(folder: Path) -> dict[str, object]:
    """Fork a child that opens a probe of its own."""
    os.environ |= {
        "INFERSCOPE_DIR": str(folder),
        "INFERSCOPE_RING_MB": "0.1",
        "INFERSCOPE_ENGINE_ID": "fork",
    }
    probe = Probe.open(EngineInfo(0, "parent"))
    path = probe.path
    assert path is not None

    def child() -> list[object]:
        mine = Probe.open(EngineInfo(0, "child"))
        mine.emitted([0], [1])
        its_path = mine.path
        mine.close()
        is_another = its_path not in (None, path)
        return [is_another, len(of(Emitted, its_path)) if its_path else None]

    seen = in_c_fork(child)
    engines = sorted({info.engine for info in of(EngineInfo, path)})
    num_emitted = len(of(Emitted, path))
    probe.close()
    return {
        "child": seen,
        "engines": engines,
        "emitted": num_emitted,
        "readable": bool(records(path)),
    }


def main() -> None:
    """Fork the children that the command line names."""
    folder, which = Path(sys.argv[1]), sys.argv[2]
    if which == "silent-unwiped":  # an older kernel
        process_mark._WIPE_ON_FORK = 12345
    if which == "own":
        found = {"own": own(folder)}
    else:
        found = {first: silent(folder, first) for first in FIRST_CALLS}
    print(json.dumps(found))  # noqa: T201  # what the test reads


if __name__ == "__main__":
    main()
