"""Writes to a file system that may be slow release the interpreter's lock."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from inferscope.probe import EngineInfo, Probe
from inferscope.records import StepSlices
from inferscope.ring import file_write
from inferscope.ring.file_write import is_remote, pwrite, releasing_pwrite
from tests.probe.fakes import do_step, of


def test_a_local_file_is_not_remote_and_an_unknown_one_neither(tmp_path: Path) -> None:
    handle = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    assert file_write._file_system(handle) > 0
    assert not is_remote(handle)
    os.close(handle)
    assert not is_remote(handle)


@pytest.mark.parametrize("remote", [True, False])
def test_on_a_remote_file_system_the_lock_is_released_and_a_line_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, remote: bool
) -> None:
    handle = os.open(tmp_path, os.O_RDONLY)
    here = file_write._file_system(handle)
    os.close(handle)
    monkeypatch.setattr(file_write, "_REMOTE", {here} if remote else set())
    monkeypatch.setenv("INFERSCOPE_DIR", str(tmp_path / "rings"))
    monkeypatch.setenv("INFERSCOPE_RING_MB", "1")
    probe = Probe.open(EngineInfo(0, "test"))
    ring = probe._log.ring
    assert ring is not None
    assert ring._pwrite is (releasing_pwrite if remote else pwrite)
    assert ("network or FUSE" in caplog.text) is remote
    do_step(probe, 1, [1])
    probe.close()
    assert len(of(StepSlices, ring.path)) == 1
