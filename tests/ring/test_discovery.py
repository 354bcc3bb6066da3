from __future__ import annotations

import errno
import fcntl
import os
import time
from pathlib import Path

import pytest

from inferscope.cli.targets import engine_of, rings_of
from inferscope.daemon.lock import only_collector
from inferscope.errors import InferScopeError, NotFound, RingUnavailable
from inferscope.probe import EngineInfo, Probe
from inferscope.records import SAMPLER_ROLE
from inferscope.ring import discovery
from inferscope.ring.access import closed_under
from inferscope.ring.control import control_path, open_control
from inferscope.ring.discovery import (
    KEEP_DEAD_NS,
    EngineRings,
    boot_id,
    find_engines,
    find_rings,
    make_private,
    remove_old_rings,
    ring_directory,
    search_directories,
)
from inferscope.ring.layout import (
    CLAIM,
    HEAD,
    MIN_CAPACITY,
    PAGE,
    SEQUENCE,
    WORD,
    Identity,
    pack_header,
)
from inferscope.ring.profile_request import error_path, partial_paths, request_path, trace_path
from inferscope.ring.writer import RingWriter

NOW = 10**12
LATER = 10**15
HOUR_NS = 3600 * 10**9


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
    beating = ring_at(tmp_path, "beating", beat_ns=LATER)
    stopped = ring_at(tmp_path, "stopped", beat_ns=1)  # its writer still holds it
    for ring in (beating, stopped):
        age(ring.path)
    assert remove_old_rings(tmp_path, LATER) == 0
    stopped.close()
    assert remove_old_rings(tmp_path, LATER) == 1
    assert beating.path.exists()


def test_the_age_of_a_dead_ring_is_that_of_its_last_heartbeat_not_of_its_file(
    tmp_path: Path,
) -> None:
    # On tmpfs a mapped file keeps the time of its creation, however long it is written.
    crashed = ring_at(tmp_path, "crashed", beat_ns=LATER - 10**10)
    crashed.close()
    age(crashed.path)
    assert remove_old_rings(tmp_path, LATER) == 0
    assert remove_old_rings(tmp_path, LATER + KEEP_DEAD_NS) == 1


@pytest.mark.parametrize(("beat_ago_ns", "is_held", "num"), [
    (HOUR_NS, False, 0),
    (KEEP_DEAD_NS + HOUR_NS, True, 0),
    (KEEP_DEAD_NS + HOUR_NS, False, 1),
])  # fmt: skip
def test_a_ring_of_another_boot_goes_a_day_after_its_last_heartbeat_if_nothing_holds_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    beat_ago_ns: int,
    is_held: bool,
    num: int,
) -> None:
    monkeypatch.setattr(discovery, "KEEP_DEAD_BYTES", 0)  # another host's is not ours to judge
    start_real_ns = time.time_ns() - 48 * HOUR_NS
    me = Identity("other", "core", 0, 1, "elsewhere", "another boot", 5, start_real_ns)
    ring = RingWriter(tmp_path / "other.ring", me, capacity=MIN_CAPACITY)
    ring.beat(5 + 48 * HOUR_NS - beat_ago_ns)
    if not is_held:
        ring.close()
    assert remove_old_rings(tmp_path, LATER) == num
    ring.close()


def test_what_stands_beside_a_dead_ring_goes_with_it(tmp_path: Path) -> None:
    ring = ring_at(tmp_path / "engine", "core-0-1")
    ring.close()
    answers = trace_path(ring.path), error_path(ring.path), *partial_paths(ring.path)
    for path in (request_path(ring.path), *answers):
        path.write_bytes(b"x")
    age(ring.path)
    assert remove_old_rings(tmp_path, NOW) == 1
    assert list(tmp_path.iterdir()) == []


def test_what_a_ring_has_left_behind_goes_after_a_day(tmp_path: Path) -> None:
    for name in ("old", "new"):
        home = tmp_path / name
        home.mkdir()
        partial = partial_paths(home / "core-0-1.ring")[1].name
        for left in ("core-0-1.control", "core-0-1.trace.json", partial):
            (home / left).write_bytes(b"x")
            if name == "old":
                age(home / left)
        (home / "notes-1.profile").write_bytes(b"not ours")
        age(home / "notes-1.profile")
    (tmp_path / "only").mkdir()
    (tmp_path / "only" / "core-0-1.2.control").write_bytes(b"x")
    age(tmp_path / "only" / "core-0-1.2.control")
    remove_old_rings(tmp_path, NOW)
    assert not (tmp_path / "only").exists()
    assert [path.name for path in (tmp_path / "old").iterdir()] == ["notes-1.profile"]
    assert len(list((tmp_path / "new").iterdir())) == 4


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


