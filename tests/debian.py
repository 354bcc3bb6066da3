"""Programs of other people that tests run: those that Debian has, and `.ci/monitoring` installs."""

from __future__ import annotations

import os
import shutil
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.children import child

_LATEST_S = 60.0
_MISSING = "is not on PATH; Debian has it in the package "


def program(*names: str, package: str = "prometheus") -> str:
    """Return where a program is, by the first of its names that is there, or skip the test."""
    for name in names:
        found = shutil.which(name)
        if found is not None:
            return found
    pytest.skip(f"{names[0]} {_MISSING}{package}")


def alertmanager() -> str:
    """Return where Alertmanager is, or skip the test; Debian calls it otherwise than its makers."""
    return program("prometheus-alertmanager", "alertmanager", package="prometheus-alertmanager")


def missing_package(reason: str) -> str | None:
    """Return what was missing where a test was skipped for this reason; None for any other."""
    _, _, package = reason.partition(_MISSING)
    return package.strip(" .'\")") or None


@contextmanager
def serving(program: str, *options: str, log: Path) -> Iterator[str]:
    """Run Prometheus or Alertmanager on a free port of its own choice; yield its URL once ready."""
    words = [program, *options, "--web.listen-address=127.0.0.1:0"]
    with (
        log.open("wb") as out,
        child(words, stdout=out, stderr=out, env={**os.environ, "GOMAXPROCS": "1"}) as process,
    ):
        end_s = time.monotonic() + _LATEST_S
        while (url := _ready_at(process.pid)) is None:
            assert process.poll() is None, log.read_text(encoding="utf-8")
            assert time.monotonic() < end_s, f"{program} is not ready after {_LATEST_S} s"
            time.sleep(0.05)
        yield url


def _ready_at(pid: int) -> str | None:
    """Return the URL of a process that listens and is ready."""
    for port in _listening_ports(pid):
        url = f"http://127.0.0.1:{port}"
        with suppress(OSError), urllib.request.urlopen(f"{url}/-/ready", timeout=30):
            return url
    return None


def _listening_ports(pid: int) -> list[int]:
    """Return the IPv4 ports on which a process listens: a port chosen by us could be taken."""
    inodes = set()
    with suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                inodes.add(os.readlink(descriptor))
    table = Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()[1:]
    rows = [line.split() for line in table]
    return [
        int(row[1].rpartition(":")[2], 16)
        for row in rows
        if row[3] == "0A" and f"socket:[{row[9]}]" in inodes
    ]
