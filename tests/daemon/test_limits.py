"""Limits of what a collector follows: engines, another user's part of them, and whose samplers."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest

from inferscope.daemon.config import PinSettings, SloSettings
from inferscope.daemon.engines import FORGET_NS, Engines
from inferscope.daemon.incidents import Incidents
from inferscope.daemon.pins import Pins
from inferscope.records import RUNNING, SAMPLER_ROLE, Live
from inferscope.ring.discovery import boot_id
from inferscope.ring.layout import Identity
from inferscope.ring.writer import RingWriter
from inferscope.sampler.sampler_ring import SamplerRing
from inferscope.sampler.source import sample
from tests.daemon.rings import Ring, Time
from tests.fold.scripts import Finals

OTHER_UID = 12345
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="giving files away needs root")


class Host:
    """A folder of rings that all users may write to, and a collector of it."""

    def __init__(self, folder: Path, *, most: int) -> None:
        folder.mkdir()
        folder.chmod(0o1777)
        self.folder = folder
        self.time = Time()
        self.rings: dict[str, Ring] = {}
        self.engines = Engines(folder, sink=Finals(), clock=self.time, most=most)

    def start(self, engine_id: str, *, uid: int | None = None) -> None:
        """Start an engine, and look for it until it is followed or refused."""
        home = self.folder / engine_id
        home.mkdir()
        ring = self.rings[engine_id] = Ring(home, self.time, engine_id=engine_id)
        if uid is not None:
            for path in (home, ring.path):
                os.chown(path, uid, uid)
        self.look()

    def look(self) -> None:
        """Advance engines and collector by two seconds."""
        for _ in range(4):
            self.time.now_ns += 500_000_000
            for ring in self.rings.values():
                ring.write_all()
            self.engines.advance()

    def followed(self) -> list[str]:
        return [view.engine_id for view in self.engines.snapshot().engines]

    def close(self) -> None:
        self.engines.close()
        for ring in self.rings.values():
            ring.close()


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    host = Host(tmp_path / "rings", most=4)
    yield host
    host.close()


def test_engines_beyond_the_maximum_are_counted_and_followed_when_there_is_room(
    host: Host,
) -> None:
    for number in range(6):
        host.start(f"e{number}")
    assert host.followed() == ["e0", "e1", "e2", "e3"]
    assert host.engines.num_refused["engines"] == 2
    assert sum("max_engines is 4" in note for note in host.engines.notes) == 2
    host.rings.pop("e0").shut_down()
    (host.folder / "e0" / "core-0-1.ring").unlink()
    host.time.now_ns += FORGET_NS
    host.look()
    host.look()
    assert host.followed() == ["e1", "e2", "e3", "e4"]
    assert host.engines.num_refused["engines"] == 2, "each once, however often it is tried"


@needs_root
def test_another_user_has_half_of_the_engines_at_most(host: Host) -> None:
    for number in range(4):
        host.start(f"theirs{number}", uid=OTHER_UID)
    for number in range(3):
        host.start(f"ours{number}")
    assert host.followed() == ["theirs0", "theirs1", "ours0", "ours1"]
    assert host.engines.num_refused["engines"] == 3
    assert host.engines.snapshot().guests == {"theirs0": OTHER_UID, "theirs1": OTHER_UID}


@needs_root
def test_an_engine_is_not_measured_by_another_users_sampler(host: Host) -> None:
    home = host.folder / SAMPLER_ROLE
    home.mkdir()
    me = Identity(SAMPLER_ROLE, SAMPLER_ROLE, 0, 7, "host", boot_id(), host.time.now_ns, 0)
    path = home / "sampler-0-7.ring"
    tape = SamplerRing(RingWriter(path, me, capacity=1 << 18), host.time)
    for each in (home, path):
        os.chown(each, OTHER_UID, OTHER_UID)
    host.start("ours")
    host.start("theirs", uid=OTHER_UID)
    for _ in range(10):
        now_ns = host.time.now_ns
        window = {"start_ns": now_ns - 100_000_000, "end_ns": now_ns}
        tape.put([sample("gpm", "GPU-1", values={"busy_share": 1.0}, **window)])
        tape.tend(cost_ns=0)
        host.look()
    seen = {
        name: engine._source.collector.samplers.num_samples
        for name, engine in host.engines._followed.items()
    }
    assert seen["ours"] == 0
    assert seen["theirs"] > 0
    tape.close(cost_ns=0)


@needs_root
@pytest.mark.parametrize("is_in_own_folder", [True, False])
def test_a_spoofed_engine_id_changes_nothing_of_the_victim(
    host: Host, tmp_path: Path, is_in_own_folder: bool
) -> None:
    host.start("victim", uid=OTHER_UID)
    pins = Pins(
        PinSettings(tmp_path / "pins"), lambda: [], clock=host.time, log_line=lambda _: None
    )
    incidents = Incidents(pins, on=("engine_lost",), slo=SloSettings())
    victim = host.rings["victim"]
    columns = ([1], [RUNNING], [8], [0], [host.time.now_ns])
    of = [array(kind, column).tobytes() for kind, column in zip("IBIIq", columns, strict=True)]
    victim.in_flight = Live(host.time.now_ns, *of, request_ids=("r",))
    victim.write(victim.in_flight)
    host.look()
    incidents.on_snapshot(host.engines.snapshot())
    (before,) = host.engines.snapshot().engines
    assert before.num_running == 1

    home = host.folder / ("spoof" if is_in_own_folder else "victim")
    home.mkdir(exist_ok=True)
    spoof = Ring(home, host.time, engine_id="victim", pid=2)
    for path in (home, spoof.path) if is_in_own_folder else (spoof.path,):
        os.chown(path, OTHER_UID + 1, OTHER_UID + 1)
    host.rings["spoof"] = spoof
    host.look()
    spoof.shut_down()
    del host.rings["spoof"]
    for _ in range(6):
        host.look()
        incidents.on_snapshot(host.engines.snapshot())
    (after,) = host.engines.snapshot().engines
    assert (after.is_alive, after.num_running, after.num_replaced) == (True, 1, 0)
    assert host.engines.num_refused["owner"] == is_in_own_folder, "others' files there are not read"
    lines = [note for note in host.engines.notes if str(spoof.path) in note]
    assert len(lines) == is_in_own_folder, "logged once, however often it is seen"
    for line in lines:
        assert line.endswith("is ignored: its engine id victim belongs to another directory")
    pins.close()
    assert not list(tmp_path.glob("pins/*"))
