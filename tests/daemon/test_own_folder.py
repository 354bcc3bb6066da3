"""A collector's own files beside neighbours who may write to the rings' folder, as to /tmp."""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest

from inferscope.daemon.config import PinSettings, read_config
from inferscope.daemon.lock import LOCK_NAME, only_collector
from inferscope.daemon.pins import Pins
from inferscope.daemon.slo_state import SloTracker
from inferscope.errors import InferScopeError
from inferscope.private import own_folder
from inferscope.slo import Objective, Objectives
from tests.daemon.rings import Ring, Time

OBJECTIVES = Objectives((Objective("availability", "availability", None, 0.99, 86400 * 10**9),))
OTHER_UID = 64_321
PRECIOUS = "not the collector's\n"


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A folder that all users may write to."""
    folder = tmp_path / "rings"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A file that no collector may change."""
    path = tmp_path / "victim"
    path.write_text(PRECIOUS, encoding="utf-8")
    path.chmod(0o644)
    return path


@pytest.fixture
def in_time() -> Iterator[None]:
    """Raise where a test waits for another process, as for the writer of a pipe."""

    def over(number: int, frame: FrameType | None) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, 20)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def is_untouched(victim: Path) -> bool:
    mode = victim.stat().st_mode & 0o777
    return victim.read_text(encoding="utf-8") == PRECIOUS and mode == 0o644


@pytest.mark.usefixtures("in_time")
def test_a_pipe_in_place_of_the_budgets_is_one_line(tmp_path: Path) -> None:
    path, lines = tmp_path / "slo-state.json", list[str]()
    os.mkfifo(path)
    promises = SloTracker(OBJECTIVES, path, clock=Time(), log_line=lines.append)
    assert lines == [
        f"budgets restart at zero: cannot read {path}: not a plain file of uid {os.geteuid()}"
    ]
    promises.save({})
    assert path.is_file(), "it takes the place of the pipe"


def test_a_link_in_place_of_the_budgets_is_not_followed(tmp_path: Path, victim: Path) -> None:
    path, lines = tmp_path / "slo-state.json", list[str]()
    for name in (path.name, f".{path.name}.{os.getpid()}"):
        (tmp_path / name).symlink_to(victim)
    promises = SloTracker(OBJECTIVES, path, clock=Time(), log_line=lines.append)
    assert lines == [f"budgets restart at zero: cannot read {path}: {os.strerror(40)}"]
    promises.save({})
    assert is_untouched(victim)
    assert path.is_file()
    assert not path.is_symlink()
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.skipif(os.geteuid() != 0, reason="giving files away needs root")
def test_budgets_of_another_user_are_not_taken_over(tmp_path: Path) -> None:
    path, lines = tmp_path / "slo-state.json", list[str]()
    SloTracker(OBJECTIVES, path, clock=Time(), log_line=lines.append).save({})
    assert lines == []
    os.chown(path, OTHER_UID, OTHER_UID)
    SloTracker(OBJECTIVES, path, clock=Time(), log_line=lines.append)
    assert len(lines) == 1
    assert "not a plain file of uid 0" in lines[0]


def test_a_pin_is_written_through_no_link(tmp_path: Path) -> None:
    time = Time()
    ring, folder, lines = Ring(tmp_path, time), tmp_path / "pins", list[str]()
    pins = Pins(PinSettings(folder), lambda: [ring.path], clock=time, log_line=lines.append)
    ring.pass_time(1)
    pins.pin("signal", time.now_ns, time.now_ns)
    pins.close()
    (first,) = folder.iterdir()
    first.unlink()
    first.symlink_to(tmp_path / "made")
    pins.pin("signal", time.now_ns, time.now_ns)
    pins.close()
    ring.close()
    assert not (tmp_path / "made").exists()
    assert [path.stat().st_mode & 0o777 for path in folder.iterdir() if path != first] == [0o600]


@pytest.mark.usefixtures("in_time")
@pytest.mark.parametrize("kind", ["held", "pipe", "link"])
def test_no_neighbour_holds_the_lock_or_chooses_the_pid(
    shared: Path, victim: Path, kind: str
) -> None:
    theirs = shared / LOCK_NAME
    handle = -1
    if kind == "held":
        handle = os.open(theirs, os.O_RDWR | os.O_CREAT)
        os.write(handle, b"1\n")
        fcntl.flock(handle, fcntl.LOCK_EX)
    elif kind == "pipe":
        os.mkfifo(theirs)
    else:
        theirs.symlink_to(victim)
    config = read_config(None, {"INFERSCOPE_COLLECT_RINGS": str(shared)})
    with only_collector(config.folder):
        own = config.folder / LOCK_NAME
        assert own.read_text(encoding="ascii") == f"{os.getpid()}\n"
        assert (own.stat().st_mode & 0o777, config.folder.stat().st_mode & 0o777) == (0o600, 0o700)
    assert is_untouched(victim)
    if handle >= 0:
        os.close(handle)


def test_lock_budgets_and_pins_are_in_one_folder_that_is_closed(shared: Path) -> None:
    config = read_config(None, {"INFERSCOPE_COLLECT_RINGS": str(shared)})
    assert config.pins is not None
    assert {config.state.parent, config.pins.folder.parent} == {config.folder}
    named = {"INFERSCOPE_COLLECT_RINGS": str(shared), "INFERSCOPE_COLLECT_FOLDER": "/var/lib/x"}
    assert read_config(None, named).state == Path("/var/lib/x/slo-state.json")
    own_folder(config.folder)
    config.folder.chmod(0o777)
    own_folder(config.folder)
    assert config.folder.stat().st_mode & 0o777 == 0o755


def test_a_folder_that_another_user_can_change_is_refused_in_one_line(
    shared: Path, tmp_path: Path
) -> None:
    config = read_config(None, {"INFERSCOPE_COLLECT_RINGS": str(shared)})
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    config.folder.symlink_to(elsewhere)
    cases = [(config.folder, "is not a folder")]
    if os.geteuid() == 0:
        theirs = shared / "theirs"
        theirs.mkdir()
        os.chown(theirs, OTHER_UID, OTHER_UID)
        cases.append((theirs, f"belongs to uid {OTHER_UID}, not to uid 0"))
    loose = tmp_path / "loose"
    loose.mkdir()
    loose.chmod(0o777)
    cases.append((loose / "mine", f"all users may replace {loose / 'mine'}"))
    for folder, why in cases:
        with pytest.raises(InferScopeError) as raised, only_collector(folder):
            pass
        assert why in str(raised.value)
        assert "INFERSCOPE_COLLECT_FOLDER" in str(raised.value)
        assert "\n" not in str(raised.value)
    assert list(elsewhere.iterdir()) == []
