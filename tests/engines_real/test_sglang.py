"""The adapter on a real SGLang, against the server's own API and its client."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.engines_real.sglang_server import (
    PYTHON,
    TIMEOUT_S,
    Answer,
    Server,
    ask,
    environment_of,
    require,
    serving,
    work_by_request,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(TIMEOUT_S)]
MS = 1_000_000


@pytest.fixture(autouse=True, scope="module")
def _engine() -> None:
    require()


_LOADED = """
import sys
from sglang.srt.plugins import load_plugins
load_plugins()
print(*sorted(name for name in sys.modules if name.startswith("inferscope")))
"""


@pytest.mark.conformance("SGLang", "imports nothing unless switched on")
def test_sglang_loads_nothing_of_ours_unless_asked(tmp_path: Path) -> None:
    loaded = {}
    for given in ("0", "1"):
        done = subprocess.run(
            [PYTHON, "-c", _LOADED],
            env={**environment_of(tmp_path), "INFERSCOPE": given},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        )
        loaded[given] = done.stdout.splitlines()[-1].split()
        assert "unsupported" not in done.stderr
    adapter = [".adapters", ".adapters.registry", ".adapters.sglang", ".adapters.sglang.plugin"]
    modules = ["", *adapter, ".errors", ".observing"]
    assert loaded["0"] == [f"inferscope{module}" for module in modules]
    assert "inferscope.adapters.sglang.hooks" in loaded["1"]


def _prompt(seed: int, num_tokens: int) -> list[int]:
    return random.Random(seed).choices(range(100, 4000), k=num_tokens)


def _check_tokens(rows: list[dict[str, Any]], answers: list[Answer]) -> int:
    """Hold every finished answer against the slices; return the recomputed tokens."""
    work = work_by_request(rows)
    requests = {row["request"]: row for row in rows if row["kind"] == "request"}
    recomputed = 0
    for answer in answers:
        row, mine = requests[answer.rid], work[answer.rid]
        prompt, out = answer.usage["prompt_tokens"], answer.usage["completion_tokens"]
        assert (row["prompt_tokens"], row["output_tokens"]) == (prompt, out)
        assert row["cached_tokens"] == answer.cached
        assert row["external_id"] == f"ext-{answer.rid}"
        assert (row["arrived_at"], row["delivered_at"]) == ("http", "http")
        assert row["finish"] == answer.finish
        assert mine.tokens == prompt - answer.cached + out - 1 + mine.recomputed, answer.rid
        recomputed += mine.recomputed
    return recomputed


def _check_conservation(path: Path) -> None:
    """Run the contract's own check, where it is at hand."""
    check = os.environ.get("INFERSCOPE_CONSERVE")
    if check:
        # Its verdict is on a demo's mixture of work, too; here it is only asked for breaches.
        command = [sys.executable, check, str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        sys.stdout.write(done.stdout)
        assert " 0 breaches" in done.stdout
    for row in map(json.loads, path.read_text().splitlines()):
        if row["kind"] == "step":
            parts = sum(share["ns"] for share in row["shares"])
            assert parts + row["padding_ns"] + row["unattributed_ns"] == row["measured_ns"]
        elif row["kind"] == "request" and not row["joined_late"]:
            assert sum(row["ledger_ns"].values()) == row["delivered_ns"] - row["arrived_ns"]


async def _mixed_load(server: Server) -> tuple[list[Answer], list[Answer]]:
    """Send prompts of all lengths at once, some of which share a beginning, and leave a few."""
    shared = _prompt(0, 700)
    async with aiohttp.ClientSession() as session:
        first = await ask(session, server, "shared-0", shared, 4)
        tasks = [
            ask(session, server, f"long-{i}", _prompt(i, 900 + 100 * i), 24) for i in range(1, 5)
        ]
        tasks += [ask(session, server, f"short-{i}", _prompt(10 + i, 20 + i), 60) for i in range(5)]
        tasks += [
            ask(session, server, f"shared-{i}", shared + _prompt(20 + i, 50), 30)
            for i in range(1, 4)
        ]
        leaving = [
            ask(session, server, f"left-{i}", _prompt(30 + i, 40), 1500, leave_after=3)
            for i in range(2)
        ]
        probing = [_probe_health(session, server) for _ in range(3)]
        looking = asyncio.create_task(asyncio.to_thread(server.look))
        done = await asyncio.gather(*tasks, *leaving, *probing)
        seen = await looking
        assert (seen["engine"], seen["is_alive"]) == ("sglang", True)
        assert seen["num_running"] + seen["num_waiting"] + seen["num_finished"] > 0
        answers = [one for one in done if isinstance(one, Answer)]
        return [first, *answers[: len(tasks)]], answers[len(tasks) :]


async def _probe_health(session: aiohttp.ClientSession, server: Server) -> None:
    async with session.get(f"{server.url}/health_generate") as reply:
        assert reply.status == 200


def _check_edges(rows: list[dict[str, Any]], answers: list[Answer]) -> dict[str, list[float]]:
    """Hold the front end's edges against the client's; return how far apart they are, in ms.

    Our edges lie within the client's, but for the moment between a write and the note of it.
    `unblocked` is `ttft` without the time for which either process waited for a core meanwhile.
    """
    requests = {row["request"]: row for row in rows if row["kind"] == "request"}
    names = ("received", "first", "last", "ttft", "unblocked")
    offsets_ms: dict[str, list[float]] = {name: [] for name in names}
    for answer in answers:
        row = requests[answer.rid]
        received_ms = (row["arrived_ns"] - answer.sent_ns) / MS
        first_ms = (answer.times_ns[0] - row["first_token_ns"]) / MS
        offsets_ms["received"].append(received_ms)
        offsets_ms["first"].append(first_ms)
        offsets_ms["last"].append((answer.done_ns - row["delivered_ns"]) / MS)
        offsets_ms["ttft"].append(received_ms + first_ms)
        offsets_ms["unblocked"].append(max(0, received_ms + first_ms - answer.waited_ns / MS))
    for name, values in offsets_ms.items():
        values.sort()
        middle = values[len(values) // 2]
        sys.stdout.write(f"{name}: {values[0]:.2f} .. {middle:.2f} .. {values[-1]:.2f} ms\n")
        assert values[0] > -5
    return offsets_ms


@pytest.mark.conformance("SGLang", "`inferscope run` in front of the server")
@pytest.mark.conformance("SGLang", "HTTP receipt and last byte are the edges")
@pytest.mark.conformance("SGLang", "the client's id (`X-Request-Id`)")
@pytest.mark.conformance("SGLang", "tokens of slices = the API's `usage`")
@pytest.mark.conformance("SGLang", "every step joined and conserved, every ledger closed")
@pytest.mark.conformance("SGLang", "chunked and mixed prefill")
@pytest.mark.conformance("SGLang", "prefix cache")
@pytest.mark.conformance("SGLang", "clients that hang up are cancels")
@pytest.mark.conformance("SGLang", "health probes are no requests")
@pytest.mark.conformance("SGLang", "`kill -9` of the core")
def test_every_token_is_accounted_for_under_a_mixed_load(tmp_path: Path) -> None:
    record = tmp_path / "run.isr"
    with serving(tmp_path, "--max-total-tokens", "20000", record=record) as server:
        answers, left = asyncio.run(_mixed_load(server))
        time.sleep(4)  # a disconnect is noticed with the next output, then by SGLang's own poll
        rows = server.export(tmp_path / "out.jsonl")
        requests = {row["request"]: row for row in rows if row["kind"] == "request"}
        run = next(row for row in rows if row["kind"] == "run")

        assert _check_tokens(rows, answers) == 0
        assert run["unjoined"] == run["lost"] == 0
        assert not [name for name in requests if name.startswith("HEALTH")]
        assert {requests[answer.rid]["finish"] for answer in left} == {"client_cancel"}
        assert any(answer.cached >= 600 for answer in answers)
        steps = [row for row in rows if row["kind"] == "step" and row["shares"]]
        assert any({s["phase"] for s in row["shares"]} == {"prefill", "decode"} for row in steps)
        most = max(sum(s["tokens"] for s in row["shares"]) for row in steps)
        assert most <= 512 + 16
        _check_conservation(tmp_path / "out.jsonl")
        _check_edges(rows, answers)

        _check_a_killed_scheduler(server, tmp_path)
        assert server.stop() != 0  # SGLang gives up with its scheduler
        folded = {row["request"]: row for row in rows if row["kind"] == "request"}
        recorded = server.export(tmp_path / "recorded.jsonl", record)
        again = {row["request"]: row for row in recorded if row["kind"] == "request"}
        assert again.pop("killed")["finish"] == "engine_lost"
        assert again == folded


def _check_a_killed_scheduler(server: Server, folder: Path) -> None:
    """Kill the scheduler while it works: who was in flight is lost, and all else still there."""

    async def asking() -> None:
        async with aiohttp.ClientSession() as session:
            asked = ask(session, server, "killed", _prompt(99, 50), 1900)
            task = asyncio.create_task(asked)
            await asyncio.sleep(1)
            os.kill(server.pid_of("core"), signal.SIGKILL)
            await asyncio.wait([task], timeout=5)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(asking())
    time.sleep(7)
    rows = server.export(folder / "killed.jsonl")
    (killed,) = (row for row in rows if row.get("request") == "killed" and row["kind"] == "request")
    assert killed["finish"] == "engine_lost"
    assert killed["output_tokens"] > 0
    assert sum(killed["ledger_ns"].values()) == killed["delivered_ns"] - killed["arrived_ns"]


async def _crowd(server: Server) -> list[Answer]:
    async with aiohttp.ClientSession() as session:
        tasks = [
            ask(session, server, f"crowd-{i}", _prompt(50 + i, 60 + 10 * i), 250) for i in range(10)
        ]
        return await asyncio.gather(*tasks)


@pytest.mark.conformance("SGLang", "preemption and recompute")
@pytest.mark.conformance("SGLang", "overlapped scheduling, and without")
@pytest.mark.parametrize("overlap", [True, False])
def test_retracted_requests_are_preempted_resumed_and_recomputed(
    tmp_path: Path, overlap: bool
) -> None:
    options = ["--max-total-tokens", "1500"]
    if not overlap:
        options.append("--disable-overlap-schedule")
    # SGLang is made to hope for short answers, so that it admits more than its pool will hold.
    with serving(tmp_path, *options, SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION="32") as server:
        answers = asyncio.run(_crowd(server))
        time.sleep(1)
        rows = server.export(tmp_path / "out.jsonl")
        assert "Retract" in server.log.read_text(), "the pool was large enough"
        assert _check_tokens(rows, answers) > 0
        requests = [row for row in rows if row["kind"] == "request"]
        assert any(row["ledger_ns"].get("recompute", 0) for row in requests)
        assert any(row["ledger_ns"].get("preempted", 0) for row in requests)
        run = next(row for row in rows if row["kind"] == "run")
        assert run["unjoined"] == run["lost"] == 0
        _check_conservation(tmp_path / "out.jsonl")


async def _small_crowd(server: Server) -> list[Answer]:
    async with aiohttp.ClientSession() as session:
        tasks = [ask(session, server, f"rank-{i}", _prompt(80 + i, 200), 20) for i in range(6)]
        return await asyncio.gather(*tasks)


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="a rank takes a core")
@pytest.mark.conformance("SGLang", "tensor ranks")
@pytest.mark.conformance("SGLang", "data-parallel replicas")
@pytest.mark.parametrize("kind", ["tp", "dp"])
def test_ranks_are_joined_and_replicas_kept_apart(tmp_path: Path, kind: str) -> None:
    options = ["--max-total-tokens", "20000", f"--{kind}-size", "2"]
    with serving(tmp_path, *options, SGLANG_CPU_OMP_THREADS_BIND="0|1") as server:
        answers = asyncio.run(_small_crowd(server))
        time.sleep(1)
        rows = server.export(tmp_path / "out.jsonl")
    run = next(row for row in rows if row["kind"] == "run")
    assert run["unjoined"] == run["lost"] == 0
    work = work_by_request(rows)
    for answer in answers:
        usage = answer.usage
        expected = usage["prompt_tokens"] - answer.cached + usage["completion_tokens"] - 1
        # Each tensor rank did all of it, for its part of the model.
        assert work[answer.rid].tokens == expected * (2 if kind == "tp" else 1)
    steps = [row for row in rows if row["kind"] == "step"]
    assert {(row["dp_rank"], row["rank"]) for row in steps} == (
        {(0, 0), (0, 1)} if kind == "tp" else {(0, 0), (1, 1)}
    )


def _greedy(folder: Path, *, is_observed: bool) -> list[str]:
    async def asking(server: Server) -> list[Answer]:
        async with aiohttp.ClientSession() as session:
            return [
                await ask(session, server, f"same-{i}", _prompt(70 + i, 100 * (i % 6 + 1)), 40)
                for i in range(30)
            ]

    with serving(folder, "--max-total-tokens", "20000", is_observed=is_observed) as server:
        answers = asyncio.run(asking(server))
        if is_observed:
            time.sleep(1)
            rows = server.export(folder / "out.jsonl")
            _check_tokens(rows, answers)
            apart_ms = _check_edges(rows, answers)
            assert apart_ms["ttft"][0] >= 0
            # On a busy machine a client reads its token late: it waits for a core.
            unblocked_ms = apart_ms["unblocked"]
            assert unblocked_ms[int(0.99 * (len(unblocked_ms) - 1))] <= 5
        return [answer.text for answer in answers]


@pytest.mark.conformance("SGLang", "the same answers with and without the probe")
@pytest.mark.conformance(
    "SGLang", "client's clock and ours within [0, 5 ms]", "partial", "TTFT, asked one at a time"
)
def test_what_is_generated_is_the_same_with_the_probe_and_without(tmp_path: Path) -> None:
    observed = _greedy(tmp_path / "on", is_observed=True)
    plain = _greedy(tmp_path / "off", is_observed=False)
    assert observed == plain
    assert len(set(observed)) > 1
    assert not (tmp_path / "off" / "rings").exists()
