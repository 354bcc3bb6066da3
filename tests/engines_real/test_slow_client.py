"""A client that stops reading in the middle of its answer, beside one that reads."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from inferscope.records import FINISHED, RequestEvent
from tests.engines_real import sglang_server, vllm_server
from tests.engines_real.clients import Ask, ask_all
from tests.probe.fakes import records

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NUM_TEXTS, NUM_TOKENS, NUM_LOGPROBS = 8, 800, 20
"""More bytes than the kernel keeps for a connection whose server sets no limit: `tcp_wmem`, 4 MiB.
What is in that buffer counts as written."""
LEAST_ANSWER_BYTES = 256 << 10
UNREAD_S = 5.0
"""For how long a client does not read on once its requests have ended in the engine."""


def completion(name: str, **more: Any) -> Ask:
    body = {"model": "tiny", "prompt": [11] * 20, "ignore_eos": True, "temperature": 0.5}
    return Ask(name, {**body, "stream": True, **more})


def leave_unread(url: str, ask: Ask, is_over: Callable[[], bool]) -> tuple[int, int]:
    """Ask, do not read until UNREAD_S after all is computed; return when it read on, and bytes."""
    host, _, port = url.removeprefix("http://").partition(":")
    content = json.dumps(ask.body).encode()
    lines = ["POST /v1/completions HTTP/1.1", "Host: x", "Content-Type: application/json"]
    lines += [f"X-Request-Id: {ask.name}", f"Content-Length: {len(content)}", "Connection: close"]
    with socket.socket() as line:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        line.connect((host, int(port)))
        line.settimeout(120)
        line.sendall("\r\n".join([*lines, "", ""]).encode() + content)
        deadline_s = time.monotonic() + 300
        while not is_over():
            assert time.monotonic() < deadline_s, "the engine does not finish"
            time.sleep(1.0)  # it reads the whole ring
        time.sleep(UNREAD_S)
        resumed_ns = time.monotonic_ns()
        answer = http.client.HTTPResponse(line)
        answer.begin()
        assert answer.status == 200, answer.read()
        return resumed_ns, len(answer.read())


def hold_to_the_truth(lines: list[dict[str, Any]], resumed_ns: int, num_bytes: int) -> None:
    """Check that the unread time is `delivery` for the slow client, and none for the quick one."""
    assert num_bytes >= LEAST_ANSWER_BYTES
    requests = [line for line in lines if line["kind"] == "request"]
    slow = [line for line in requests if line["external_id"] == "slow"]
    quick = [line for line in requests if line["external_id"] == "quick"]
    assert len(slow) >= 1
    assert len(quick) == 1
    steps = [line for line in lines if line["kind"] == "step"]
    for line in slow:
        ended_ns = max(
            step["end_ns"]
            for step in steps
            if any(share["request"] == line["request"] for share in step["shares"])
        )
        unread_ns = resumed_ns - ended_ns
        assert unread_ns >= UNREAD_S * 1e9
        ledger = line["ledger_ns"]
        assert ledger["delivery"] >= 0.95 * unread_ns, ledger
    assert quick[0]["ledger_ns"].get("delivery", 0) <= 50e6
    assert sum(quick[0]["ledger_ns"].values()) == quick[0]["delivered_ns"] - quick[0]["arrived_ns"]


def num_finished(home: Path) -> int:
    """Return how many requests the core is through with."""
    events = [record for path in home.glob("core-*.ring") for record in records(path)]
    return sum(isinstance(record, RequestEvent) and record.kind == FINISHED for record in events)


def run(url: str, home: Path, export: Callable[[], list[dict[str, Any]]]) -> None:
    """Leave an answer unread while another client is served, and check both ledgers."""
    ask_all(url, [completion("warm", max_tokens=4)], at_once=1)
    slow = completion("slow", n=NUM_TEXTS, max_tokens=NUM_TOKENS, logprobs=NUM_LOGPROBS)

    def is_over() -> bool:
        """Serve another client at the same time; return whether the engine is idle again."""
        if not any(asked):
            time.sleep(1.0)
            ask_all(url, [completion("quick", max_tokens=100)], at_once=1)
            asked.append(True)
        return num_finished(home) >= NUM_TEXTS + 2

    asked: list[bool] = []
    resumed_ns, num_bytes = leave_unread(url, slow, is_over)
    time.sleep(1.0)  # the last of them is final
    hold_to_the_truth(export(), resumed_ns, num_bytes)


@vllm_server.needs_vllm
def test_on_vllm(tmp_path: Path) -> None:
    with vllm_server.serving(tmp_path) as server:
        run(server.url, server.home, lambda: vllm_server.export(server))


def test_on_sglang(tmp_path: Path) -> None:
    sglang_server.require()
    with sglang_server.serving(tmp_path) as server:
        run(server.url, server.home, lambda: server.export(tmp_path / "run.jsonl"))
