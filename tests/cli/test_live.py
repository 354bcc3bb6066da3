"""Commands pointed at an engine that is running."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.children import child
from tests.cli.running import Engine, inferscope, running_engine


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Serve all tests of this module but the last, which kills it."""
    with running_engine(tmp_path_factory.mktemp("live"), rate_s=3) as running:
        yield running


@pytest.mark.thorough
def test_attach_finds_the_only_engine_with_its_history(engine: Engine) -> None:
    seen = engine.wait_for(3)
    assert seen["engine_id"] == "under-test"
    assert seen["pids"] == [engine.process.pid]
    assert seen["is_alive"]
    assert sum(seen["device_ns"].values()) > 0
    unnamed = inferscope("attach", "--once", rings=engine.rings, NO_COLOR="1")
    assert unnamed.returncode == 0
    assert "prefill" in unnamed.stdout


@pytest.mark.thorough
def test_off_stops_the_recording_and_on_resumes_it(engine: Engine) -> None:
    engine.wait_for(2)
    assert inferscope("off", rings=engine.rings).returncode == 0
    before = engine.wait_until_it_is("off")
    time.sleep(1.0)
    assert engine.attach()["health"]["num_records"] <= before["health"]["num_records"] + 30
    assert inferscope("on", str(engine.process.pid), rings=engine.rings).returncode == 0
    engine.wait_until_it_is("on")
    engine.wait_for(before["num_finished"] + 2)


@pytest.mark.thorough
def test_why_explains_a_request_that_is_still_under_way(engine: Engine) -> None:
    for _ in range(20):
        newest = engine.attach()["requests"][0]["request_id"]
        done = inferscope("why", newest, rings=engine.rings)
        assert done.returncode == 0, done.stderr
        assert newest in done.stdout.splitlines()[0]
        if "still under way" in done.stdout:
            assert "So far it has taken" in done.stdout
            assert "the rows sum to" in done.stdout
            return
    raise AssertionError("every request had finished before it could be explained")


@pytest.mark.thorough
def test_a_living_engine_is_judged_by_any_of_its_names(engine: Engine) -> None:
    before = engine.wait_for(2)
    for name in ((), (str(engine.process.pid),), (before["engine_id"],), (str(engine.rings),)):
        done = inferscope("findings", "--json", *name, rings=engine.rings)
        assert done.returncode == 0, done.stderr
        (judged,) = json.loads(done.stdout)["engines"]
        assert judged["engine_id"] == before["engine_id"]
        assert judged["num_requests"] + judged["num_joined_late"] >= 2
    engine.wait_for(engine.attach()["num_finished"] + 1)


def test_a_recording_replays_to_the_recorders_digest(engine: Engine, tmp_path: Path) -> None:
    out = tmp_path / "run.isr"
    recorded = inferscope("record", "--duration", "1", "-o", str(out), rings=engine.rings)
    assert recorded.returncode == 0, recorded.stderr
    digest = recorded.stderr.split("digest ")[1].strip()
    replayed = inferscope("replay", str(out), "--check", rings=engine.rings)
    assert replayed.stdout.strip() == digest
    assert out.stat().st_mode & 0o077 == 0


@pytest.mark.thorough
def test_ctrl_c_ends_a_recording_properly(engine: Engine, tmp_path: Path) -> None:
    out = tmp_path / "run.isr"
    with child(
        [sys.executable, "-m", "inferscope", "record", "-o", str(out)],
        env={**os.environ, "INFERSCOPE_DIR": str(engine.rings)},
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        assert "recording under-test" in process.stderr.readline()
        engine.wait_for(engine.attach()["num_finished"] + 1)  # so that there is something in it
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 0, stderr
    replayed = inferscope("replay", str(out), "--check", rings=engine.rings)
    assert replayed.stdout.strip() in stderr
    assert replayed.stderr == ""


def test_two_engines_are_listed_instead_of_guessed(engine: Engine) -> None:
    with child(
        [sys.executable, "-c", _A_PROBE],
        stdout=subprocess.PIPE,
        env={
            **os.environ,
            "INFERSCOPE_DIR": str(engine.rings),
            "INFERSCOPE_ENGINE_ID": "another",
        },
    ) as second:
        assert second.stdout is not None
        assert second.stdout.readline() == b"open\n"
        done = inferscope("attach", "--once", rings=engine.rings)
        assert done.returncode == 1
        assert "2 engines are running" in done.stderr
        assert "under-test" in done.stderr
        assert "another" in done.stderr


@pytest.mark.thorough
def test_the_rings_of_a_killed_engine_are_read_and_its_requests_are_lost(
    engine: Engine, tmp_path: Path
) -> None:
    engine.wait_for(2)
    engine.kill()
    out = tmp_path / "killed.jsonl"
    done = inferscope("export", str(engine.rings), "-o", str(out), rings=engine.rings)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    requests = [row for row in rows if row["kind"] == "request"]
    lost = [row for row in requests if row["finish"] == "engine_lost"]
    assert len(requests) > len(lost)
    for row in requests:
        if row["ledger_missing"] == "not seen by the core":
            # The core's records of it were not written yet; the front end's may be complete.
            assert row["finish"] in ("engine_lost", "stop")
            assert row["admitted_ns"] is None
            assert row["ledger_ns"] is None
            continue
        assert row["ledger_missing"] is None
        assert sum(row["ledger_ns"].values()) == row["delivered_ns"] - row["arrived_ns"]
    for row in lost:
        assert row["last_token_ns"] is None or row["last_token_ns"] <= row["delivered_ns"]


_A_PROBE = """
import time
from inferscope.probe import EngineInfo, Probe
probe = Probe.open(EngineInfo(0, "hand-made"))
print("open", flush=True)
time.sleep(60)
"""
