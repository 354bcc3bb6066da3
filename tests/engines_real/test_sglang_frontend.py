"""Between HTTP and SGLang's scheduler: a slow tokeniser, and several answers to one request."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import statistics
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.engines_real import slow_tokeniser
from tests.engines_real.folded import fold
from tests.engines_real.sglang_server import (
    TIMEOUT_S,
    Answer,
    Server,
    ask,
    require,
    serving,
    work_by_request,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(TIMEOUT_S)]
MS = 1_000_000
_HOOK = """
from inferscope.adapters.inject import when_imported
when_imported({"sglang.srt.managers.tokenizer_manager": "slow_tokeniser:slow_down"})
"""


@dataclass
class Slow:
    """A server, and the file that makes its tokeniser slow."""

    server: Server
    switch: Path
    folder: Path

    def requests(self, prefix: str) -> list[dict[str, Any]]:
        """Return the rows of what was asked under names with this beginning."""
        time.sleep(1)
        rows = self.server.export(self.folder / f"{prefix}.jsonl")
        return [
            row
            for row in rows
            if row["kind"] == "request" and (row["external_id"] or "").startswith(f"ext-{prefix}")
        ]


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slow]:
    require()
    folder = tmp_path_factory.mktemp("frontend")
    shutil.copy(str(slow_tokeniser.__file__), folder)
    (folder / "sitecustomize.py").write_text(_HOOK)
    switch = folder / "slow"
    variables = {
        "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]),
        "SLOW_TOKENISER": str(switch),
    }
    with serving(folder / "server", "--max-total-tokens", "20000", **variables) as server:
        yield Slow(server, switch, folder)


async def _one_by_one(server: Server, name: str) -> list[Answer]:
    async with aiohttp.ClientSession() as session:
        texts = [f"Tell me something of the number {number}." for number in range(8)]
        return [await ask(session, server, f"{name}-{i}", t, 8) for i, t in enumerate(texts)]


@pytest.mark.conformance("SGLang", "a slow tokeniser shows as `frontend`")
def test_a_slow_tokeniser_is_time_in_the_front_end(slow: Slow) -> None:
    asyncio.run(_one_by_one(slow.server, "fast"))
    slow.switch.touch()
    asyncio.run(_one_by_one(slow.server, "slow"))
    slow.switch.unlink()
    for ledger in ("ledger_ns", "ttft_ledger_ns"):
        spent = {
            name: [row[ledger]["frontend"] / MS for row in slow.requests(name)]
            for name in ("fast", "slow")
        }
        print(f"\n{ledger}, frontend, ms: {spent}")  # noqa: T201
        assert [len(values) for values in spent.values()] == [8, 8]
        assert statistics.median(spent["fast"]) < 50
        assert min(spent["slow"]) >= 195
        assert statistics.median(spent["slow"]) < 250


async def _several(server: Server) -> tuple[Answer, Answer]:
    prompt = list(range(300, 420))
    async with aiohttp.ClientSession() as session:
        twins = await ask(session, server, "twins", prompt, 12, n=3, temperature=0.9)
        batch = await ask(session, server, "batch", [prompt[:30], prompt[40:90]], 12)
    return twins, batch


@pytest.mark.conformance("SGLang", "several answers (`n`)")
def test_each_of_several_answers_is_a_request_and_the_sums_are_the_apis(slow: Slow) -> None:
    for answer in asyncio.run(_several(slow.server)):
        rows = slow.requests(answer.rid)
        work = work_by_request(slow.server.export(slow.folder / "work.jsonl"))
        assert sum(row["output_tokens"] for row in rows) == answer.usage["completion_tokens"]
        # To have the prompt in the cache for all of them, SGLang computes it in one more.
        warming = [row for row in rows if not row["output_tokens"]]
        answering = [row for row in rows if row["output_tokens"]]
        is_twins = answer.rid == "twins"
        assert (len(warming), len(answering)) == ((1, 3) if is_twins else (0, 2))
        prompts = [row["prompt_tokens"] for row in answering]
        assert sum(prompts[:1] if is_twins else prompts) == answer.usage["prompt_tokens"]
        for row in rows:
            assert row["finish"] == "length"
            assert sum(row["ledger_ns"].values()) == row["delivered_ns"] - row["arrived_ns"]
            due = row["prompt_tokens"] - row["cached_tokens"] + max(0, row["output_tokens"] - 1)
            assert work[row["request"]].tokens == due
        if is_twins:
            assert all(row["cached_tokens"] >= row["prompt_tokens"] - 1 for row in answering)


async def _asking(server: Server) -> None:
    prompt = list(range(700, 720))
    async with aiohttp.ClientSession() as session:
        chosen = {"top_p": 0.75, "top_k": 20, "frequency_penalty": 0.125, "seed": 7}
        await ask(session, server, "asked-much", prompt, 6, temperature=0.5, **chosen)
        await ask(session, server, "asked-little", prompt, 6)
        await ask(session, server, "asked-thrice", prompt, 6, temperature=0.9, n=3)
        body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 3}, "rid": "asked-raw"}
        headers = {"X-Request-Id": "ext-asked-raw"}
        async with session.post(f"{server.url}/generate", json=body, headers=headers) as reply:
            assert reply.status == 200, await reply.text()
            await reply.read()


@pytest.mark.conformance("SGLang", "what was asked of the sampling (`gen_ai.request.*`)")
def test_what_was_asked_of_the_sampling_is_on_the_spans(slow: Slow) -> None:
    asyncio.run(_asking(slow.server))
    slow.requests("asked")
    folded = fold(slow.server.home)
    assert folded.asked("ext-asked-much") == {
        "stream": True,
        "max_tokens": 6,
        "temperature": 0.5,
        "top_p": 0.75,
        "top_k": 20,
        "frequency_penalty": 0.125,
        "seed": 7,
    }
    # To the scheduler this is a temperature of 1 and a choice of one token.
    little = {"stream": True, "max_tokens": 6, "temperature": 0}
    assert folded.asked("ext-asked-little") == little
    assert folded.asked("ext-asked-raw") == {"stream": False, "max_tokens": 3}
    several = [each for each in folded.requests if each.external_id == "ext-asked-thrice"]
    choices = {folded.roots[each.request_id]["gen_ai.request.choice.count"] for each in several}
    assert choices == {3}


_METRICS = {
    "ttft": "time_to_first_token_seconds",
    "e2e": "e2e_request_latency_seconds",
    "queue": "queue_time_seconds",
}


def _metrics(server: Server) -> dict[str, tuple[int, float]]:
    """Return how many requests SGLang counted in each of its histograms, and their seconds."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=10) as page:
        text = page.read().decode()

    def total(name: str) -> float:
        return sum(float(one) for one in re.findall(rf"^sglang:{name}{{.*}} (\S+)$", text, re.M))

    return {
        ours: (round(total(f"{theirs}_count")), total(f"{theirs}_sum"))
        for ours, theirs in _METRICS.items()
    }


