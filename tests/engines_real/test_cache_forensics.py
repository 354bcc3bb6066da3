"""On real servers: why each prompt missed the cache, with exact tokens and positions."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import pytest

from inferscope.records import (
    LOOKUP_CLASSES,
    SALT,
    CacheLookup,
    PromptLikeness,
    Record,
    RequestEvent,
)
from tests.engines_real import sglang_server, vllm_server
from tests.engines_real.clients import Ask, ask_all
from tests.engines_real.sglang_server import TIMEOUT_S, Server, ask
from tests.engines_real.vllm_laws import of_kind
from tests.engines_real.vllm_server import export, needs_vllm, stop
from tests.probe.fakes import of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(TIMEOUT_S)]

ROOT = Path(__file__).resolve().parents[2]
FEATURE = "why a prompt missed the prefix cache"
POOL = 3000
BLOCKS = 24
"""KV blocks of the vLLM server: little more than the longest prompt."""
Kind = TypeVar("Kind", bound=Record)


def text(seed: int, num_tokens: int) -> list[int]:
    key = random.Random(seed)
    return [key.randrange(100, 900) for _ in range(num_tokens)]


async def _serve(server: Server) -> None:
    first = text(1, 200)
    prompts: dict[str, list[int]] = {
        "new": first,
        "edited": [*first[:100], 901, *first[101:]],
        "next": [*first, *text(2, 50)],
        "below": text(3, 20),
        "below-again": text(3, 20),
    }
    async with aiohttp.ClientSession() as session:
        for rid, prompt in prompts.items():
            await ask(session, server, rid, prompt, 2)
        await ask(session, server, "salted", first, 2, cache_salt="another")
        for number in range(3):
            await ask(session, server, f"filler-{number}", text(10 + number, 1500), 2)
        await ask(session, server, "evicted", first, 2)
        urllib.request.urlopen(urllib.request.Request(f"{server.url}/flush_cache", method="POST"))
        await ask(session, server, "cleared", first, 2)


def _by_name(rings: Path, role: str, kind: type[Kind]) -> tuple[dict[str, Kind], dict[int, str]]:
    (path,) = rings.glob(f"*/{role}-*.ring")
    names = {event.index: event.request_id for event in of(RequestEvent, path) if event.request_id}
    return {names[each.index]: each for each in of(kind, path)}, names  # type: ignore[attr-defined]


@pytest.mark.conformance("SGLang", FEATURE)
@pytest.mark.parametrize("core", ["rust", "python"])
def test_each_prompt_s_tokens_have_their_cause_in_sglang(tmp_path: Path, core: str) -> None:
    sglang_server.require()
    variables = {"SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": core}
    with sglang_server.serving(tmp_path, "--max-total-tokens", str(POOL), **variables) as server:
        asyncio.run(_serve(server))
        time.sleep(1)
        lookups, names = _by_name(server.rings, "core", CacheLookup)
        likenesses, _ = _by_name(server.rings, "frontend", PromptLikeness)
    classes = {
        name: {each: num for each in LOOKUP_CLASSES if (num := getattr(lookup, each))}
        for name, lookup in lookups.items()
    }
    assert classes["new"] == {"unmatched": 199, "rule": 1}
    assert classes["edited"] == {"hit": 100, "unmatched": 99, "rule": 1}
    assert classes["next"] == {"hit": 200, "unmatched": 49, "rule": 1}
    assert classes["below-again"] == {"hit": 19, "rule": 1}
    assert classes["salted"] == {"unmatched": 199, "rule": 1}
    lost = lookups["evicted"]
    # Keys stand for 32 tokens: the last 7 of these are the comparison's.
    assert lost.hit + lost.evicted == 192
    assert lost.is_inferred == (core == "rust")
    evictors = lost.evictors if lost.is_inferred else (lost.evictor,)
    assert {names[index] for index in evictors} <= {f"filler-{one}" for one in range(3)}
    assert classes["cleared"] == {"cleared": 192, "unmatched": 7, "rule": 1}
    edited, salted = likenesses["edited"], likenesses["salted"]
    assert (edited.diverged_at, edited.equal_again_at, edited.spans) == (100, 101, ((101, 200),))
    assert (salted.diverged_at, salted.differs) == (200, SALT)
    assert likenesses["next"].diverged_at == 200
    assert likenesses["evicted"].diverged_at == 200
    assert "new" not in likenesses


def _asks() -> list[Ask]:
    """Return requests for a vLLM server, to be sent one after the other."""
    first = text(1, 600)
    prompts: dict[str, tuple[list[int], dict[str, Any]]] = {
        "new": (first, {}),
        "edited": ([*first[:300], 901, *first[301:]], {}),
        "next": ([*first, *text(2, 100)], {}),
        "below": (text(3, 40), {}),
        "below-again": (text(3, 40), {}),
        "salted": (first, {"cache_salt": "another"}),
        "logprobs": (first, {"prompt_logprobs": 1}),
        "filler-0": (text(10, 1500), {}),
        "filler-1": (text(11, 1500), {}),
        "evicted": (first, {}),
    }
    body = {"model": "tiny", "max_tokens": 2, "temperature": 0, "ignore_eos": True}
    return [
        Ask(name, {**body, "prompt": prompt, **more}) for name, (prompt, more) in prompts.items()
    ]


@needs_vllm
@pytest.mark.conformance("vLLM", FEATURE)
def test_each_prompt_s_tokens_have_their_cause_in_vllm(tmp_path: Path) -> None:
    asks = _asks()
    with vllm_server.serving(tmp_path, "--num-gpu-blocks-override", str(BLOCKS)) as server:
        ask_all(server.url, asks, at_once=1)
        time.sleep(1)
        assert stop(server) == 0
    assert {each.status for each in asks} == {200}
    requests = of_kind(export(server), "request")
    caches = {request["external_id"]: request["cache"] for request in requests}
    assert caches.keys() == {each.name for each in asks}
    classes = {
        name: {each: num for each, num in cache["tokens"].items() if num}
        for name, cache in caches.items()
    }
    for request in requests:
        assert sum(request["cache"]["tokens"].values()) == request["prompt_tokens"]
    width = caches["new"]["block_tokens"]
    whole = 600 // width * width
    shared = 300 // width * width
    assert classes["new"] == {"new": whole, "rounding": 600 - whole}
    edited, salted = caches["edited"]["difference"], caches["salted"]["difference"]
    assert classes["edited"]["hit"] == shared
    assert (edited["diverged_at"], edited["equal_again_at"]) == (300, 301)
    assert edited["spans"] == [{"start": 301, "end": 600}]
    assert classes["next"]["hit"] == whole
    assert caches["next"]["difference"]["diverged_at"] == 600
    assert classes["below-again"] == {"rounding": 40}
    assert classes["salted"] == {"namespace": whole, "rounding": 600 - whole}
    assert (salted["diverged_at"], salted["differs"]) == (600, ["salt"])
    assert classes["logprobs"] == {"off": 600}
    lost = caches["evicted"]
    assert classes["evicted"].get("hit", 0) + classes["evicted"]["evicted"] == whole
    assert lost["evictor"]["external_id"] in ("filler-0", "filler-1")
    assert not lost["inferred"]
    assert "another" not in json.dumps(requests)


@pytest.mark.parametrize("core", ["python", "rust"])
def test_injected_misses_are_named_in_sglang_s_own_radix_cache(tmp_path: Path, core: str) -> None:
    sglang_server.require()
    result = tmp_path / "truth.json"
    words = ["benchmarks/cache_truth.py", "--engine", "sglang", "--core", core, "--each", "3"]
    subprocess.run(
        [str(sglang_server.PYTHON), *words, "--seed", "7", "--out", str(result)],
        cwd=ROOT,
        env={**sglang_server.environment_of(tmp_path), "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        check=True,
        timeout=TIMEOUT_S,
    )
    found = json.loads(result.read_text(encoding="utf-8"))
    assert found["right"] == found["requests"] > 36