def test_of_the_engine_that_died_last_a_ring_of_each_rank_is_kept_beyond_the_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery, "KEEP_DEAD_BYTES", 0)
    # The devices' sampler, three lives of one engine from the last on, an engine that died before.
    lives = ((SAMPLER_ROLE, 4), ("a", 3), ("a", 2), ("a", 1), ("b", 1))
    for number, (home, pid) in enumerate(lives):
        (tmp_path / home).mkdir(exist_ok=True)
        for rank in range(3):
            role = SAMPLER_ROLE if home == SAMPLER_ROLE else "rank"
            me = Identity(home, role, rank, pid, "host", boot_id(), 1, 2)
            path = tmp_path / home / f"rank-{rank}-{pid}.ring"
            RingWriter(path, me, capacity=MIN_CAPACITY).close()
            age(path, (number + 1) * 10**9)
    assert remove_old_rings(tmp_path, NOW) == 12
    kept = [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.ring")]
    assert sorted(kept) == [f"a/rank-{rank}-3.ring" for rank in range(3)]


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


def test_a_search_looks_into_engines_folders_and_no_deeper(tmp_path: Path) -> None:
    found = [ring_at(tmp_path, "top").path, ring_at(tmp_path / "engine", "engine").path]
    deep = tmp_path / "data" / "deep"
    deep.mkdir(parents=True)
    ring_at(deep, "deep")
    assert {ring.path for ring in find_rings(tmp_path)} == set(found)


def test_a_new_ring_by_the_name_of_a_dead_one_is_not_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring = ring_at(tmp_path, "ring")
    ring.close()
    age(ring.path)
    flock, rings = fcntl.flock, []

    def race(handle: int, operation: int) -> None:
        if not rings:  # another process's cleanup, and a new process, just before
            rings.append(ring)
            ring.path.unlink()
            rings.append(ring_at(tmp_path, "ring", beat_ns=NOW))
        flock(handle, operation)

    monkeypatch.setattr("fcntl.flock", race)
    assert remove_old_rings(tmp_path, NOW) == 0
    assert ring.path.exists()
    assert control_path(ring.path).exists()
    rings[1].close()


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


def test_a_large_ring_without_frames_and_with_another_clock_is_not_searched_as_a_whole(
    tmp_path: Path,
) -> None:
    num_bytes = 1 << 30
    page = bytearray(pack_header(Identity("a", "core", 0, 1, "host", boot_id(), 1, 1), num_bytes))
    for word, value in ((CLAIM, num_bytes), (HEAD, num_bytes), (SEQUENCE, 5)):
        WORD.pack_into(page, word, value)
    (tmp_path / "a").mkdir()
    with (tmp_path / "a" / "core-0-1.ring").open("wb") as file:
        file.write(page)
        file.truncate(PAGE + num_bytes)  # sparse

    def num_read_bytes() -> int:
        counters = Path("/proc/thread-self/io").read_text(encoding="ascii")
        return int(counters.split()[1])  # rchar

    before = num_read_bytes()
    assert len(list(find_rings(tmp_path))) == 1
    assert num_read_bytes() - before < 32 << 20


def test_a_heartbeat_from_the_future_or_another_boot_is_no_life(tmp_path: Path) -> None:
    ring_at(tmp_path, "future", beat_ns=1 << 62)
    ring_at(tmp_path, "reboot", beat_ns=NOW, boot="another")
    ring_at(tmp_path, "alive", beat_ns=NOW)
    alive = [e.engine_id for e in find_engines(tmp_path) if e.is_alive(NOW)]
    assert alive == ["alive"]


@pytest.mark.skipif(os.geteuid() != 0, reason="giving files away needs root")
def test_folder_or_link_of_another_user_is_refused(tmp_path: Path) -> None:
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


@pytest.fixture
def tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in /tmp's place, with nothing in the environment that names one for rings."""
    monkeypatch.setattr(discovery, "_TMP", tmp_path / "tmp")
    (tmp_path / "tmp").mkdir()
    (tmp_path / "runtime").mkdir()
    monkeypatch.delenv("INFERSCOPE_DIR", raising=False)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setenv("INFERSCOPE_RING_MB", "0.25")
    return tmp_path / "tmp"


def test_the_folder_is_the_configured_one_then_one_in_tmp(
    tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = tmp / f"inferscope-{os.getuid()}"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp.parent / "runtime"))
    assert ring_directory() == usual
    usual.symlink_to(tmp)  # another user has taken the name
    assert ring_directory() == tmp.parent / "runtime" / "inferscope"
    assert usual not in search_directories()
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert ring_directory() == usual  # and making it private reports what is wrong
    assert usual not in search_directories()
    monkeypatch.setenv("INFERSCOPE_DIR", "/some/where")
    assert ring_directory() == Path("/some/where")
    assert search_directories() == (Path("/some/where"),)


