"""`attach --screen N`: each screen as text, of a recording, of running engines and of a URL."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import sys
import termios
from pathlib import Path

import pytest

from tests.children import child
from tests.cli.running import inferscope
from tests.daemon.running import engine_by_hand, eventually
from tests.insight.test_why import SAMPLE
from tests.metrics_page.page_server import serving
from tests.recorded import recorded

TITLES = ("Fleet", " time by phase", "Requests (", "Step timeline", "Roofline", "Objectives",
          "KV block pool")  # fmt: skip
PAGE = 'vllm:num_requests_running{model_name="llama"} 8\n'


@pytest.mark.thorough
@pytest.mark.parametrize("number", range(7))
def test_each_screen_of_a_recording_is_printed(number: int, tmp_path: Path) -> None:
    words = ("attach", str(SAMPLE), "--once", "--screen", str(number))
    done = inferscope(*words, rings=tmp_path, COLUMNS="120")
    assert (done.returncode, done.stderr) == (0, "")
    assert TITLES[number] in done.stdout
    assert "no recent step is kept" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 120


@pytest.mark.thorough
def test_an_earlier_time_has_its_steps(tmp_path: Path) -> None:
    words = ("attach", str(SAMPLE), "--once", "--screen", "3", "--at", "-15s")
    done = inferscope(*words, rings=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    (last,) = re.findall(r"^step (\d+): ", done.stdout, re.MULTILINE)
    assert 0 < int(last) < recorded()[0].engines[0].steps[-1].step


@pytest.mark.thorough
def test_the_screens_of_running_engines_are_printed(tmp_path: Path) -> None:
    rings = tmp_path / "rings"
    with engine_by_hand(rings, "steady") as one, engine_by_hand(rings, "other") as two:
        for engine in (one, two):
            engine.do("begin a", "go a 3", "end a stop")

        def printed(*words: str) -> str:
            done = inferscope("attach", *words, rings=rings)
            assert done.returncode == 0, done.stderr
            return done.stdout

        eventually(lambda: {"steady", "other"} <= set(printed("--once", "--screen", "0").split()))
        for number in range(1, 7):
            title = TITLES[number]
            assert title in printed("steady", "--once", "--screen", str(number))
        refused = inferscope("attach", "--once", "--screen", "3", rings=rings)
        assert (refused.returncode, refused.stdout) == (1, "")
        assert "2 engines are running" in refused.stderr
    nothing = inferscope("attach", "--once", "--screen", "0", rings=tmp_path / "none")
    assert (nothing.returncode, nothing.stdout) == (1, "")
    assert "no engine is running" in nothing.stderr


@pytest.mark.parametrize("number", ["7", "-1", "x", "1.0", ""])
def test_a_wrong_number_is_one_line_with_the_right_ones(number: str, tmp_path: Path) -> None:
    done = inferscope("attach", str(SAMPLE), "--once", f"--screen={number}", rings=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = [line for line in done.stderr.splitlines() if "error" in line]
    assert f"{number!r} is not a screen. Give one of: 0 fleet, 1 overview" in line


def test_what_has_one_view_has_one_screen(tmp_path: Path) -> None:
    passes = tmp_path / "passes.jsonl"
    passes.write_text("{}\n", encoding="utf-8")
    with serving(PAGE) as server:
        first = inferscope("attach", server.url, "--once", "--screen", "1", rings=tmp_path)
        page = inferscope("attach", server.url, "--once", "--screen", "3", rings=tmp_path)
    assert (first.returncode, "llama" in first.stdout) == (0, True)
    file = inferscope("attach", str(passes), "--once", "--screen", "3", rings=tmp_path)
    both = inferscope("attach", str(SAMPLE), "--json", "--screen", "3", rings=tmp_path)
    for done, message in (
        (page, "a metrics page has totals only, so there is no screen 3 of it"),
        (file, "forward-pass metrics have one view"),
        (both, "--json prints the snapshot of all screens"),
    ):
        assert (done.returncode, done.stdout) == (2, "")
        assert message in done.stderr
        assert len(done.stderr.splitlines()) == 1


@pytest.mark.thorough
@pytest.mark.parametrize("number", [0, 3, 4, 5, 6])
def test_a_terminal_opens_with_the_screen(number: int, tmp_path: Path) -> None:
    words = ["attach", str(SAMPLE), "--screen", str(number), "--ascii"]
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    environment = {**os.environ, "INFERSCOPE_DIR": str(tmp_path), "TERM": "xterm-256color"}
    with child(
        [sys.executable, "-m", "inferscope", *words],
        stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True,
    ) as process:  # fmt: skip
        os.close(theirs)
        printed, has_quit = "", False
        while select.select([ours], [], [], 60)[0]:
            try:
                printed += os.read(ours, 65536).decode(errors="replace")
            except OSError:  # its other end is closed
                break
            if TITLES[number] in printed and not has_quit:
                os.write(ours, b"q")
                has_quit = True
        assert has_quit, printed[-2000:]
        assert process.wait(30) == 0, printed[-2000:]
    os.close(ours)
