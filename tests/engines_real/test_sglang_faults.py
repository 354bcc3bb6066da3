"""What goes wrong beside a real SGLang, in our own hooks and in its processes, and what is left."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from inferscope.records import FAILED, ProbeHealth
from tests.engines_real import sglang_faults
from tests.engines_real.sglang_server import (
    START_S,
    TIMEOUT_S,
    Answer,
    Server,
    ask,
    require,
    serving,
)
from tests.probe.fakes import of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(TIMEOUT_S)]
_numbers = itertools.count()
_LONG = 150
"""Tokens of those who run while another waits and is ended."""
_PATIENCE_S = START_S / 12
"""Until a process of the server has done what it was asked for."""
_SILENCE_S = 7.0
"""Time in seconds after which a killed process is detected by its silence."""


@pytest.fixture(autouse=True, scope="module")
def _engine() -> None:
    require()


class Saboteur:
    """The other end of `sglang_faults`, which runs in the server's processes."""

    def __init__(self, folder: Path, first: str) -> None:
        folder.mkdir(parents=True)
        source = Path(sglang_faults.__file__)
        shutil.copy(source, folder / "sitecustomize.py")
        self._order = folder / "order"
        self._order.write_text(first)
        path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
        self.environment = {"PYTHONPATH": path, "FAULTS": str(self._order)}

    def order(self, hook: str, server: Server) -> None:
        """Make this hook fail from now on, in the core and in the front end."""
        written = self._order.with_suffix(".new")
        written.write_text(hook)
        written.replace(self._order)
        deadline = time.monotonic() + _PATIENCE_S
        while server.log.read_text().count(f"ready: {hook} ") < 2:
            assert time.monotonic() < deadline, server.log.read_text()[-2000:]
            time.sleep(0.05)


def _wait_until(is_so: Callable[[], bool]) -> None:
    """Wait for a process of the server; what it has not done by then, the caller finds out."""
    deadline = time.monotonic() + _PATIENCE_S
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.05)


def _logged(server: Server, hook: str) -> list[str]:
    pattern = f"put into {hook}$"
    return [line for line in server.log.read_text().splitlines() if re.search(pattern, line)]


def _num_failed(server: Server) -> int:
    """Return the number of rings whose probe failed."""
    last = [of(ProbeHealth, ring)[-1] for ring in server.home.glob("*.ring")]
    return sum(each.state == FAILED for each in last)


def _name() -> str:
    return f"ask-{next(_numbers)}"


async def _everything(server: Server) -> list[Any]:
    """Ask in every way that reaches a hook: a stream, a batch, and one that waits and is ended."""
    async with aiohttp.ClientSession() as session:
        stream = await ask(session, server, _name(), list(range(100, 150)), 8)
        batch = {"model": "tiny", "prompt": [[5, 6, 7], [8, 9]], "max_tokens": 4, "temperature": 0}
        async with session.post(f"{server.url}/v1/completions", json=batch) as reply:
            assert reply.status == 200
            texts = [choice["text"] for choice in (await reply.json())["choices"]]
        begun = [asyncio.Event() for _ in range(2)]
        prompt = list(range(200, 220))
        running = [
            asyncio.create_task(ask(session, server, _name(), prompt, _LONG, began=began))
            for began in begun
        ]
        await asyncio.gather(*(began.wait() for began in begun))
        name = _name()
        waiting = asyncio.create_task(ask(session, server, name, [7] * 9, 4))
        while not waiting.done():  # before it has come to the server nothing is ended
            async with session.post(f"{server.url}/abort_request", json={"rid": name}) as reply:
                assert reply.status == 200
            await asyncio.wait([waiting], timeout=0.1)
        whole = await asyncio.gather(*running)
    assert [answer.usage["completion_tokens"] for answer in (stream, *whole)] == [8, _LONG, _LONG]
    return [stream.text, *texts, *(answer.text for answer in whole)]


