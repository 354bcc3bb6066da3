from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from inferscope.adapters.edge import Edge
from inferscope.adapters.patching import Patches
from inferscope.adapters.sglang import hooks as sglang_hooks
from inferscope.adapters.sglang.frontend import FrontEndWatch
from inferscope.adapters.sglang.hooks import FrontEndHooks
from inferscope.probe import Probe
from inferscope.probe.clock import SystemClock
from inferscope.records import CLOSED, EVENTS, FAILED, Emitted, ProbeHealth, RequestEvent
from tests.probe.fakes import make_probe, of

LINGER_S = 0.3
"""SGLang takes two seconds."""


class TokenizerManager:
    """SGLang's, as far as our hooks go; outputs come from a task of its own, as they do there."""

    def __init__(self, num_tokens: int) -> None:
        self.rid_to_state: dict[str, Any] = {}
        self._num_tokens = num_tokens
        self.tidy_ns = 0

    async def _send_one_request(self, tokenized: Any) -> None:
        state = self.rid_to_state.setdefault(tokenized.rid, SimpleNamespace())
        state.chunks = asyncio.Queue()
        self._loop = asyncio.create_task(self._outputs(tokenized.rid))

    async def _send_batch_request(self, tokenized: list[Any]) -> None:
        for one in tokenized:
            await self._send_one_request(one)

    async def _handle_batch_output(self, outputs: Any) -> None:
        for rid, count in zip(outputs.rids, outputs.completion_tokens, strict=True):
            self.rid_to_state[rid].chunks.put_nowait(count)

    async def _outputs(self, rid: str) -> None:
        for count in range(1, self._num_tokens + 1):
            await asyncio.sleep(0.001)
            await self._handle_batch_output(SimpleNamespace(rids=[rid], completion_tokens=[count]))

    async def tidy_up(self) -> None:
        await asyncio.sleep(LINGER_S)
        self.tidy_ns = time.monotonic_ns()

    async def stream(self, rids: list[str]) -> AsyncIterator[bytes]:
        for rid in rids:
            for _ in range(self._num_tokens):
                yield b"%d" % await self.rid_to_state[rid].chunks.get()


def application(manager: TokenizerManager, *, is_batch: bool = False) -> Starlette:
    async def generate(request: Request) -> StreamingResponse:
        body = await request.json()
        tokenized = [SimpleNamespace(rid=rid, input_ids=[1, 2, 3]) for rid in body["rids"]]
        if is_batch:
            await manager._send_batch_request(tokenized)
        else:
            for one in tokenized:
                await manager._send_one_request(one)
        tidying = BackgroundTask(manager.tidy_up)
        return StreamingResponse(manager.stream(body["rids"]), background=tidying)

    return Starlette(routes=[Route("/generate", generate, methods=["POST", "GET"])])


@pytest.fixture
def watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[type[TokenizerManager], Probe, Patches]]:
    """Return the manager with our hooks around its methods, as SGLang's registry places them."""
    patches = Patches("sglang")
    monkeypatch.setattr(sglang_hooks, "patches", patches)
    probe = make_probe(tmp_path, SystemClock(), name="front")  # type: ignore[arg-type]
    patches.probes.append(probe)
    edge = Edge(probe, patches)
    edge.watch(Starlette)
    hooks = FrontEndHooks()
    hooks._watch, hooks._probe = FrontEndWatch(edge), probe
    kind = type("TokenizerManager", (TokenizerManager,), {})
    for target, hook in (
        *hooks.by_target().items(),
        *hooks.by_feature()["several prompts in one request"].items(),
    ):
        name = target.rpartition(".")[2]
        setattr(kind, name, _wrapped(getattr(kind, name), hook))
    yield kind, probe, patches
    patches.restore()


