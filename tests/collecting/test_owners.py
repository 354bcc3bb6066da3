"""An engine id that rings of two users state: the collector follows one user's rings."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from inferscope.collecting.engines import Engines
from inferscope.ring import discovery
from tests.collecting.rings import Ring, Time
from tests.collector.scripts import Finals


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
        ring.tell()
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