@pytest.mark.parametrize("service_has_runtime", [False, True])
def test_a_service_and_a_shell_meet_whichever_of_them_has_a_runtime_folder(
    tmp: Path, monkeypatch: pytest.MonkeyPatch, service_has_runtime: bool
) -> None:
    runtime = str(tmp.parent / "runtime")
    if service_has_runtime:
        monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
    service = Probe.open(EngineInfo(0, "test"))
    if service_has_runtime:
        monkeypatch.delenv("XDG_RUNTIME_DIR")
    else:
        monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
    found = [ring.path for engine in find_engines() for ring in engine.rings]
    assert found == [service.path]
    service.close()


def test_an_engine_with_rings_in_two_places_is_one_engine(
    tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp.parent / "runtime"))
    usual, runtime = tmp / f"inferscope-{os.getuid()}", tmp.parent / "runtime" / "inferscope"
    for folder, name in ((usual, "core"), (runtime, "worker")):
        (folder / "engine").mkdir(parents=True)
        me = Identity("engine", name, 0, 1, "host", boot_id(), 1, 2)
        RingWriter(folder / "engine" / f"{name}-0-1.ring", me, capacity=MIN_CAPACITY)
    (engine,) = find_engines()
    assert len(engine.rings) == 2
    first = EngineRings("engine", engine.rings[:1])
    assert len([path for path in rings_of(first)() if path.suffix == ".ring"]) == 2


