"""What is pinned, what is removed for it, and what a full disk costs."""

from __future__ import annotations

import os
import subprocess
import sys
from array import array
from pathlib import Path

import pytest
from msgspec.structs import replace

from inferscope.daemon.config import PinSettings, SloSettings
from inferscope.daemon.incidents import is_breach
from inferscope.daemon.pins import Pins
from inferscope.fold.final_records import FinalRequest
from inferscope.records import Keyframe, ProbeHealth
from inferscope.ring.recording import RecordingReader
from tests.daemon.rings import SECOND_NS, Ring, Time


def follow(ring: Ring, pins: Pins, seconds: int) -> None:
    for _ in range(seconds):
        ring.pass_time(1)
        pins.advance()


def span_s(pin: Path, time_ns: int) -> tuple[float, float]:
    """Return the first and last health record's time, in seconds from a time."""
    reader = RecordingReader(pin)
    times = [frame.t_ns for frame in reader.frames() if frame.code == ProbeHealth.CODE]
    reader.close()
    assert reader.is_complete
    return (times[0] - time_ns) / SECOND_NS, (times[-1] - time_ns) / SECOND_NS


def test_windows_that_overlap_are_one_file_and_others_are_not(tmp_path: Path) -> None:
    time, lines = Time(), list[str]()
    ring = Ring(tmp_path, time)
    folder = tmp_path / "pins"
    settings = PinSettings(folder, before_s=10, after_s=10)
    pins = Pins(settings, lambda: [ring.path], clock=time, log_line=lines.append)
    follow(ring, pins, 60)
    first_ns = time.now_ns
    pins.pin("breach", first_ns, first_ns)
    follow(ring, pins, 18)  # what came until 10 s is in; 18 s is still within its reach
    assert len(list(folder.iterdir())) == 1
    pins.pin("breach", time.now_ns, time.now_ns)
    follow(ring, pins, 22)
    assert len(lines) == 1
    pins.pin("signal", time.now_ns, time.now_ns)
    follow(ring, pins, 25)
    pins.close()
    ring.close()
    early, late = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns)
    begins_s, ends_s = span_s(early, first_ns)
    assert -20 <= begins_s <= -10  # from the keyframe before
    assert ends_s == pytest.approx(28, abs=0.5)
    assert late.name.endswith("-signal.isr")
    assert early.stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700
    reader = RecordingReader(early)
    codes = [frame.code for frame in reader.frames() if frame.ring == 1]
    assert codes[0] == Keyframe.CODE
    assert codes.count(ProbeHealth.CODE) == round((ends_s - begins_s) * 2) + 1  # none is missing
    reader.close()


def test_a_window_is_whole_though_its_rings_are_read_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inferscope.daemon.pins._PIECE_BYTES", 1)
    time = Time()
    rings = [Ring(tmp_path, time, pid=pid, role=f"worker{pid}") for pid in (1, 2)]
    for _ in range(1000):
        for ring in rings:
            ring.write_all()
    for _ in range(40):
        rings[0].pass_time(1)
        rings[1].write_all()
    settings = PinSettings(tmp_path / "pins", before_s=35, after_s=1)
    paths = [ring.path for ring in rings]
    pins = Pins(settings, lambda: paths, clock=time, log_line=lambda _: None)
    at_ns = time.now_ns
    pins.pin("signal", at_ns, at_ns)
    time.now_ns += 60 * SECOND_NS  # the window and what may be added to it are over
    num_turns = 0
    while not (pin := next((tmp_path / "pins").iterdir())).stat().st_size or pins._open:
        pins.advance()
        num_turns += 1
    reader = RecordingReader(pin)
    of_rings = [frame.ring for frame in reader.frames() if frame.code == ProbeHealth.CODE]
    assert (of_rings.count(1), of_rings.count(2)) == (1080, 1040)
    reader.close()
    assert num_turns > 2
    pins.close()
    for ring in rings:
        ring.close()


def test_what_is_pinned_at_the_very_end_is_in_the_file(tmp_path: Path) -> None:
    time = Time()
    ring = Ring(tmp_path, time)
    ring.pass_time(30)
    settings = PinSettings(tmp_path / "pins", before_s=10, after_s=10)
    pins = Pins(settings, lambda: [ring.path], clock=time, log_line=lambda _: None)
    pins.pin("engine_lost", time.now_ns, time.now_ns)
    pins.close()
    ring.close()
    (pin,) = (tmp_path / "pins").iterdir()
    begins_s, ends_s = span_s(pin, time.now_ns)
    assert begins_s <= -10
    assert ends_s >= -1


