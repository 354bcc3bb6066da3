"""Rings that go out of sight, are replaced in place, or cannot be read any more."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from inferscope.daemon.engines import Engines
from inferscope.fold.fold import READER
from inferscope.readers.known_rings import MISSING_NS
from inferscope.readers.merge import Item
from inferscope.readers.ring_follower import RingFollower
from inferscope.records import FINISHED, QUEUED, ProbeHealth, RequestEvent, RingOpened
from tests.daemon.rings import SECOND_NS, Ring, Time
from tests.fold.scripts import Finals


class Host:
    """Engines of a folder, and a collector that follows them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "rings"
        self.time = Time()
        self.finals = Finals()
        self.engines: Engines | None = None

    def ring(self, engine_id: str = "made", **more: int) -> Ring:
        home = self.folder / engine_id
        home.mkdir(parents=True, exist_ok=True)
        return Ring(home, self.time, engine_id=engine_id, **more)

    def collect(self) -> None:
        self.engines = Engines(self.folder, sink=self.finals, clock=self.time)

    def go_on(self, seconds: float, *rings: Ring) -> None:
        for _ in range(round(2 * seconds)):
            self.time.now_ns += SECOND_NS // 2
            for ring in rings:
                ring.write_all()
            if self.engines is not None:
                self.engines.advance()

    def serve(self, ring: Ring, index: int, request_id: str) -> None:
        """Write the records of a whole request."""
        now_ns = self.time.now_ns
        ring.write(RequestEvent(now_ns, index, QUEUED, now_ns, request_id, prompt_tokens=3))
        ring.write(RequestEvent(now_ns, index, FINISHED, now_ns, reason="stop"))

    def counted(self) -> list[str]:
        return sorted(final.request_id for final in self.finals.requests)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_a_folder_that_is_out_of_sight_for_a_while_is_not_counted_again(host: Host) -> None:
    dead = host.ring("dead")
    host.go_on(1, dead)
    host.serve(dead, 0, "of before")
    dead.shut_down()
    host.go_on(60)
    host.collect()
    living = host.ring("living")
    host.go_on(3, living)
    host.serve(living, 0, "of now")
    host.go_on(3, living)
    assert host.counted() == ["of now"]
    away = host.folder.rename(host.folder.with_name("away"))
    host.go_on(3, living)
    away.rename(host.folder)
    host.serve(living, 1, "of later")
    host.go_on(3, living)
    assert host.counted() == ["of later", "of now"]


def test_rings_of_before_the_collector_that_come_into_sight_later_are_not_counted(
    host: Host,
) -> None:
    dead = host.ring("dead")
    host.go_on(1, dead)
    host.serve(dead, 0, "of before")
    dead.shut_down()
    away = host.folder.rename(host.folder.with_name("away"))
    host.go_on(60)
    host.collect()
    host.go_on(3)
    away.rename(host.folder)
    host.go_on(3)
    assert host.counted() == []


def test_a_ring_that_takes_the_place_of_a_dead_one_in_the_same_inode_is_followed(
    host: Host,
) -> None:
    host.collect()
    first = host.ring()
    host.go_on(3, first)
    host.serve(first, 0, "first")
    host.go_on(2, first)
    first.shut_down()
    first.close()
    host.go_on(70)  # its reader is closed by now
    elsewhere = Host(host.folder)
    elsewhere.time = host.time
    second = elsewhere.ring()
    second.write_all()
    elsewhere.serve(second, 0, "second")
    second.write_all()
    inode = first.path.stat().st_ino
    first.path.write_bytes(second.path.read_bytes())
    assert first.path.stat().st_ino == inode
    host.go_on(8)
    assert host.counted() == ["first", "second"]


def make_unreadable(follower: RingFollower, path: Path) -> int:
    """Make every read of an open ring fail; return its number."""
    ((number, reader),) = (each for each in follower._readers.items() if each[1].path == path)
    folder = os.open(path.parent, os.O_RDONLY)
    os.dup2(folder, reader._file)
    os.close(folder)
    return number


