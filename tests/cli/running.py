"""Running the command line as a user would, and what a demo leaves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any


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


def inferscope(
    *arguments: str, rings: Path, timeout_s: float = 90, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the command line as a user would, with a ring folder of its own."""
    return subprocess.run(
        [sys.executable, "-m", "inferscope", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env={**os.environ, "INFERSCOPE_DIR": str(rings), **environment},
        check=False,
    )


class Engine:
    """A demo's engine, running for as long as a test needs it."""

    def __init__(self, folder: Path, *, rate_s: float = 6.0) -> None:
        self.rings = folder / "rings"
        settings = {
            "model": "builtin",
            "seed": 5,
            "duration_s": None,
            "load": 0.5,
            "rate_s": rate_s,
            "client_times": None,
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "inferscope.cli.demo_start", json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={
                **os.environ,
                "INFERSCOPE_DIR": str(self.rings),
                "INFERSCOPE_ENGINE_ID": "under-test",
            },
        )
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
        """Look until so many requests have finished."""
        for _ in range(60):
            seen = self.attach()
            if seen["num_finished"] >= num_finished:
                return seen
            time.sleep(0.1)
        raise AssertionError(f"only {seen['num_finished']} requests finished")

    def wait_until_it_is(self, state: str) -> dict[str, Any]:
        """Look until its probe is in a state."""
        for _ in range(60):
            seen = self.attach()
            if seen["health"]["probe_state"] == state:
                return seen
            time.sleep(0.1)
        raise AssertionError(f"its probe is {seen['health']['probe_state']}, and not {state}")

    def kill(self) -> None:
        """End it as the kernel does to a process that takes too much memory."""
        self.process.kill()
        self.process.communicate()

    def stop(self) -> None:
        """End it by its standard input."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(timeout=60)
        self.process.stdout.close()
