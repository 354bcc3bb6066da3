"""A process of a real vLLM server is killed at work: what its rings and the others' still tell."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.engines_real.clients import Ask, ask_all
from tests.engines_real.vllm_laws import hold_to_the_laws, of_kind
from tests.engines_real.vllm_server import Server, export, needs_vllm, serving

pytestmark = [pytest.mark.slow, needs_vllm, pytest.mark.timeout(300)]


def killed(role: str) -> pytest.ParameterSet:
    """Claim what the test shows of a role."""
    claim = pytest.mark.conformance("vLLM", f"`kill -9` of {FEATURES[role]}")
    return pytest.param(role, marks=claim)


FEATURES = {"core": "the core", "frontend": "the front end", "worker": "a worker"}


@pytest.mark.parametrize("role", [killed(role) for role in FEATURES])
def test_requests_in_flight_are_lost_and_can_still_be_explained(tmp_path: Path, role: str) -> None:
    with serving(tmp_path) as server:
        done = [_stream(f"done-{number}", 20) for number in range(4)]
        ask_all(server.url, done, at_once=2)
        dying = [_stream(f"dying-{number}", 1900) for number in range(3)]
        (pid,) = (r.identity.pid for r in server.engine.rings if r.identity.role == role)
        _kill_while_asking(server, dying, pid)
        lines = _export_all(server, done + dying)
    dead = {ask.name for ask in dying}
    lost = [line for line in of_kind(lines, "request") if line["external_id"] in dead]
    assert sorted(request["external_id"] for request in lost) == sorted(dead)
    for request in lost:
        assert request["finish"] == "engine_lost"
        assert request["output_tokens"] > 0
        ledger = request["ledger_ns"]
        assert sum(ledger.values()) == request["delivered_ns"] - request["arrived_ns"]
        assert ("engine_lost" in ledger) == (role != "frontend")
    others = [line for line in lines if line not in lost]
    hold_to_the_laws(others, done, was_core_killed=True)
    output = _why(server, "dying-1")
    assert "dying-1" in output
    assert "lost with its engine" in output


def _stream(name: str, num_tokens: int) -> Ask:
    body = {"model": "tiny", "prompt": [5] * 50, "max_tokens": num_tokens, "ignore_eos": True}
    return Ask(name, {**body, "stream": True, "stream_options": {"include_usage": True}})


def _kill_while_asking(server: Server, asks: list[Ask], pid: int) -> None:
    asking = threading.Thread(target=_ask_the_dying, args=(server.url, asks))
    asking.start()
    until_s = time.monotonic() + 30
    while not all(ask.text for ask in asks):
        assert time.monotonic() < until_s, "the requests are not running"
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    asking.join(60)
    assert not asking.is_alive()


def _export_all(server: Server, asks: list[Ask]) -> list[dict[str, Any]]:
    """Export until all requests are final.

    That a process was killed is known by its silence, and a core without a front end goes on.
    """
    until_s = time.monotonic() + 60
    while True:
        lines = export(server)
        final = {line["external_id"] for line in of_kind(lines, "request")}
        if final >= {ask.name for ask in asks}:
            return lines
        assert time.monotonic() < until_s, f"only {sorted(final)} are final"
        time.sleep(1.0)


def _ask_the_dying(url: str, asks: list[Ask]) -> None:
    with contextlib.suppress(aiohttp.ClientError, OSError):
        ask_all(url, asks, at_once=len(asks))


def _why(server: Server, name: str) -> str:
    """Ask our command line about a request."""
    done = subprocess.run(
        [sys.executable, "-m", "inferscope", "why", name],
        env={**os.environ, "INFERSCOPE_DIR": str(server.folder / "rings")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
