from __future__ import annotations

import argparse
import json
import os
import stat
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from inferscope.cli import profile
from inferscope.cli.profile import step_records
from inferscope.errors import BadInput, InferScopeError
from inferscope.insight.kernels import steps_of
from inferscope.probe import EngineInfo, Probe
from inferscope.probe.profiling import Profiling
from inferscope.records import DECODE, PREFILL
from inferscope.ring.discovery import RingFile, find_engines
from inferscope.ring.layout import Identity
from inferscope.ring.profile_request import (
    ProfileBusy,
    answer,
    error_path,
    request_path,
    requested,
    send_request,
    trace_path,
    withdraw,
)
from tests.cli.running import inferscope, running_engine


@pytest.mark.slow
def test_a_running_engines_operations_are_grouped_by_phase(tmp_path: Path) -> None:
    out = tmp_path / "profile.json"
    with running_engine(tmp_path) as engine:
        engine.wait_for(1)
        done = inferscope(
            "profile", "--seconds", "2", "--json", "--out", str(out), rings=engine.rings
        )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    by_phase = {phase: {row["name"] for row in rows if row["phase"] == phase} for phase in
                {row["phase"] for row in rows}}  # fmt: skip
    assert any("mm" in name or "linear" in name for name in by_phase["decode"])
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    events = json.loads(out.read_bytes())["traceEvents"]
    assert any(event.get("pid") == "inferscope" and event["name"] == "decode" for event in events)
    assert not list(engine.rings.glob("**/*.trace.json")), "the answer is taken away"


@pytest.mark.parametrize("seconds", ["31", "1000"])
def test_a_long_profile_is_refused(tmp_path: Path, seconds: str) -> None:
    with pytest.raises(BadInput, match="at most 30"):
        send_request(tmp_path / "a.ring", float(seconds))
    assert list(tmp_path.iterdir()) == []


def test_there_is_one_at_a_time_until_it_is_answered(tmp_path: Path) -> None:
    ring = tmp_path / "a.ring"
    request = send_request(ring, 2.0)
    assert requested(ring) == request
    with pytest.raises(ProfileBusy, match="in progress"):
        send_request(ring, 2.0)
    answer(ring, request)
    assert requested(ring) is None
    assert send_request(ring, 3.0) == requested(ring)


def test_a_request_that_died_with_its_process_is_replaced(tmp_path: Path) -> None:
    ring = tmp_path / "a.ring"
    send_request(ring, 2.0)
    long_ago = time.time() - 1000
    os.utime(request_path(ring), (long_ago, long_ago))
    assert requested(ring) is None
    assert send_request(ring, 4.0) == requested(ring)


def test_a_rank_s_steps_are_its_own_and_their_phases_its_replica_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFERSCOPE_DIR", str(tmp_path))
    monkeypatch.setenv("INFERSCOPE_ENGINE_ID", "two-replicas")
    monkeypatch.setenv("INFERSCOPE_RING_MB", "1")
    probes = []
    for replica in range(2):
        info = EngineInfo(0, "test", ranks=(0, 0, replica, 0), sizes=(1, 1, 2, 1))
        core = Probe.open(info, rank=replica)
        worker = Probe.open(info, role="worker", rank=replica)
        index = core.queued(f"r{replica}", prompt_tokens=1)
        for step in range(3 + replica):
            worker.start(step)
            worker.stop(step)
            rows = {"phases": [PREFILL if replica else DECODE], "tokens": [1], "contexts": [step]}
            is_same = core.same_step(step, start_ns=0, end_ns=0, waiting=0, running=1)
            assert is_same is (step > 0 and not replica)
            if not is_same:
                core.slices(step, requests=[index], sampled=[1], **rows)
        worker.start(9)  # a step's span is written with the next one's start
        probes += [core, worker]
    (engine,) = find_engines(tmp_path)
    workers = sorted(
        (ring for ring in engine.rings if ring.identity.role == "worker"),
        key=lambda ring: ring.identity.rank,
    )
    phases = [
        [step.phase for step in steps_of(step_records(ring, engine, time.monotonic_ns()), {})]
        for ring in workers
    ]
    for probe in probes:
        probe.close()
    assert phases == [["decode"] * 3, ["prefill"] * 4]


@pytest.mark.parametrize("content", [b"", b"nan", b"-1", b"1e9", b"\xff", b"x" * 1000])
def test_a_request_that_makes_no_sense_is_none(tmp_path: Path, content: bytes) -> None:
    ring = tmp_path / "a.ring"
    request_path(ring).write_bytes(content)
    assert requested(ring) is None


def test_a_fifo_is_no_request_and_blocks_nothing(tmp_path: Path) -> None:
    os.mkfifo(request_path(tmp_path / "a.ring"))
    assert requested(tmp_path / "a.ring") is None


def test_a_folder_is_no_request_and_leaves_no_descriptor_open(tmp_path: Path) -> None:
    request_path(tmp_path / "a.ring").mkdir()
    before = len(os.listdir("/proc/self/fd"))
    assert [requested(tmp_path / "a.ring") for _ in range(10)] == [None] * 10
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("content", [b"", b"2.0\n"])
def test_a_fifo_with_a_writer_is_no_request(tmp_path: Path, content: bytes) -> None:
    os.mkfifo(request_path(tmp_path / "a.ring"))
    writer = os.open(request_path(tmp_path / "a.ring"), os.O_RDWR)
    os.write(writer, content)
    assert requested(tmp_path / "a.ring") is None
    os.close(writer)


