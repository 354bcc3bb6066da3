"""On a real SGLang server: why each prompt missed the cache, with exact tokens and positions."""

from __future__ import annotations

import asyncio
import random
import time
import urllib.request
from pathlib import Path
from typing import TypeVar

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
from tests.engines_real.sglang_server import TIMEOUT_S, Server, ask, require, serving
from tests.probe.fakes import of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(TIMEOUT_S)]

POOL = 3000
Kind = TypeVar("Kind", bound=Record)


@pytest.fixture(autouse=True, scope="module")
def _engine() -> None:
    require()


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


def test_each_prompt_s_tokens_have_their_cause(tmp_path: Path) -> None:
    with serving(tmp_path, "--max-total-tokens", str(POOL)) as server:
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
    assert lost.is_inferred
    assert {names[index] for index in lost.evictors} <= {f"filler-{one}" for one in range(3)}
    assert classes["cleared"] == {"cleared": 192, "unmatched": 7, "rule": 1}
    edited, salted = likenesses["edited"], likenesses["salted"]
    assert (edited.diverged_at, edited.equal_again_at, edited.spans) == (100, 101, ((101, 200),))
    assert (salted.diverged_at, salted.differs) == (200, SALT)
    assert likenesses["next"].diverged_at == 200
    assert likenesses["evicted"].diverged_at == 200
    assert "new" not in likenesses
