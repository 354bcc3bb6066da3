"""Rings are private to their owner or a named group; other users get one line about it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from inferscope.ring.profile_request import error_path, request_path
from tests.daemon.other_user import as_user, can_run_as, open_folder
from tests.daemon.running import collecting, engine_by_hand, eventually

ENGINE_UID, READER_UID, GROUP = 64_321, 64_322, 64_242

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(
        os.geteuid() != 0 or not can_run_as(ENGINE_UID),
        reason="only root can become others, who have to be able to read this interpreter",
    ),
]
PRIVATE = (*as_user(ENGINE_UID), "env", "-u", "INFERSCOPE_GROUP")
SHARED = (*as_user(ENGINE_UID, ENGINE_UID, GROUP), "env", f"INFERSCOPE_GROUP={GROUP}")
"""An engine in a group that it lets read, as the DaemonSet's patch has it."""
STRANGER, MEMBER = as_user(READER_UID), as_user(READER_UID, GROUP)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that all users reach, with the rings' in it: as /tmp is, anybody's to write in."""
    with open_folder() as made:
        (made / "rings").mkdir()
        (made / "rings").chmod(0o1777)
        yield made


def command(within: Sequence[str], *words: str, rings: Path) -> subprocess.CompletedProcess[str]:
    """Run a command as another user."""
    return subprocess.run(
        [*within, sys.executable, "-m", "inferscope", *words],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "INFERSCOPE_DIR": str(rings)},
        check=False,
    )


def modes(rings: Path) -> dict[str, int]:
    """Return what may be done with an engine's folder and ring."""
    (home,) = rings.iterdir()
    (ring,) = home.glob("*.ring")
    return {"folder": home.stat().st_mode & 0o777, "ring": ring.stat().st_mode & 0o777}


def test_unreadable_rings_are_reported_with_owner_and_remedy(
    folder: Path,
) -> None:
    rings = folder / "rings"
    with engine_by_hand(rings, "e", within=PRIVATE) as engine:
        engine.do("begin a", "go a 3")
        assert modes(rings) == {"folder": 0o700, "ring": 0o600}
        for words in (("attach", "--once"), ("why", "a", "e"), ("why", "a")):
            done = command(STRANGER, *words, rings=rings)
            assert (done.returncode, done.stdout) == (1, "")
            assert done.stderr == (
                f"inferscope: {rings}/e is closed to uid {READER_UID}: it belongs to uid "
                f"{ENGINE_UID}, with mode 0700. Read it as that user, or start the engine with "
                "INFERSCOPE_GROUP, a group that both are in.\n"
            )


def test_user_outside_the_group_of_a_shared_ring_sees_its_number(folder: Path) -> None:
    rings = folder / "rings"
    with engine_by_hand(rings, "e", within=SHARED):
        assert modes(rings) == {"folder": 0o750, "ring": 0o640}
        (ring,) = (rings / "e").glob("*.ring")
        lines = []
        for target in (rings, ring):
            done = command(STRANGER, "attach", str(target), "--once", rings=rings)
            assert (done.returncode, done.stdout) == (1, "")
            lines.append(done.stderr)
        assert lines[0] == lines[1]
        (line,) = lines[0].splitlines()
        assert f"{rings}/e is closed to uid {READER_UID}: " in line
        assert line.endswith(f"Read it as that user, or in its group, {GROUP}.")
        rows = json.loads(command(STRANGER, "doctor", "--json", rings=rings).stdout)["checks"]
        (engines,) = (row for row in rows if row["name"] == "engines")
        assert not engines["is_fine"]
        assert f"in its group, {GROUP}." in engines["fix"]


