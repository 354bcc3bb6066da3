"""Running the command line as a user would, and what a demo leaves."""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.children import child


@dataclass(frozen=True)
class Run:
    """What a demo left."""

    folder: Path
    rings: Path
    snapshot: dict[str, Any]
    rows: list[dict[str, Any]]

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        """Return the export's lines of one kind."""
        return [row for row in self.rows if row["kind"] == kind]


ROOT = Path(__file__).parents[2]
_LATEST_S = 90.0
SHORT = frozenset(
    (
        *("attach", "collect", "diff", "doctor", "export", "findings", "load", "off", "on"),
        *("replay", "run", "sampler", "shares", "slo", "why", "help", "version"),
    )
)
"""Commands that take less than their imports do."""
ANY_PORT = {"INFERSCOPE_COLLECT_EXPORTERS_PROMETHEUS_PORT": "0"}
"""For a collector without a file, of which there may be several: the default port is but one."""


def inferscope(
    *arguments: str, rings: Path, timeout_s: float = 90, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own, with a ring folder of its own.

    A short command is a fork of an interpreter that has imported it. Where `environment` changes
    what Python imports, and with `inferscope_cold`, it is started as a user would. What either
    prints with --json is checked against its documented type.
    """
    imports_ours = environment.get("PYTHONPATH") in (None, str(ROOT))
    if arguments[:1] and arguments[0] in SHORT and imports_ours:
        done = _warm().run(arguments, _environment(rings, environment), timeout_s)
        _check(arguments, done.stdout)
        return done
    return inferscope_cold(*arguments, rings=rings, timeout_s=timeout_s, **environment)


def inferscope_cold(
    *arguments: str, rings: Path, timeout_s: float = 90, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the command line as a user would, with a ring folder of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "inferscope", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=_environment(rings, environment),
        check=False,
    )
    _check(arguments, done.stdout)
    return done


def _check(arguments: Sequence[str], printed: str) -> None:
    """Check a document; its types import every command, which other tests need not wait for."""
    if "--json" in arguments and printed:
        from tests.cli.documents import check_printed

        check_printed(arguments, printed)


def _environment(rings: Path, more: dict[str, str]) -> dict[str, str]:
    return {**os.environ, "INFERSCOPE_DIR": str(rings), **more}


class Warm:
    """An interpreter with the commands imported; the process of warm.py."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.cli.warm"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            start_new_session=True,
        )
        atexit.register(self.close)

    def run(
        self, words: tuple[str, ...], environment: dict[str, str], timeout_s: float
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in a fork of it."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        with tempfile.TemporaryDirectory() as folder:
            out, err = Path(folder) / "out", Path(folder) / "err"
            asked = {
                **{"words": words, "environment": environment, "folder": str(Path.cwd())},
                **{"out": str(out), "err": str(err)},
            }
            try:
                stdin.write(json.dumps(asked) + "\n")
                stdin.flush()
                if not select.select([stdout], [], [], timeout_s)[0]:
                    raise subprocess.TimeoutExpired(words, timeout_s, err.read_bytes())
                code = int(stdout.readline())
            except BaseException:
                self.close()  # its answer is not to be read as that of the next command
                raise
            return subprocess.CompletedProcess(
                words, code, out.read_text(encoding="utf-8"), err.read_text(encoding="utf-8")
            )

    @property
    def pid(self) -> int:
        """Return its process id."""
        return self._process.pid

    def close(self) -> None:
        """End it, and what it runs."""
        global _running
        _running = None
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()


_running: Warm | None = None


def _warm() -> Warm:
    global _running
    if _running is None:
        _running = Warm()
    return _running


def warm_pid() -> int | None:
    """Return the process that runs short commands, if it was needed; it ends with this one."""
    return None if _running is None else _running.pid


class Engine:
    """A demo's engine, running."""

    def __init__(self, process: subprocess.Popen[bytes], rings: Path) -> None:
        self.process = process
        self.rings = rings
        assert self.process.stdout is not None
        assert b"Ready" in self.process.stdout.readline()

    def attach(self) -> dict[str, Any]:
        """Take one look."""
        pid = str(self.process.pid)
        done = inferscope("attach", pid, "--once", "--json", rings=self.rings)
        assert done.returncode == 0, done.stderr
        (engine,) = json.loads(done.stdout)["engines"]
        return dict(engine)

    def wait_for(self, num_finished: int) -> dict[str, Any]:
        """Read snapshots until the given number of requests has finished."""
        end_s = time.monotonic() + _LATEST_S
        while (seen := self.attach())["num_finished"] < num_finished:
            assert time.monotonic() < end_s, f"only {seen['num_finished']} requests finished"
            time.sleep(0.2)
        return seen

    def wait_until_it_is(self, state: str) -> dict[str, Any]:
        """Look until its probe is in a state."""
        end_s = time.monotonic() + _LATEST_S
        while (found := (seen := self.attach())["health"]["probe_state"]) != state:
            assert time.monotonic() < end_s, f"its probe is {found}, and not {state}"
            time.sleep(0.2)
        return seen

    def kill(self) -> None:
        """End it as the kernel does to a process that takes too much memory."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """End it by its standard input."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=60)


@contextmanager
def running_engine(folder: Path, *, rate_s: float = 6.0) -> Iterator[Engine]:
    """Run a demo's engine while the context lasts."""
    rings = folder / "rings"
    settings = {
        "model": "builtin",
        "seed": 5,
        "duration_s": None,
        "load": 0.5,
        "rate_s": rate_s,
        "client_times": None,
        "options": {"token_budget": 40, "max_running": 16, "num_blocks": 144},
    }
    environment = {"INFERSCOPE_DIR": str(rings), "INFERSCOPE_ENGINE_ID": "under-test"}
    with child(
        [
            sys.executable,
            "-m",
            "inferscope.cli.demo.start",
            json.dumps({"type": "Settings", **settings}),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **environment},
    ) as process:
        yield Engine(process, rings)