@pytest.mark.timeout(2 * TIMEOUT_S)  # all requests are served once for each hook
@pytest.mark.conformance("SGLang", "a fault of ours changes no answer")
def test_a_fault_in_any_hook_is_reported_once_and_answers_stay(tmp_path: Path) -> None:
    saboteur = Saboteur(tmp_path / "faults", "nothing")
    variables = {**saboteur.environment, "INFERSCOPE_RING_MB": "1"}
    options = ("--max-total-tokens", "20000", "--max-running-requests", "2")
    with serving(tmp_path / "server", *options, **variables) as server:
        asyncio.run(_everything(server))  # from now on its prompts are in the cache
        expected = asyncio.run(_everything(server))
        assert server.look()["health"]["probe_state"] == "on"
        hooks = (
            *sglang_faults.CORE,
            *sglang_faults.FRONT_END,
            *sglang_faults.EDGE,
            *sglang_faults.EDGE_FUNCTIONS,
        )
        for number, hook in enumerate(hooks, 1):
            saboteur.order(hook, server)
            assert asyncio.run(_everything(server)) == expected, hook
            _wait_until(lambda hook=hook: bool(_logged(server, hook)))
            _wait_until(lambda number=number: _num_failed(server) >= number)
            assert len(_logged(server, hook)) == 1, hook
            assert _num_failed(server) == number, hook
        assert server.look()["health"]["probe_state"] == "failed"
        assert "probe failed" in server.inferscope("attach", server.home.name, "--once")


@pytest.mark.conformance("SGLang", "a fault of ours changes no answer")
def test_a_fault_at_the_start_leaves_a_server_that_is_not_observed(tmp_path: Path) -> None:
    saboteur = Saboteur(tmp_path / "faults", sglang_faults.AT_START)
    options = ("--max-total-tokens", "20000", "--max-running-requests", "2")
    with serving(tmp_path / "server", *options, **saboteur.environment) as server:
        texts = asyncio.run(_everything(server))
        lines = _logged(server, sglang_faults.AT_START)
    assert all(texts)
    assert len(lines) == 2, lines
    assert all("not observing" in line for line in lines)
    assert not list((tmp_path / "server" / "rings").glob("*/*.ring"))


def _detokenizer(server: Server) -> int:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            title, group = path.read_bytes(), os.getpgid(int(path.parent.name))
        except (OSError, ProcessLookupError):
            continue
        if title.startswith(b"sglang::detokenizer") and group == server.process.pid:
            return int(path.parent.name)
    raise AssertionError("there is no detokenizer")


async def _whole(server: Server) -> list[Answer]:
    async with aiohttp.ClientSession() as session:
        return [await ask(session, server, f"whole-{i}", [9 + i] * 40, 10) for i in range(3)]


async def _dying(server: Server, victim: int) -> None:
    async with aiohttp.ClientSession() as session:
        tasks = [
            asyncio.create_task(ask(session, server, f"dying-{i}", [50 + i] * 40, 1900))
            for i in range(3)
        ]
        await asyncio.sleep(1.5)
        os.kill(victim, signal.SIGKILL)
        await asyncio.wait(tasks, timeout=30)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.conformance("SGLang", "`kill -9` of the front end")
@pytest.mark.parametrize("victim", ["frontend", "detokenizer"])
def test_requests_in_flight_in_a_killed_process_are_lost(tmp_path: Path, victim: str) -> None:
    # SGLang sees that its detokenizer is gone, and takes its time to dump what it can.
    patience = {"SGLANG_CUDA_COREDUMP_BEFORE_CRASH_WAIT_SECS": "0"}
    with serving(tmp_path, "--max-total-tokens", "20000", **patience) as server:
        asyncio.run(_whole(server))
        pid = _detokenizer(server) if victim == "detokenizer" else server.pid_of(victim)
        asyncio.run(_dying(server, pid))
        time.sleep(_SILENCE_S)
        rows = server.export(tmp_path / "out.jsonl")
        why = [server.inferscope("why", f"dying-{i}", str(server.home)) for i in range(3)]
    requests = {row["request"]: row for row in rows if row["kind"] == "request"}
    assert len(requests) == 7
    for name, row in requests.items():
        if not name.startswith(("dying", "whole")):  # with this one SGLang warms itself up
            continue
        is_lost = name.startswith("dying")
        assert row["finish"] == ("engine_lost" if is_lost else "length"), name
        assert row["output_tokens"] >= 10
        assert sum(row["ledger_ns"].values()) == row["delivered_ns"] - row["arrived_ns"]
    assert all("engine_lost" in text for text in why)
