"""A short request that arrives during another's long prefill waits in the queue, for that one."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.engines_real import sglang_server, vllm_server
from tests.engines_real.clients import Ask, ask_all

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

BIG_TOKENS = 3300
LATER_S = 0.04


def completion(name: str, num_tokens: int, *, seed: int = 0) -> Ask:
    body = {
        "model": "tiny",
        "prompt": [(seed * 977 + at * 7) % 3000 + 10 for at in range(num_tokens)],  # not cached
        "max_tokens": 4,
        "ignore_eos": True,
        "temperature": 0,
    }
    return Ask(name, {**body, "stream": True, "stream_options": {"include_usage": True}})


def ask_during_a_prefill(url: str, number: int) -> tuple[str, str]:
    """Send a long prompt, and a short one while it is computed; return both names."""
    big = completion(f"big-{number}", BIG_TOKENS, seed=2 * number + 1)
    victim = completion(f"victim-{number}", 13, seed=2 * number + 2)
    asking = threading.Thread(target=ask_all, args=(url, [big]), kwargs={"at_once": 1})
    asking.start()
    time.sleep(LATER_S)
    ask_all(url, [victim], at_once=1)
    asking.join(120)
    assert not asking.is_alive()
    return big.name, victim.name


def assert_the_victim_waited_for_it(lines: list[dict[str, Any]], big: str, victim: str) -> None:
    requests = {line["external_id"]: line for line in lines if line["kind"] == "request"}
    ledger, blame = requests[victim]["ttft_ledger_ns"], requests[victim]["blame"]
    by_step = [line for line in lines if line["kind"] == "step"]
    internal = requests[big]["request"]
    prefill_end_ns = max(
        step["end_ns"]
        for step in by_step
        if any(s["request"] == internal and s["phase"] == "prefill" for s in step["shares"])
    )
    waited_ns = prefill_end_ns - requests[victim]["arrived_ns"]
    assert waited_ns > 50e6, "the prefill was over too soon to be waited for"
    queue_ns = ledger.get("queue", 0) + ledger.get("queue_idle", 0)
    assert queue_ns >= 0.95 * (waited_ns - ledger.get("frontend", 0)), ledger
    assert ledger.get("frontend", 0) <= 100e6  # parsing and tokenising, beside other work
    of_big = sum(b["ns"] for b in blame if b["cause"] == "queue" and b["request"] == internal)
    assert of_big >= 0.95 * ledger["queue"], blame


@vllm_server.needs_vllm
def test_on_vllm(tmp_path: Path) -> None:
    options = ("--max-model-len", "4096", "--max-num-batched-tokens", "4096")
    with vllm_server.serving(tmp_path, *options) as server:
        ask_all(server.url, [completion("warm", 20)], at_once=1)
        pairs = [ask_during_a_prefill(server.url, number) for number in range(5)]
        time.sleep(1.0)  # the last of them is final
        lines = vllm_server.export(server)
    for big, victim in pairs:
        assert_the_victim_waited_for_it(lines, big, victim)


def test_on_sglang(tmp_path: Path) -> None:
    sglang_server.require()
    options = (
        "--context-length",
        "4096",
        "--chunked-prefill-size",
        "4096",
        "--max-total-tokens",
        "20000",
    )
    with sglang_server.serving(tmp_path, *options) as server:
        ask_all(server.url, [completion("warm", 20)], at_once=1)
        pairs = [ask_during_a_prefill(server.url, number) for number in range(5)]
        time.sleep(1.0)  # the last of them is final
        lines = server.export(tmp_path / "run.jsonl")
    for big, victim in pairs:
        assert_the_victim_waited_for_it(lines, big, victim)