def _wrapped(original: Callable[..., Any], hook: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: hook(original, *args, **kwargs)


async def call(app: Starlette, *rids: str, leave_after: int = 0) -> list[bytes]:
    """Make a request over ASGI, as a server would; return the bodies."""
    scope = {
        "type": "http", "method": "POST", "path": "/generate", "query_string": b"",
        "headers": [(b"x-request-id", b"mine")],
    }  # fmt: skip
    bodies: list[bytes] = []
    gone = asyncio.Event()
    requests = iter([{"type": "http.request", "body": json.dumps({"rids": rids}).encode()}])

    async def receive() -> dict[str, Any]:
        for message in requests:
            return message
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            bodies.append(message["body"])
            if len(bodies) == leave_after:
                gone.set()

    await app(scope, receive, send)
    return bodies


def emitted(path: Path) -> dict[int, int]:
    counts: dict[int, int] = {}
    for record in of(Emitted, path):
        columns = (np.frombuffer(c, dtype="<u4").tolist() for c in (record.requests, record.tokens))
        for index, count in zip(*columns, strict=True):
            counts[index] = counts.get(index, 0) + count
    return counts


def close(probe: Probe) -> Path:
    path = probe.path
    assert path is not None
    probe.close()
    return path


@pytest.mark.parametrize("is_batch", [False, True])
def test_each_prompt_of_a_request_is_joined_and_all_tokens_are_delivered(
    is_batch: bool, watched: tuple[type[TokenizerManager], Probe, Patches]
) -> None:
    kind, probe, _ = watched
    bodies = asyncio.run(call(application(kind(4), is_batch=is_batch), "a", "b"))
    assert len(bodies) == 9
    path = close(probe)
    events = of(RequestEvent, path)
    assert emitted(path) == {0: 4, 1: 4}
    for index, rid in enumerate("ab"):
        mine = [event for event in events if event.index == index]
        kinds = [EVENTS[event.kind] for event in mine]
        assert kinds == ["received", "tokenised", "first_byte", "last_byte"]
        assert (mine[0].request_id, mine[0].external_id) == (rid, "mine")
        assert mine[1].prompt_tokens == 3


def test_what_was_asked_is_by_the_words_of_the_api_and_not_by_the_schedulers(
    watched: tuple[type[TokenizerManager], Probe, Patches],
) -> None:
    kind, probe, _ = watched
    manager = kind(1)
    given = {"max_new_tokens": 9, "temperature": 0.0, "top_k": -1, "sampling_seed": 5, "n": 2}
    manager.rid_to_state["a"] = SimpleNamespace(
        obj=SimpleNamespace(sampling_params=given, stream=True)
    )
    manager.rid_to_state["b"] = SimpleNamespace(
        obj=SimpleNamespace(sampling_params={"max_new_tokens": None}, stream=None)
    )
    asyncio.run(call(application(manager), "a", "b", "c"))
    attributes = [event.attributes for event in of(RequestEvent, close(probe)) if event.request_id]
    path = {"endpoint": "/generate"}
    assert attributes == [
        path | {"stream": "true", "max_tokens": "9", "temperature": "0.0", "seed": "5", "n": "2"},
        path,
        path,
    ]


def test_a_client_that_leaves_ends_its_exchange_then_and_not_when_the_server_has_tidied_up(
    watched: tuple[type[TokenizerManager], Probe, Patches],
) -> None:
    kind, probe, _ = watched
    manager = kind(500)
    asyncio.run(call(application(manager), "a", leave_after=2))
    last = of(RequestEvent, close(probe))[-1]
    assert EVENTS[last.kind] == "last_byte"
    assert last.at_ns < manager.tidy_ns - LINGER_S * 1e9 / 2


@pytest.mark.thorough
@pytest.mark.parametrize("is_batch", [False, True])
def test_requests_of_a_second_engine_are_not_recorded_as_the_firsts(
    is_batch: bool,
    watched: tuple[type[TokenizerManager], Probe, Patches],
    caplog: pytest.LogCaptureFixture,
) -> None:
    kind, probe, _ = watched
    managers = [kind(2) for _ in range(3)]
    for name, manager in zip("abc", managers, strict=True):
        asyncio.run(call(application(manager, is_batch=is_batch), name))
    path = close(probe)
    assert [each.request_id for each in of(RequestEvent, path) if each.request_id] == ["a"]
    assert emitted(path) == {0: 2}
    assert caplog.text.count("unsupported: a second engine in one process") == 1


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["sending", "sending_batch", "received"])
def test_a_fault_in_any_hook_ends_the_probe_and_the_answer_is_the_same(
    method: str,
    watched: tuple[type[TokenizerManager], Probe, Patches],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    kind, probe, _ = watched

    def fail(*args: object) -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr(FrontEndWatch, method, fail)
    is_batch = method == "sending_batch"
    plain = asyncio.run(call(application(TokenizerManager(5), is_batch=is_batch), "a"))
    with caplog.at_level(logging.WARNING, logger="inferscope"):
        assert asyncio.run(call(application(kind(5), is_batch=is_batch), "a")) == plain
    (line,) = caplog.messages
    assert "injected" in line
    assert of(ProbeHealth, close(probe))[-1].state == FAILED


@pytest.mark.parametrize("has_crashed", [False, True])
def test_only_without_a_crash_of_the_scheduler_is_a_shutdown_record_written(
    tmp_path: Path, has_crashed: bool
) -> None:
    probe = make_probe(tmp_path, SystemClock(), name="front")  # type: ignore[arg-type]
    path = probe.path
    assert path is not None
    hooks = FrontEndHooks()
    hooks._probe = probe
    (handler,) = hooks.by_feature()[sglang_hooks.CRASHES].values()
    if has_crashed:
        killed: list[int] = []
        handler(killed.append, 3)
        assert killed == [3]
    probe.close()  # at the process's exit
    assert (of(ProbeHealth, path)[-1].state == CLOSED) is not has_crashed
