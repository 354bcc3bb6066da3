"""Where the trace of a profile is written."""

from __future__ import annotations

import errno
import threading
from pathlib import Path

import pytest

from inferscope.probe import profiling
from inferscope.probe.profiling import Profiling
from inferscope.ring.profile_request import ask, error_path, request_path, trace_path
from tests.collecting.running import eventually


class Trace:
    """A profile without torch."""

    def export_chrome_trace(self, path: str) -> None:
        Path(path).write_text("trace", encoding="ascii")


@pytest.mark.parametrize("is_link", [True, False])
def test_a_trace_is_a_new_file_whatever_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_link: bool
) -> None:
    monkeypatch.setattr(profiling, "record", lambda seconds: Trace())
    ring, precious = tmp_path / "core-0-1.ring", tmp_path / "precious"
    precious.write_text("precious", encoding="ascii")
    partial = trace_path(ring).with_suffix(".partial")
    if is_link:
        partial.symlink_to(precious)
    else:
        partial.write_text("of a killed process", encoding="ascii")
    ask(ring, 1.0)
    Profiling(ring).look()
    eventually(lambda: not request_path(ring).exists())
    assert trace_path(ring).read_text(encoding="ascii") == "trace"
    assert not trace_path(ring).is_symlink()
    assert precious.read_text(encoding="ascii") == "precious"


class TooLarge:
    """A profile that its folder has no room for."""

    def export_chrome_trace(self, path: str) -> None:
        Path(path).write_text("half a trace", encoding="ascii")
        raise OSError(errno.ENOSPC, "no space left")


def test_a_request_that_a_full_disk_leaves_unanswered_is_not_answered_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring, seen = tmp_path / "core-0-1.ring", []
    error_path(ring).mkdir()  # it cannot be written
    monkeypatch.setattr(profiling, "record", lambda seconds: seen.append(seconds) or TooLarge())
    request_path(ring).write_text("1.0\n", encoding="ascii")
    beside = Profiling(ring)
    for _ in range(3):
        beside.look()
        assert beside._thread is not None
        beside._thread.join(10)
    assert seen == [1.0]
    assert not request_path(ring).exists()
    assert not trace_path(ring).with_suffix(".partial").exists()


def test_without_a_thread_for_it_a_request_is_answered_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    ring = tmp_path / "core-0-1.ring"
    ask(ring, 1.0)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        Profiling(ring).look()
    assert not request_path(ring).exists()
    assert "new thread" in error_path(ring).read_text(encoding="utf-8")
