from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from inferscope.errors import RingUnavailable
from inferscope.ring import discovery
from inferscope.ring.control import control_path, open_control
from inferscope.ring.discovery import (
    KEEP_DEAD_NS,
    boot_id,
    find_engines,
    find_rings,
    make_private,
    remove_old_rings,
    ring_directory,
)
from inferscope.ring.layout import MIN_CAPACITY, Identity
from inferscope.ring.writer import RingWriter

NOW = 10**12


def ring_at(folder: Path, name: str, *, beat_ns: int = 0, boot: str | None = None) -> RingWriter:
    folder.mkdir(exist_ok=True)
    me = Identity(name, "core", 0, 1, "host", boot or boot_id(), 1, 2)
    ring = RingWriter(folder / f"{name}.ring", me, capacity=MIN_CAPACITY)
    ring.beat(beat_ns)
    open_control(ring.path).close()
    return ring


def age(path: Path, by_ns: int = KEEP_DEAD_NS + 10**9) -> None:
    then = time.time_ns() - by_ns
    os.utime(path, ns=(then, then))


def test_old_rings_of_dead_processes_go_and_take_their_folder_with_them(tmp_path: Path) -> None:
    ring = ring_at(tmp_path / "old", "old")
    ring.close()
    age(ring.path)
    young = ring_at(tmp_path / "young", "young")
    young.close()
    assert remove_old_rings(tmp_path, NOW) == 1
    assert not ring.path.parent.exists()
    assert young.path.exists()
    assert control_path(young.path).exists()


def test_a_living_ring_is_never_removed_not_even_of_a_stopped_process(tmp_path: Path) -> None:
    beating = ring_at(tmp_path, "beating", beat_ns=NOW)
    stopped = ring_at(tmp_path, "stopped", beat_ns=1)  # its writer still holds it
    for ring in (beating, stopped):
        age(ring.path)
    assert remove_old_rings(tmp_path, NOW) == 0
    stopped.close()
    assert remove_old_rings(tmp_path, NOW) == 1
    assert beating.path.exists()


def test_beyond_the_bytes_the_oldest_dead_rings_go_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery, "KEEP_DEAD_BYTES", 2 * (MIN_CAPACITY + 4096))
    for number in range(4):
        ring = ring_at(tmp_path, f"ring-{number}")
        ring.close()
        age(ring.path, number * 10**9)
    assert remove_old_rings(tmp_path, NOW) == 2
    assert sorted(path.name for path in tmp_path.glob("*.ring")) == ["ring-0.ring", "ring-1.ring"]


def test_links_and_what_is_no_ring_are_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "rings"
    elsewhere = ring_at(tmp_path / "elsewhere", "target")
    elsewhere.close()
    age(elsewhere.path)
    folder.mkdir()
    (folder / "link.ring").symlink_to(elsewhere.path)
    (folder / "linked").symlink_to(elsewhere.path.parent)
    os.mkfifo(folder / "pipe.ring")
    (folder / "foreign.ring").write_bytes(b"precious")
    age(folder / "foreign.ring")
    assert remove_old_rings(folder, NOW) == 0
    assert elsewhere.path.exists()
    assert (folder / "foreign.ring").exists()
    assert (folder / "link.ring").is_symlink()


def test_half_made_rings_of_killed_writers_go_after_a_day(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.ring.partial").write_bytes(b"x")
    age(tmp_path / "a.ring.partial")
    remove_old_rings(tmp_path, NOW)
    assert [path.name for path in tmp_path.iterdir()] == ["b.ring.partial"]


def test_a_ring_that_vanishes_under_the_search_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring = ring_at(tmp_path, "a")
    monkeypatch.setattr(
        discovery, "_rings_under", lambda folder: [tmp_path / "gone.ring", ring.path]
    )
    assert [found.path for found in find_rings(tmp_path)] == [ring.path]


def test_a_heartbeat_from_the_future_or_another_boot_is_no_life(tmp_path: Path) -> None:
    ring_at(tmp_path, "future", beat_ns=1 << 62)
    ring_at(tmp_path, "reboot", beat_ns=NOW, boot="another")
    ring_at(tmp_path, "alive", beat_ns=NOW)
    alive = [e.engine_id for e in find_engines(tmp_path) if e.is_alive(NOW)]
    assert alive == ["alive"]


@pytest.mark.skipif(os.geteuid() != 0, reason="giving files away needs root")
def test_a_folder_or_link_of_somebody_else_is_refused(tmp_path: Path) -> None:
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    mine.mkdir()
    theirs.mkdir(mode=0o700)
    os.chown(theirs, 12345, 12345)
    link = tmp_path / "link"
    link.symlink_to(mine)
    os.chown(link, 12345, 12345, follow_symlinks=False)
    for folder in (theirs, link):
        with pytest.raises(RingUnavailable, match="belongs to uid 12345"):
            make_private(folder)
    make_private(mine)


def test_a_folder_is_made_for_its_owner_alone(tmp_path: Path) -> None:
    make_private(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700
    (tmp_path / "file").touch()
    with pytest.raises(RingUnavailable, match="cannot make the folder"):
        make_private(tmp_path / "file")


def test_the_folder_is_the_configured_one_then_the_runtime_one_then_tmp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFERSCOPE_DIR", "/some/where")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert ring_directory() == Path("/some/where")
    monkeypatch.delenv("INFERSCOPE_DIR")
    assert ring_directory() == tmp_path / "inferscope"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "missing"))
    assert ring_directory() == Path(f"/tmp/inferscope-{os.getuid()}")