def test_a_collector_that_is_behind_puts_what_overlaps_into_one_file(tmp_path: Path) -> None:
    time, behind_ns = Time(), 70 * SECOND_NS
    ring = Ring(tmp_path, time)
    ring.pass_time(90)
    settings = PinSettings(tmp_path / "pins", before_s=10, after_s=10)
    pins = Pins(
        settings, lambda: [ring.path], clock=time, log_line=lambda _: None,
        folded_ns=lambda: time.now_ns - behind_ns,
    )  # fmt: skip
    first_ns = time.now_ns - behind_ns
    for after_s in range(5):
        at_ns = first_ns + after_s * SECOND_NS
        pins.pin("breach", at_ns, at_ns)
        follow(ring, pins, 1)
    behind_ns = 0
    pins.advance()
    pins.close()
    ring.close()
    (pin,) = (tmp_path / "pins").iterdir()
    assert span_s(pin, first_ns)[1] >= 13


def test_the_oldest_go_first_and_what_is_not_a_pin_stays(tmp_path: Path) -> None:
    time, folder = Time(), tmp_path / "pins"
    folder.mkdir()
    ring = Ring(tmp_path, time)
    ring.pass_time(30)
    for number in range(4):
        old = folder / f"pin-2020010{number}T000000Z-breach.isr"
        old.write_bytes(bytes(30_000))
        os.utime(old, (number, number))
    (folder / "notes.txt").write_bytes(bytes(90_000))
    settings = PinSettings(folder, max_mb=0.1)
    pins = Pins(settings, lambda: [ring.path], clock=time, log_line=lambda _: None)
    pins.pin("signal", time.now_ns, time.now_ns)
    follow(ring, pins, 5)
    pins.close()
    ring.close()
    names = sorted(path.name[:12] for path in folder.iterdir())
    assert names[0] == "notes.txt"
    assert len(names) == 5
    assert "pin-20200100" not in names
    assert "pin-20200103" in names
    assert sum(path.stat().st_size for path in folder.glob("pin-*")) <= 100_000


def test_a_full_disk_costs_one_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.daemon.full_disk", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    (line,) = done.stdout.splitlines()
    assert "File too large" in line
    assert all(path.stat().st_size <= 600 for path in (tmp_path / "pins").iterdir())


def test_a_folder_that_cannot_be_made_costs_one_line(tmp_path: Path) -> None:
    time, lines = Time(), list[str]()
    ring = Ring(tmp_path, time)
    (tmp_path / "file").touch()
    settings = PinSettings(tmp_path / "file" / "pins")
    pins = Pins(settings, lambda: [ring.path], clock=time, log_line=lines.append)
    for _ in range(3):
        pins.pin("breach", time.now_ns, time.now_ns)
        follow(ring, pins, 70)
    ring.close()
    assert len(lines) == 1
    assert "Not a directory" in lines[0]


_MS = 1_000_000
_FINE = FinalRequest(
    engine_id="e", request_id="r", external_id=None, trace="", attributes={}, prompt_tokens=1,
    cached_tokens=0, output_tokens=3, arrived_ns=0, queued_ns=0, admitted_ns=0,
    first_token_ns=100 * _MS, last_token_ns=300 * _MS, delivered_ns=300 * _MS,
    arrived_at="engine", delivered_at="engine", finish="stop", joined_late=False,
    num_preemptions=0, ledger_ns={}, ttft_ledger_ns={},
    token_times_ns=array("q", [100 * _MS, 200 * _MS, 300 * _MS]), tokens_per_event=(1, 1, 1),
    prefill_ns=0, decode_ns=0, prefill_flops=None, decode_flops=None, is_alone=True, fit_id="",
    clock="host",
)  # fmt: skip


@pytest.mark.parametrize(
    ("slo", "request_", "is_beyond"),
    [
        (SloSettings(), _FINE, False),
        (SloSettings(100, 100), _FINE, False),
        (SloSettings(99, None), _FINE, True),
        (SloSettings(None, 99), _FINE, True),
        (SloSettings(200, 50), replace(_FINE, token_times_ns=array("q", [100 * _MS])), False),
        (SloSettings(299, None), replace(_FINE, first_token_ns=None), True),
        (SloSettings(300, None), replace(_FINE, first_token_ns=None), False),
        (SloSettings(99, 99), replace(_FINE, attributes={"stream": "false"}), False),
        (SloSettings(99, None), replace(_FINE, attributes={"stream": "true"}), True),
        (SloSettings(99, None), replace(_FINE, attributes={"endpoint": "/v1"}), True),
    ],
)
def test_a_breach_is_a_late_first_token_or_a_long_gap(
    slo: SloSettings, request_: FinalRequest, is_beyond: bool
) -> None:
    assert is_breach(slo, request_) is is_beyond
