"""`on` and `off` with rings whose control byte is missing, or is something else."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from inferscope.ring.control import SWITCHED_OFF, control_path, open_control
from inferscope.ring.discovery import boot_id
from inferscope.ring.layout import MIN_CAPACITY, Identity
from inferscope.ring.writer import RingWriter
from tests.cli.running import inferscope


def ring_of(folder: Path, pid: int, *, start_ns: int, is_alive: bool) -> Path:
    folder.mkdir(exist_ok=True)
    me = Identity("engine", "core", 0, pid, "host", boot_id(), start_ns, start_ns)
    ring = RingWriter(folder / f"core-0-{pid}.ring", me, capacity=MIN_CAPACITY)
    ring.beat(time.monotonic_ns() + 3_000_000_000 if is_alive else 0)
    ring.close()
    open_control(ring.path).close()
    return ring.path


@pytest.mark.parametrize("what", ["nothing", "a pipe"])
def test_a_living_probe_is_switched_whatever_stands_beside_a_dead_ring(
    tmp_path: Path, what: str
) -> None:
    folder = tmp_path / "engine"
    dead = ring_of(folder, 1, start_ns=1, is_alive=False)
    control_path(dead).unlink()
    if what == "a pipe":
        os.mkfifo(control_path(dead))
    living = ring_of(folder, 2, start_ns=2, is_alive=True)
    done = inferscope("off", "engine", rings=tmp_path, timeout_s=30)
    assert control_path(living).read_bytes() == bytes([SWITCHED_OFF]), done.stderr
    assert done.returncode == 0, done.stderr


def test_all_that_can_be_switched_are_before_a_failure_is_reported(tmp_path: Path) -> None:
    folder = tmp_path / "engine"
    closed = ring_of(folder, 1, start_ns=1, is_alive=True)
    control_path(closed).unlink()
    other = ring_of(folder, 2, start_ns=2, is_alive=True)
    done = inferscope("off", "engine", rings=tmp_path)
    assert done.returncode == 1
    assert str(control_path(closed)) in done.stderr
    assert control_path(other).read_bytes() == bytes([SWITCHED_OFF])