def test_another_user_of_the_group_reads_and_collects(folder: Path) -> None:
    rings = folder / "rings"
    with (
        collecting(rings, folder, "pins: off\n", within=MEMBER) as collector,
        engine_by_hand(rings, "shared", within=SHARED) as engine,
        engine_by_hand(rings, "private", within=PRIVATE),
    ):
        engine.do("begin a", "go a 3", "end a stop", "begin b", "go b 2")
        eventually(lambda: collector.scrape().total("inferscope_requests_total") == 1)
        seen = collector.scrape()
        assert {of["engine_id"] for of, _ in seen.all("inferscope_requests_total")} == {"shared"}
        looked = command(MEMBER, "attach", "shared", "--once", "--json", rings=rings)
        assert looked.returncode == 0, looked.stderr
        (view,) = json.loads(looked.stdout)["engines"]
        assert (view["engine_id"], view["num_running"]) == ("shared", 1)
        # Of the one that it may not read the collector tells once, and goes on.
        closed = f"inferscope: {rings}/private is closed to uid {READER_UID}: "
        eventually(lambda: closed in collector.log())
        assert collector.stop() == 0
        assert collector.log().count("is closed to") == 1


def test_reader_of_a_group_cannot_write(folder: Path) -> None:
    rings = folder / "rings"
    with engine_by_hand(rings, "e", within=SHARED) as engine:
        done = command(MEMBER, "off", "e", rings=rings)
        assert done.returncode == 1
        assert "Traceback" not in done.stderr
        engine.do("begin a")
        looked = command(MEMBER, "attach", "--once", "--json", rings=rings)
        assert json.loads(looked.stdout)["engines"][0]["health"]["probe_state"] == "on"


def test_reading_a_ring_permits_neither_a_profile_nor_a_file(folder: Path) -> None:
    rings = folder / "rings"
    with engine_by_hand(rings, "e", within=SHARED):
        (ring,) = (rings / "e").glob("*.ring")
        done = command(MEMBER, "profile", "e", rings=rings)
        assert (done.returncode, done.stdout) == (1, "")
        assert f"belongs to uid {ENGINE_UID}. Run as the user that runs the engine." in done.stderr
        tried = subprocess.run(
            [*MEMBER, sys.executable, "-c", _INTRUDER, str(ring)],
            capture_output=True,
            text=True,
            check=True,
        )
        assert tried.stdout == "PermissionError\n" * 7, tried.stdout
        # Root may make the file; the probe takes requests of its own user only.
        request_path(ring).write_text("1.0")
        assert request_path(ring).stat().st_uid != ENGINE_UID
        time.sleep(0.3)  # three times as long as the probe takes to look
        assert request_path(ring).read_text() == "1.0"
        assert not error_path(ring).exists()


def test_a_group_that_the_engine_is_not_in_is_named_and_the_engine_runs(folder: Path) -> None:
    rings = folder / "rings"
    within = (*as_user(ENGINE_UID), "env", f"INFERSCOPE_GROUP={GROUP}")
    done = subprocess.run(
        [*within, sys.executable, "-c", _PROBE],
        capture_output=True,
        text=True,
        env={**os.environ, "INFERSCOPE_DIR": str(rings / "of-mine")},
        check=True,
    )
    assert done.stdout == "False\n"
    (line,) = done.stderr.splitlines()
    assert f"cannot let group {GROUP} read {rings}/of-mine: " in line
    assert "Start the engine as a member of that group, or unset INFERSCOPE_GROUP." in line


def test_a_collector_in_a_folder_of_another_user_states_what_would_do(folder: Path) -> None:
    rings = folder / "rings" / "of-mine"
    with engine_by_hand(rings, "e", within=SHARED):
        done = command(MEMBER, "collect", rings=rings)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert f"cannot make the folder {rings}/.collector-{READER_UID}: Permission denied." in line
    assert "Name one: folder: in its configuration, or INFERSCOPE_COLLECT_FOLDER." in line


_INTRUDER = """
import os, sys
from pathlib import Path
ring = Path(sys.argv[1])
for suffix, flags in (
    (".control", os.O_WRONLY), (".ring", os.O_WRONLY), (".profile", os.O_WRONLY | os.O_CREAT),
    (".trace.json", os.O_WRONLY | os.O_CREAT), (".ring.partial", os.O_WRONLY | os.O_CREAT),
):
    try:
        os.close(os.open(ring.with_suffix(suffix), flags))
    except OSError as error:
        print(type(error).__name__)
for action in (ring.unlink, lambda: ring.with_suffix(".control").rename(ring.parent / "other")):
    try:
        action()
    except OSError as error:
        print(type(error).__name__)
"""
_PROBE = """
from inferscope.probe import EngineInfo, Probe
print(Probe.open(EngineInfo(0, "test")).on)
"""
