"""Tests of a front end, core and worker, each with a process and a ring."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from inferscope.records import Emitted, StepPlan, StepSlices, StepSpan
from tests.engine.server.running import Server, all_gone, serving
from tests.probe.fakes import of

pytestmark = pytest.mark.thorough

BODY = {"prompt": "def f", "max_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose model runs in a worker; the tests stop it in their order."""
    with serving(tmp_path_factory.mktemp("apart"), "builtin", "--worker") as running:
        yield running.wait()


def ring(server: Server, role: str) -> Path:
    (path,) = server.rings.glob(f"*/{role}-*.ring")
    return path


def test_each_process_records_its_part_and_the_ledgers_close(apart: Server) -> None:
    for _ in range(3):
        assert apart.events("/v1/completions", BODY)[-1] == "[DONE]"
    finals = apart.finals(until=3)
    for final in finals.values():
        assert (final.arrived_at, final.delivered_at) == ("http", "http")
        assert sum(final.ledger_ns.values()) == final.delivered_ns - final.arrived_ns
        # Not `decode_own`: on a busy machine all tokens may wait for the front end together.
        assert final.ledger_ns["prefill_own"] > 0
        assert final.decode_ns > 0
        assert final.output_tokens == 12
        assert not final.joined_late
    assert of(StepPlan, ring(apart, "core"))
    assert of(StepSlices, ring(apart, "core"))
    assert of(StepSpan, ring(apart, "worker"))
    assert of(Emitted, ring(apart, "frontend"))
    assert not of(StepSpan, ring(apart, "core"))
    assert not of(StepSlices, ring(apart, "worker"))


def test_worker_does_not_inherit_the_pipe_of_the_core(apart: Server) -> None:
    pid = int(ring(apart, "worker").stem.rpartition("-")[2])
    assert os.readlink(f"/proc/{pid}/fd/1") == os.readlink(f"/proc/{pid}/fd/2")


def test_killed_worker_ends_the_engine_and_records_survive(apart: Server) -> None:
    apart.post("/v1/completions", BODY)
    pid = int(ring(apart, "worker").stem.rpartition("-")[2])
    children = apart.children()
    os.kill(pid, signal.SIGKILL)
    apart.post("/v1/completions", BODY)  # the step loop detects the exit at its next step
    assert apart.process.wait(60) != 0
    assert "the worker's process has ended (exit code -9)" in apart.said()
    assert all_gone([*children, pid])
    assert of(StepSpan, ring(apart, "worker"))
