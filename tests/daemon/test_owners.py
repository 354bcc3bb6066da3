"""An engine id that rings of two users state: the collector follows one user's rings."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from inferscope.cli.targets import rings_of
from inferscope.daemon.engines import Engines
from inferscope.records import SAMPLER_ROLE
from inferscope.ring import discovery
from inferscope.ring.discovery import find_engines
from tests.daemon.rings import Ring, Time
from tests.fold.scripts import Finals


@pytest.mark.skipif(os.geteuid() != 0, reason="giving files away needs root")
def test_rings_of_another_user_are_not_folded_into_an_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery, "_TMP", tmp_path)
    monkeypatch.delenv("INFERSCOPE_DIR", raising=False)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    theirs = tmp_path / "systemd-private-x" / "tmp" / "inferscope-12345"
    ours = tmp_path / f"inferscope-{os.getuid()}"
    time, rings = Time(), []
    for number, folder in enumerate((theirs, ours)):
        (folder / "engine").mkdir(parents=True)
        rings.append(Ring(folder / "engine", time, engine_id="engine", pid=number))
    for path in (theirs, *theirs.rglob("*")):
        os.chown(path, 12345, 12345)
    for ring in rings:
        ring.write_all()
    engines = Engines(ours, sink=Finals(), clock=time)
    for ring in rings:
        ring.pass_time(1)
    engines.advance()
    assert [path.parent.parent for path in engines.rings()] == [ours]
    assert ["uid 12345" in note for note in engines.notes] == [True]
    assert engines.num_refused == {"owner": 1, "engines": 0, "rings": 0}
    engines.close()
    for ring in rings:
        ring.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="giving files away needs root")
def test_samples_of_another_user_are_not_folded_into_an_engine(tmp_path: Path) -> None:
    """They could state anything of a device: its energy, and what its tenants are billed."""
    shared, time, rings = tmp_path / "rings", Time(), {}
    for name, uid in (("engine", 12345), ("own", 12345), ("host", 0), ("evil", 11111)):
        home = shared / name
        home.mkdir(parents=True)
        role = "core" if name == "engine" else SAMPLER_ROLE
        rings[name] = Ring(home, time, role=role, engine_id=name)
        for path in (home, *home.iterdir()):
            os.chown(path, uid, uid)
        rings[name].write_all()
    shared.chmod(0o1777)
    engines = Engines(shared, sink=Finals(), clock=time)
    for _ in range(4):
        for ring in rings.values():
            ring.write_all()
        time.now_ns += 1_000_000_000
        engines.advance()
    (followed,) = engines._followed.values()
    assert {path.parent.name for path in followed._source._follower._find()} == {
        "engine",
        "own",
        "host",
    }
    engines.close()
    (engine,) = find_engines(shared)
    (shared / SAMPLER_ROLE).mkdir()
    ring = Ring(shared / SAMPLER_ROLE, time, role=SAMPLER_ROLE, engine_id=SAMPLER_ROLE)
    assert ring.path in rings_of(engine)()
    os.chown(ring.path, 11111, 11111)
    assert ring.path not in rings_of(engine)()
    for each in (*rings.values(), ring):
        each.close()