def test_a_ring_that_cannot_be_read_any_more_costs_only_itself(tmp_path: Path) -> None:
    time = Time()
    good, bad = Ring(tmp_path, time), Ring(tmp_path, time, pid=2)
    follower = RingFollower(lambda: [good.path, bad.path], time)
    for ring in (good, bad):
        ring.write_all()
    follower.poll()
    number = make_unreadable(follower, bad.path)
    time.now_ns += SECOND_NS
    good.write_all()
    rings_read = {item.ring for item in follower.poll() if not isinstance(item.record, RingOpened)}
    assert [str(bad.path) in note for note in follower.notes] == [True]
    assert len(rings_read - {number, READER}) == 1
    make_unreadable(follower, good.path)
    for ring in (good, bad):
        ring.path.unlink()
    time.now_ns += SECOND_NS
    follower.poll()
    assert len(follower.notes) == 2
    assert follower.has_ended
    follower.close()
    good.close()
    bad.close()


def health_of(items: list[Item]) -> list[tuple[int, int]]:
    return [(item.ring, item.t_ns) for item in items if isinstance(item.record, ProbeHealth)]


def test_a_ring_that_can_be_read_again_goes_on_where_it_ended(tmp_path: Path) -> None:
    time = Time()
    ring, began_ns = Ring(tmp_path, time), time.now_ns
    follower = RingFollower(lambda: [ring.path], time, stays=True)
    items: list[Item] = []
    for at in range(12):
        ring.write_all()
        time.now_ns += SECOND_NS // 2
        if at in (3, 8):
            make_unreadable(follower, ring.path)
        items += follower.poll()
    times_ns = [began_ns + at * SECOND_NS // 2 for at in range(12)]
    assert health_of(items) == [(1, at_ns) for at_ns in times_ns]
    assert [item.record.ring for item in items if isinstance(item.record, RingOpened)] == [1]
    assert len(follower.notes) == 1
    follower.close()
    ring.close()


def test_a_ring_that_cannot_be_opened_at_first_is_tried_again(tmp_path: Path) -> None:
    time = Time()
    ring = Ring(tmp_path, time)
    follower = RingFollower(lambda: [ring.path], time, stays=True)
    hidden = ring.path.with_suffix(".hidden")
    ring.path.rename(hidden)
    ring.path.touch()
    for _ in range(3):
        time.now_ns += SECOND_NS
        follower.poll()
    assert len(follower.notes) == 1
    ring.path.write_bytes(hidden.read_bytes())
    ring.close()
    time.now_ns += SECOND_NS
    assert any(isinstance(item.record, RingOpened) for item in follower.poll())
    assert len(follower.notes) == 1
    follower.close()


def test_a_process_that_seemed_dead_and_goes_on_is_followed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    time = Time()
    ring = Ring(tmp_path, time)
    follower = RingFollower(lambda: [ring.path], time, stays=True)
    items: list[Item] = []
    for pause_s in (1, 1, 70, 1, 1, 1, 1):
        ring.write_all()
        for _ in range(2):
            time.now_ns += pause_s * SECOND_NS // 2
            items += follower.poll()
    reports = health_of(items)
    assert [number for number, _ in reports] == [1] * 7
    assert len(set(reports)) == 7
    follower.close()
    ring.close()


def test_the_path_of_a_deleted_ring_is_forgotten_in_an_hour(host: Host) -> None:
    host.collect()
    first, second = host.ring(), host.ring(pid=2)
    host.go_on(3, first, second)
    first.shut_down()
    first.path.unlink()
    host.time.now_ns += MISSING_NS // 2
    host.go_on(1, second)
    assert host.engines is not None
    assert set(host.engines.rings()) == {first.path, second.path}
    host.time.now_ns += MISSING_NS // 2
    host.go_on(1, second)
    assert set(host.engines.rings()) == {second.path}
