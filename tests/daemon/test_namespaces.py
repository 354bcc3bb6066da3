"""Engine and collector in containers of their own that share the rings' folder and nothing else.

A container is made of namespaces: of process ids (neither can see or signal the other), of users
(the same user has another number), of networks and of host names. The folder is a volume.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.daemon.running import collecting, engine_by_hand, eventually

CONTAINER = (
    *("unshare", "--user", "--map-user=4321", "--map-group=4321"),
    *("--pid", "--fork", "--kill-child"),
)
APART = (*CONTAINER, "--net", "--uts", "--ipc")
"""An engine needs no network."""
WAYS = {
    "the engine": (APART, ()),
    "the collector": ((), CONTAINER),
    "each of them": (APART, CONTAINER),
}


def can_make(container: tuple[str, ...]) -> bool:
    """Return whether this machine permits this user to make namespaces."""
    try:
        return (
            subprocess.run([*container, "true"], capture_output=True, check=False).returncode == 0
        )
    except FileNotFoundError:
        return False


pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(
        not can_make(APART), reason="unshare is missing, or users may not make namespaces here"
    ),
]


@pytest.mark.parametrize(("engines", "collectors"), WAYS.values(), ids=WAYS)
def test_all_is_counted_inside_and_outside_a_container(
    tmp_path: Path, engines: tuple[str, ...], collectors: tuple[str, ...]
) -> None:
    rings = tmp_path / "rings"
    with (
        engine_by_hand(rings, "contained", within=engines) as engine,
        collecting(rings, tmp_path, "pins: off\n", within=collectors) as collector,
    ):
        eventually(lambda: collector.scrape().all("inferscope_requests_total") != [])
        engine.do("begin a", "go a 3", "end a stop", "begin lost", "go lost 2")
        eventually(lambda: collector.scrape().total("inferscope_requests_total") == 1)
        seen = collector.scrape()
        assert seen.one("inferscope_requests_total", finish_reason="stop") == 1
        assert seen.one("inferscope_source_up", source="probe") == 1
        engine.kill()
        eventually(
            lambda: (
                collector.scrape().one("inferscope_requests_total", finish_reason="engine_lost")
                == 1
            )
        )
        assert collector.scrape().one("inferscope_source_up", source="probe") == 0


def test_a_reader_finds_an_engine_by_its_id_and_not_by_a_pid_of_elsewhere(tmp_path: Path) -> None:
    """As `kubectl debug --target` has it: another container, the same folder."""
    rings = tmp_path / "rings"
    with engine_by_hand(rings, "contained", within=APART) as engine:
        engine.do("begin a", "go a 3")
        looked = subprocess.run(
            [
                *CONTAINER,
                *(sys.executable, "-m", "inferscope", "attach", "contained", "--once", "--json"),
            ],
            capture_output=True,
            text=True,
            env={**os.environ, "INFERSCOPE_DIR": str(rings)},
            check=False,
        )
        assert looked.returncode == 0, looked.stderr
        (seen,) = json.loads(looked.stdout)["engines"]
        assert (seen["engine_id"], seen["is_alive"], seen["num_running"]) == ("contained", True, 1)


def test_containers_write_nothing_that_others_can_read(tmp_path: Path) -> None:
    rings = tmp_path / "rings"
    with engine_by_hand(rings, "contained", within=APART) as engine:
        engine.do("begin a")
        paths = [rings, *rings.rglob("*")]
        assert any(path.suffix == ".ring" for path in paths)
        assert all(path.stat().st_mode & 0o077 == 0 for path in paths)
