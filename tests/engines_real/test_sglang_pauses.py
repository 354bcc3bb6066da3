"""A real SGLang server that is paused, by each of its modes, with requests under way."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.engines_real.folded import is_paused
from tests.engines_real.sglang_server import TIMEOUT_S, Answer, Server, ask, require, serving

pytestmark = [pytest.mark.slow, pytest.mark.timeout(TIMEOUT_S)]

PAUSED_S = 3.0
MODES = ("in_place", "retract", "abort")


@pytest.fixture(autouse=True, scope="module")
def _engine() -> None:
    require()


@pytest.mark.conformance("SGLang", "a pause is what requests wait for")
def test_a_pause_is_what_requests_wait_for(tmp_path: Path) -> None:
    with serving(tmp_path, "--max-total-tokens", "20000") as server:
        most_ns = {mode: asyncio.run(_pause(server, mode)) for mode in MODES}
        lines = server.export(tmp_path / "run.jsonl")
    rows = {row["request"]: row for row in lines if row["kind"] == "request"}
    for mode, pause_ns in most_ns.items():
        for which in ("running", "late"):
            row = rows[f"{mode}-{which}"]
            ledger = row["ledger_ns"]
            assert sum(ledger.values()) == row["delivered_ns"] - row["arrived_ns"]
            if (mode, which) == ("abort", "running"):
                assert row["finish"] != "length"
                continue
            assert row["finish"] == "length"
            # The second one was asked when the pause had begun.
            least_ns = 0 if which == "late" else PAUSED_S * 9e8
            assert least_ns < ledger["paused"] < pause_ns, (mode, which, ledger)


async def _pause(server: Server, mode: str) -> int:
    """Pause for three seconds; return how long it took at most."""
    async with aiohttp.ClientSession() as session:
        running = asyncio.create_task(ask(session, server, f"{mode}-running", [5] * 50, 400))
        await asyncio.sleep(0.5)
        assert not await asyncio.to_thread(is_paused, server.home)
        began_s = time.monotonic()
        await _post(session, server, "pause_generation", mode=mode)
        late: asyncio.Task[Answer] = asyncio.create_task(
            ask(session, server, f"{mode}-late", [6] * 50, 4)
        )
        until_s = began_s + 30
        while not await asyncio.to_thread(is_paused, server.home):
            assert time.monotonic() < until_s
        await asyncio.sleep(max(0.0, began_s + PAUSED_S - time.monotonic()))
        assert not late.done()
        await _post(session, server, "continue_generation")
        took_s = time.monotonic() - began_s
        await asyncio.gather(running, late)
    assert not await asyncio.to_thread(is_paused, server.home)
    return round(took_s * 1e9)


async def _post(session: aiohttp.ClientSession, server: Server, path: str, **body: Any) -> None:
    async with session.post(f"{server.url}/{path}", json=body) as reply:
        assert reply.status == 200, await reply.text()
