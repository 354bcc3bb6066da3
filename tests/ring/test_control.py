"""The control byte's descriptor, in a host that closes and reuses descriptors of its own accord."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from inferscope.ring.control import SWITCHED_OFF, control_path, open_control, switch


def test_the_descriptor_has_a_high_number(tmp_path: Path) -> None:
    control = open_control(tmp_path / "core-0-1.ring")
    assert control._handle >= 512  # not the one that a host's next file gets
    switch(tmp_path / "core-0-1.ring", to=SWITCHED_OFF)
    assert not control.is_on()
    control.close()
    control.close()


def test_a_number_that_is_another_files_by_now_is_neither_read_nor_closed(tmp_path: Path) -> None:
    control = open_control(tmp_path / "core-0-1.ring")
    number = control._handle
    hosts = os.open(tmp_path / "hosts", os.O_RDWR | os.O_CREAT)
    os.write(hosts, bytes(100))
    os.dup2(hosts, number)
    assert control.is_on()
    control.close()
    assert os.fstat(number).st_ino == os.fstat(hosts).st_ino
    os.close(number)
    os.close(hosts)


def test_a_number_that_the_host_has_closed_is_left_alone(tmp_path: Path) -> None:
    control = open_control(tmp_path / "core-0-1.ring")
    os.close(control._handle)
    assert control.is_on()
    control.close()


def test_no_engine_of_another_user_is_switched_in_place_of_the_one_that_is_meant(
    tmp_path: Path,
) -> None:
    """Root's command finds a user's ring; by then his folder is a link to another user's."""
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    control = open_control(theirs / "core-0-1.ring")
    (tmp_path / "meant").symlink_to(theirs)
    with pytest.raises(PermissionError, match=r"not a plain file of uid"):
        switch(tmp_path / "meant" / "core-0-1.ring", to=SWITCHED_OFF, owner=os.geteuid() + 1)
    assert control.is_on()
    switch(theirs / "core-0-1.ring", to=SWITCHED_OFF, owner=os.geteuid())
    assert not control.is_on()
    control.close()


def test_a_pipe_that_is_read_is_no_control_byte(tmp_path: Path) -> None:
    ring = tmp_path / "core-0-1.ring"
    os.mkfifo(control_path(ring))
    reading = os.open(control_path(ring), os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(OSError, match=r"not a plain file|Illegal seek"):
        switch(ring, to=SWITCHED_OFF)
    os.close(reading)
