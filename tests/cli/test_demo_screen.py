"""The demo with its screen, on a terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path

import pytest

from tests.children import child
from tests.cli.running import inferscope


@pytest.mark.thorough
def test_quitting_names_what_is_left_and_commands_that_read_it(tmp_path: Path) -> None:
    rings = tmp_path / "rings"
    # As after `make demo`: the environment's commands are not on PATH.
    program = str(Path(sys.executable).with_name("inferscope"))
    environment = {**os.environ, "INFERSCOPE_DIR": str(rings), "PATH": os.defpath}
    ours, its_own = pty.openpty()
    fcntl.ioctl(its_own, termios.TIOCSWINSZ, struct.pack("4H", 40, 120, 0, 0))
    shown = bytearray()

    def read() -> None:
        try:
            while piece := os.read(ours, 1 << 16):
                shown.extend(piece)
        except OSError:  # the other end is closed
            return

    with child(
        [program, "demo", "--load", "0.3"],
        stdin=its_own,
        stdout=its_own,
        stderr=subprocess.DEVNULL,
        env={**environment, "TERM": "xterm-256color"},
    ) as process:
        os.close(its_own)
        reader = threading.Thread(target=read)
        reader.start()
        name = f"demo-{process.pid}"
        end_s = time.monotonic() + 90
        while inferscope("why", "rag-", name, "--pick", "1", rings=rings).returncode:
            assert process.poll() is None
            assert time.monotonic() < end_s, "no request has come"
            time.sleep(0.2)
        os.write(ours, b"q")
        assert process.wait(timeout=60) == 0
    reader.join()
    os.close(ours)
    output = shown.decode().rpartition("The demo has ended.")[2].replace("\r", "")
    assert re.search(rf"{rings / name} \(\d+ MB\)", output)
    commands = re.findall(r"^  (\S+ (?:findings|shares|why|attach) .+?)   ", output, re.MULTILINE)
    assert len(commands) == 4
    for line in commands:
        done = subprocess.run(line, shell=True, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, (line, done.stderr)
