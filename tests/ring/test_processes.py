from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from inferscope.records import Keyframe, decode
from inferscope.ring.discovery import KEEP_DEAD_NS, remove_old_rings
from inferscope.ring.reader import Frame, Loss, RingReader
from tests.children import child
from tests.probe.fakes import everything

pytestmark = pytest.mark.process

WRITER = """
import os, sys
from inferscope.probe import EngineInfo, Probe
probe = Probe.open(EngineInfo(0, "test"))
print(probe.path, flush=True)
step = 0
while True:
    for _ in range(200):
        probe.plan(step, start_ns=0, end_ns=0, waiting=0, running=0)
        probe.emitted(range(64), [step] * 64, step=step)
        step += 1
    if len(sys.argv) > 1 and os.path.exists(sys.argv[1]):
        break
probe.close()
print(step, flush=True)
"""
READER = """
import sys
from pathlib import Path
from inferscope.ring.reader import Loss, RingReader
reader = RingReader(Path(sys.argv[1]))
seen = missed = first = 0
while True:
    for item in reader.read():
        if isinstance(item, Loss):
            missed += item.num_frames
        else:
            seen += 1
            first = first or item.sequence
    print(first, seen, missed, reader._expected, flush=True)
"""


@pytest.fixture
def writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[str]]:
    monkeypatch.setenv("INFERSCOPE_DIR", str(tmp_path / "rings"))
    monkeypatch.setenv("INFERSCOPE_RING_MB", "0.25")
    monkeypatch.setenv("INFERSCOPE_BUDGET", "2")
    words = [sys.executable, "-c", WRITER, str(tmp_path / "stop")]
    with child(words, stdout=subprocess.PIPE, text=True) as process:
        yield process


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_a_ring_opens_after_its_writer_was_killed_in_the_midst_of_writing(
    writer: subprocess.Popen[str],
) -> None:
    path = Path(first_line(writer))
    reader = RingReader(path)
    found: list[Frame | Loss] = []
    first: int | None = None
    until = time.monotonic() + 1.0
    while time.monotonic() < until:
        found += reader.read()
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    found += everything(reader)
    assert everything(reader) == []
    expected = 0
    for item in found:
        if isinstance(item, Loss):
            expected += item.num_frames
            assert item.reason == "lapped"  # not a single torn frame was taken for a whole one
            continue
        first = item.sequence if first is None else first
        expected = expected or item.sequence - 1
        assert item.sequence == expected + 1
        expected = item.sequence
        decode(item.code, item.payload)
    assert expected >= reader.words()[2]  # the header is up to 100 ms behind
    late = everything(RingReader(path))
    assert isinstance(late[0], Frame)
    assert late[0].code == Keyframe.CODE
    assert isinstance(late[-1], Frame)
    assert late[-1].sequence == expected
    # Its lock died with it: only its age protects it now.
    later_ns = time.monotonic_ns() + 10**10
    assert remove_old_rings(path.parent.parent, later_ns) == 0
    assert remove_old_rings(path.parent.parent, later_ns + KEEP_DEAD_NS) == 1


def test_a_stopped_reader_does_not_touch_the_writer_and_counts_what_it_missed(
    writer: subprocess.Popen[str], tmp_path: Path
) -> None:
    path = Path(first_line(writer))
    words = [sys.executable, "-c", READER, str(path)]
    with child(words, stdout=subprocess.PIPE, text=True) as reader:
        first_line(reader)
        reader.send_signal(signal.SIGSTOP)
        probe = RingReader(path)
        _, head, before, *_ = probe.words()
        until = time.monotonic() + 90
        while probe.words()[1] < head + 4 * (1 << 18) and time.monotonic() < until:
            time.sleep(0.01)
        during = probe.words()[2]
        assert during > before + 1000  # the writer went on and lapped it
        (tmp_path / "stop").touch()
        num_steps = int(first_line(writer))
        assert num_steps > 0
        reader.send_signal(signal.SIGCONT)
        last = probe.words()[2]
        until = time.monotonic() + 90
        while time.monotonic() < until:
            first, seen, missed, expected = first_line(reader).split()
            if int(expected) == last + 1:
                break
        assert int(first) - 1 + int(seen) + int(missed) == last
        assert int(missed) > 0
