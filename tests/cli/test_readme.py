"""The README's commands, run as they are pasted."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

from tests.children import child
from tests.cli.running import ROOT

INSTALL = "make install && . .venv/bin/activate\n"
PORT = "8000"


def test_serve_ask_and_attach_work_pasted_at_once(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (block,) = (
        block
        for block in re.findall(r"^```\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
        if "inferscope serve" in block
    )
    assert block.startswith(INSTALL)
    assert block.count(PORT) == 1
    with socket.socket() as free:  # 8000 may be another server's on this machine
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    pasted = block.removeprefix(INSTALL).replace(PORT, port)
    pasted = pasted.replace("serve builtin ", f"serve builtin --port {port} ", 1)
    with child(
        ["bash", "-c", f"{pasted}\nkill %1\nwait %1"],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "INFERSCOPE_DIR": str(tmp_path / "rings"),
            "NO_COLOR": "1",
        },
    ) as process:
        output, warned = process.communicate(timeout=120)
    events = [line.removeprefix("data: ") for line in output.splitlines() if "data: " in line]
    assert events[-1] == "[DONE]", warned
    assert "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1] if event)
    screen = output.rpartition("[DONE]")[2]
    assert "builtin" in screen
    assert "prefill" in screen