async def _at_once(server: Server) -> list[Answer]:
    async with aiohttp.ClientSession() as session:
        tasks = [
            ask(session, server, f"metered-{i}", list(range(500 + 200 * i, 900 + 200 * i)), 30)
            for i in range(8)
        ]
        return await asyncio.gather(*tasks)


@pytest.mark.conformance("SGLang", "engine's own `/metrics` agree")
def test_sglangs_own_metrics_differ_by_their_definitions_only(slow: Slow) -> None:
    before = _metrics(slow.server)
    asyncio.run(_at_once(slow.server))
    rows = slow.requests("metered")
    after = _metrics(slow.server)
    ours = {
        "ttft": [row["first_token_ns"] - row["arrived_ns"] for row in rows],
        "e2e": [row["delivered_ns"] - row["arrived_ns"] for row in rows],
        "queue": [
            row["ledger_ns"].get("queue", 0) + row["ledger_ns"].get("queue_idle", 0) for row in rows
        ],
    }
    apart = {}
    for name, values in ours.items():
        assert after[name][0] - before[name][0] == len(values) == 8
        theirs_ms = (after[name][1] - before[name][1]) * 1000 / len(values)
        ours_ms = statistics.mean(values) / MS
        apart[name] = ours_ms - theirs_ms
        print(f"\n{name}: ours {ours_ms:.1f} ms, SGLang's {theirs_ms:.1f} ms")  # noqa: T201
    # SGLang's first token and end are the scheduler's; ours have been written to the client.
    assert 0 < apart["ttft"] < 200
    assert 0 < apart["e2e"] < 200
    assert abs(apart["queue"]) < 50
