"""Names of requests can be kept out of all that is recorded, and still be asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from inferscope.probe import EngineInfo, Probe
from inferscope.probe.ids import digits, hiding
from tests.cli.running import inferscope

NAME, OTHER = "mrs-smith-17", "mr-jones-3"


@pytest.mark.process
@pytest.mark.parametrize("asked", ["hash", "yes"])
def test_names_are_in_no_ring_and_find_their_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    monkeypatch.setenv("INFERSCOPE_DIR", str(tmp_path))
    monkeypatch.setenv("INFERSCOPE_RING_MB", "4")
    monkeypatch.setenv("INFERSCOPE_ENGINE_ID", "discreet")
    monkeypatch.setenv("INFERSCOPE_IDS", asked)
    probe = Probe.open(EngineInfo(0, "by-hand", "1.0", model="none"))
    # As a front end and a core have it: one request, recorded twice under the same name.
    first = probe.received(f"cmpl-{NAME}", external_id=NAME)
    again = probe.queued(f"cmpl-{NAME}", external_id=NAME, parent=OTHER, prompt_tokens=3)
    probe.admitted(again)
    probe.transferred(again, 10, start_ns=1, end_ns=2, peer="prefill", peer_request_id=OTHER)
    for index in (first, again):
        probe.finished(index, "stop")
    probe.close()
    (ring,) = tmp_path.glob("**/*.ring")
    raw = ring.read_bytes()
    assert not any(word in raw for word in (b"smith", b"jones"))
    assert digits(NAME).encode() in raw
    assert digits(OTHER).encode() in raw
    for name in (NAME, f"cmpl-{NAME}", digits(NAME)):
        done = inferscope("why", name, str(ring), "--json", "--pick", "1", rings=tmp_path)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["facts"]["row"]["external_id"] == digits(NAME)
    missing = inferscope("why", "unknown", str(ring), rings=tmp_path)
    assert "no request ID begins with" in missing.stderr


def test_digits_are_the_same_everywhere_and_others_for_others() -> None:
    assert digits("a") == digits(b"a") == "5dba2de31c9e07df"
    assert len({digits(name) for name in ("a", "b", "", "\ud800", "ä" * 300)}) == 5
    assert hiding({}) is None