def test_a_folder_of_ours_that_is_open_to_others_is_closed(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    assert "mode 0777" in make_private(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert make_private(folder) == ""
    folder.chmod(0o1777)  # as /tmp is: a user cannot remove another's files
    assert make_private(folder) == ""
    assert folder.stat().st_mode & 0o7777 == 0o1777


def test_a_folder_of_ours_that_its_group_may_write_to_is_closed_for_writing(tmp_path: Path) -> None:
    folder = tmp_path / "group"
    folder.mkdir()
    folder.chmod(0o2775)
    assert "mode 2775" in make_private(folder)
    assert folder.stat().st_mode & 0o777 == 0o755
    assert make_private(folder) == ""
    folder.chmod(0o770)
    assert make_private(folder, group_id=os.getgid()) == ""  # it has to be able to read
    assert folder.stat().st_mode & 0o777 == 0o750
    folder.chmod(0o1770)
    assert make_private(folder) == ""
    assert folder.stat().st_mode & 0o7777 == 0o1770


def test_a_probe_states_that_it_has_closed_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("INFERSCOPE_DIR", str(tmp_path / "open"))
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    Probe.open(EngineInfo(0, "test")).close()
    assert "was open to other users" in caplog.text
    assert (tmp_path / "open").stat().st_mode & 0o777 == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="giving files away needs root")
def test_rings_that_another_user_has_put_there_are_not_read(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    planted = ring_at(tmp_path / "engine", "planted")
    os.chown(planted.path, 12345, 12345)
    foreign = ring_at(tmp_path / "foreign", "foreign")
    for path in (foreign.path, foreign.path.parent):
        os.chown(path, 12345, 12345)
    ours = ring_at(tmp_path / "ours", "ours")
    assert [ring.path for ring in find_rings(tmp_path)] == [ours.path]
    tmp_path.chmod(0o777)  # a volume that users share: each engine's folder is its user's
    found = [ring.path for ring in find_rings(tmp_path)]
    assert found == [foreign.path, ours.path]


def give(path: Path, uid: int) -> None:
    """Make a folder and all in it another user's."""
    for each in (path, *path.rglob("*")):
        os.chown(each, uid, uid)


@pytest.mark.skipif(os.geteuid() != 0, reason="giving files away needs root")
def test_root_reads_private_folders_of_services_only_where_systemd_made_them(tmp: Path) -> None:
    real, fake = (tmp / f"systemd-private-{name}" for name in ("real", "fake"))
    for each in (real, fake):
        (each / "tmp" / "inferscope-12345" / "engine").mkdir(parents=True)
        me = Identity("engine", each.name, 0, 1, "host", boot_id(), 1, 2)
        ring = each / "tmp" / "inferscope-12345" / "engine" / "core-0-1.ring"
        RingWriter(ring, me, capacity=MIN_CAPACITY)
        give(each / "tmp" / "inferscope-12345", 12345)
    assert {ring.identity.role for ring in find_rings()} == {real.name, fake.name}
    os.chown(fake, 12345, 12345)
    assert {ring.identity.role for ring in find_rings()} == {real.name}
    os.chown(real / "tmp", 12345, 12345)
    assert list(find_rings()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="giving files away needs root")
@pytest.mark.parametrize("mode", [0o1777, 0o770, 0o755])
def test_in_a_shared_folder_a_ring_states_the_engine_of_its_folder(
    tmp_path: Path, mode: int
) -> None:
    shared = tmp_path / "shared"
    for home in ("victim", "other", "evil"):
        (shared / home).mkdir(parents=True)
        stated = "victim" if home == "evil" else home
        me = Identity(stated, "core", 0, 1, "host", boot_id(), 1, 2)
        RingWriter(shared / home / "core-0-1.ring", me, capacity=MIN_CAPACITY)
    give(shared / "victim", 11111)
    give(shared / "other", 12345)
    give(shared / "evil", 12345)
    shared.chmod(mode)  # also a volume of root's: each user's engines are read
    found = {engine.engine_id: [r.path for r in engine.rings] for engine in find_engines(shared)}
    assert found == {name: [shared / name / "core-0-1.ring"] for name in ("victim", "other")}
    # A user's own folder holds copies under any name, for root as well.
    give(shared, 12345)
    shared.chmod(0o700)
    assert shared / "evil" / "core-0-1.ring" in [ring.path for ring in find_rings(shared)]


@pytest.mark.skipif(os.geteuid() != 0, reason="giving files away needs root")
def test_an_engine_id_of_two_users_is_two_engines(tmp: Path) -> None:
    usual = tmp / f"inferscope-{os.getuid()}"
    private = tmp / "systemd-private-x" / "tmp" / "inferscope-12345"
    for folder in (usual, private):
        (folder / "engine").mkdir(parents=True)
        ring_at(folder / "engine", "engine")
    give(private, 12345)
    engines = {engine.rings[0].owner: engine for engine in find_engines()}
    assert {owner: len(engine.rings) for owner, engine in engines.items()} == {0: 1, 12345: 1}
    for owner, engine in engines.items():
        folder = usual if owner == 0 else private
        assert list(rings_of(engine)()) == [folder / "engine" / "engine.ring"]
    with pytest.raises(NotFound, match="2 users have an engine engine"):
        engine_of("engine")


@pytest.mark.thorough
def test_folders_below_the_engines_are_not_looked_into(tmp_path: Path) -> None:
    ring_at(tmp_path / "engine", "engine").close()
    deep = [tmp_path / "engine"]
    for _ in range(1100):  # more than a recursion can go into
        deep.append(deep[-1] / "d")
        deep[-1].mkdir()
    try:
        assert list(closed_under(tmp_path)) == []
        assert [engine.engine_id for engine in find_engines(tmp_path)] == ["engine"]
    finally:
        for folder in reversed(deep[1:]):
            folder.rmdir()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a folder of another user")
def test_engines_in_a_folder_that_another_user_made_first_are_left_out(tmp: Path) -> None:
    folder = tmp / f"inferscope-{os.getuid()}"
    folder.mkdir()
    ring_at(folder / "prod", "prod", beat_ns=time.monotonic_ns()).close()
    assert [engine.engine_id for engine in find_engines()] == ["prod"]
    for path in (folder, *folder.rglob("*")):
        os.chown(path, 4321, 4321)
    assert find_engines() == []


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_without_locks_rings_are_removed_by_their_heartbeat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def flock(handle: int, how: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    now_ns = time.monotonic_ns()
    for name, beat_ns in (("dead", 0), ("alive", now_ns)):
        ring = ring_at(tmp_path / name, name, beat_ns=beat_ns)
        ring.close()
        age(ring.path)
    assert remove_old_rings(tmp_path, now_ns) == 1
    assert [engine.engine_id for engine in find_engines(tmp_path)] == ["alive"]
    with pytest.raises(InferScopeError, match="does not support locks"), only_collector(tmp_path):
        pass