def test_a_fifo_in_place_of_the_reason_is_replaced(tmp_path: Path) -> None:
    ring = tmp_path / "a.ring"
    request = send_request(ring, 2.0)
    os.mkfifo(error_path(ring))
    answering = threading.Thread(
        target=answer, args=(ring, request), kwargs={"error": "why"}, daemon=True
    )
    answering.start()
    answering.join(30)
    assert not answering.is_alive()
    assert error_path(ring).read_text() == "why"
    assert not request_path(ring).exists()


def test_a_withdrawn_request_is_not_answered(tmp_path: Path) -> None:
    ring = tmp_path / "a.ring"
    first = send_request(ring, 2.0)
    trace_path(ring).write_text("half")
    withdraw(ring, first)
    assert list(tmp_path.iterdir()) == []
    second = send_request(ring, 2.0)
    answer(ring, first, error="of the first")
    withdraw(ring, first)
    assert requested(ring) == second
    assert not error_path(ring).exists()


def test_an_interrupted_command_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFERSCOPE_DIR", str(tmp_path))
    monkeypatch.setattr(Profiling, "poll", lambda self: None)
    probe = Probe.open(EngineInfo(0, "test"))
    assert probe.path is not None

    def interrupt(seconds: float) -> None:
        assert probe.path is not None
        assert request_path(probe.path).exists()
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", interrupt)
    options = argparse.ArgumentParser()
    profile.configure(options)
    with pytest.raises(KeyboardInterrupt):
        profile.run(options.parse_args([]))
    probe.close()
    assert not request_path(probe.path).exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root sees the rings of another user")
def test_root_is_referred_to_the_engine_s_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFERSCOPE_DIR", str(tmp_path))
    probe = Probe.open(EngineInfo(0, "test"))
    assert probe.path is not None
    for path in (probe.path, probe.path.parent, tmp_path):
        os.chown(path, 65534, -1)
    options = argparse.ArgumentParser()
    profile.configure(options)
    with pytest.raises(InferScopeError, match="belongs to uid 65534"):
        profile.run(options.parse_args([]))
    probe.close()
    assert not request_path(probe.path).exists()


def test_a_link_of_another_user_is_not_a_request(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("2.0")
    request_path(tmp_path / "a.ring").symlink_to(tmp_path / "elsewhere")
    assert requested(tmp_path / "a.ring") is None


@pytest.mark.thorough
def test_the_reason_is_there_before_the_request_is_gone(tmp_path: Path) -> None:
    ring_path = tmp_path / "core-0-1.ring"
    for _ in range(200):
        request = send_request(ring_path, 0.1)
        answering = threading.Thread(
            target=answer, args=(ring_path, request), kwargs={"error": "why"}
        )
        answering.start()
        while request_path(ring_path).exists():
            pass
        assert error_path(ring_path).read_text() == "why"
        answering.join()


def test_a_profile_and_a_reason_that_could_not_be_written_are_one_line(tmp_path: Path) -> None:
    me = Identity("a", "core", 0, 1, "host", "", 1, 2)
    with pytest.raises(InferScopeError, match="Is the disk full"):
        profile._wait_for_trace(RingFile(tmp_path / "core-0-1.ring", 0, me, 0, 0), 0.0)


@pytest.mark.parametrize("kind", ["link", "pipe"])
@pytest.mark.parametrize("answered", [trace_path, error_path], ids=["trace", "reason"])
def test_an_answer_is_a_file_of_this_user_s_or_none(
    tmp_path: Path, answered: Callable[[Path], Path], kind: str
) -> None:
    ring = tmp_path / "core-0-1.ring"
    if kind == "pipe":
        os.mkfifo(answered(ring))
    else:
        (tmp_path / "elsewhere").write_text("{}")
        answered(ring).symlink_to(tmp_path / "elsewhere")
    me = Identity("a", "core", 0, 1, "host", "", 1, 2)
    with pytest.raises(InferScopeError, match="cannot read the profile"):
        profile._wait_for_trace(RingFile(ring, 0, me, 0, 0), 0.0)


def test_a_reason_acts_on_no_terminal(tmp_path: Path) -> None:
    ring = tmp_path / "core-0-1.ring"
    error_path(ring).write_bytes(b"RuntimeError: \x1b]0;owned\x07\xff")
    me = Identity("a", "core", 0, 1, "host", "", 1, 2)
    with pytest.raises(InferScopeError) as caught:
        profile._wait_for_trace(RingFile(ring, 0, me, 0, 0), 0.0)
    assert str(caught.value) == "no profile was made: RuntimeError: ?]0;owned?\ufffd"


def test_a_request_that_cannot_be_made_whole_leaves_none_behind(tmp_path: Path) -> None:
    ring = tmp_path / "core-0-1.ring"
    trace_path(ring).mkdir()  # an old answer that cannot be removed
    with pytest.raises(OSError, match=r"trace\.json"):
        send_request(ring, 2.0)
    assert requested(ring) is None
    assert not request_path(ring).exists()


def test_a_process_without_torch_is_reported_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFERSCOPE_DIR", str(tmp_path))
    probe = Probe.open(EngineInfo(0, "test"))
    assert probe.path is not None
    monkeypatch.setitem(sys.modules, "torch", None)
    send_request(probe.path, 0.1)
    until_s = time.monotonic() + 10
    while request_path(probe.path).exists() and time.monotonic() < until_s:
        time.sleep(0.05)
    probe.close()
    assert "not loaded torch" in error_path(probe.path).read_text()
