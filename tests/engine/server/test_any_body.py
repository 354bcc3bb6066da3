"""Tests that any request body gets a response or an error, and the next one is served.

The API server's application and the engine's core, joined by the sockets that join them in a
server, without the HTTP between a client and the application.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from starlette.types import ASGIApp

from inferscope.engine import EngineOptions, load_engine, load_tokenizer
from inferscope.engine.load import describe
from inferscope.engine.server import protocol
from inferscope.engine.server.app import Service, build_app
from inferscope.engine.server.chat import Template, load_template
from inferscope.engine.server.core import Core
from inferscope.engine.server.delivery_log import DeliveryLog
from inferscope.engine.server.exchange import FrontEndContext
from inferscope.engine.server.link import Link
from inferscope.engine.server.parent import STOP
from inferscope.engine.server.protocol import (
    _NEUTRAL,
    MOST_CONTAINERS,
    MOST_MEMBERS,
    ChatRequest,
    CompletionRequest,
    parse,
)
from inferscope.probe import Probe

MODEL = "random:tiny"
LONGEST = 40
GOOD = b'{"prompt": [1, 2], "max_tokens": 2, "ignore_eos": true}'
_EXAMPLES = 30
"""Settings of 10 ms per example; 2,500 examples per test found no further failure."""
COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"


class FastClient:
    """A connection whose client reads everything at once and never disconnects."""

    is_stuck = False
    parting = "client_cancel"

    async def drained(self) -> int:
        """Return 0: nothing is left to send."""
        return 0

    def abort(self) -> None:
        """Do nothing."""


class Api:
    """An API server's application, its event loop, and a core in a thread."""

    def __init__(self, folder: Path) -> None:
        options = EngineOptions(dtype="float32", max_model_tokens=LONGEST, max_running=4)
        self.engine = load_engine(MODEL, options)
        core = Core(self.engine, describe(self.engine, name=MODEL), folder)
        self._commands: SimpleQueue[str] = SimpleQueue()
        self._thread = threading.Thread(target=core.serve, args=(self._commands,))
        self._thread.start()
        self._loop = asyncio.new_event_loop()
        self._link = Link(folder, "api-0")
        self._loop.run_until_complete(self._open())

    async def _open(self) -> None:
        welcome = await self._link.connect()
        probe = Probe.disabled()
        self.tokenizer = load_tokenizer(MODEL)
        front = FrontEndContext(
            self.tokenizer, self._link, probe, DeliveryLog(probe), set(),
            max_model_tokens=welcome.max_model_tokens, vocab=welcome.vocab,
        )  # fmt: skip
        self.service = Service(front, load_template(MODEL), "tiny", 0)
        self._app = build_app(self.service)
        self._receiving = asyncio.create_task(self._link.receive())

    def post(self, path: str, body: bytes, method: str = "POST") -> tuple[int, bytes]:
        """Return the status and the complete body of the response."""
        return self._loop.run_until_complete(asyncio.wait_for(self._ask(method, path, body), 30))

    def post_all(
        self, path: str, body: bytes, *, num: int, template: Template
    ) -> list[tuple[int, bytes]]:
        """Return the responses to one body sent `num` times at once, under another template."""
        app = build_app(dataclasses.replace(self.service, template=template))

        async def ask() -> list[tuple[int, bytes]]:
            asked = (self._ask("POST", path, body, app) for _ in range(num))
            return await asyncio.wait_for(asyncio.gather(*asked), 30)

        return self._loop.run_until_complete(ask())

    async def _ask(
        self, method: str, path: str, body: bytes, app: ASGIApp | None = None
    ) -> tuple[int, bytes]:
        coming: list[dict[str, Any]] = [{"type": "http.request", "body": body}]
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            if not coming:
                await asyncio.Event().wait()
            return coming.pop()

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {
            "type": "http", "method": method, "path": path, "headers": [], "query_string": b"",
            "http_version": "1.1", "state": {"connection": FastClient()},
        }  # fmt: skip
        await (app or self._app)(scope, receive, send)
        return sent[0]["status"], b"".join(message.get("body", b"") for message in sent)

    def close(self) -> None:
        """Stop the application and the core."""
        self._receiving.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._link.close()
        self._loop.close()
        self._commands.put(STOP)
        self._thread.join(30)
        assert not self._thread.is_alive()


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    made = Api(tmp_path_factory.mktemp("any"))
    yield made
    made.close()


NUMBERS = st.one_of(
    st.integers(-3, 600),
    st.integers(),
    st.floats(),
    st.floats(0.0, 2.0),
    st.sampled_from([2**31, 2**63 - 1, 2**63, -(2**63) - 1, 10**400, 1e-39, 5.0, 1e999, -0.0]),
)
TEXTS = st.text(st.characters(categories=None), max_size=12) | st.sampled_from(["", "\ud800", "x"])
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
PARTS = st.fixed_dictionaries(
    {"type": st.just("text") | VALUES, "text": TEXTS | VALUES}, optional={"part": VALUES}
)
ARGUMENTS = VALUES | VALUES.map(json.dumps) | st.dictionaries(TEXTS, VALUES).map(json.dumps)
CALLS = st.lists(
    st.fixed_dictionaries(
        {"function": st.fixed_dictionaries({"name": TEXTS, "arguments": ARGUMENTS})},
        optional={"id": TEXTS | VALUES},
    ),
    max_size=3,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": TEXTS | VALUES, "content": TEXTS | st.lists(PARTS | VALUES, max_size=3)},
        optional={"tool_calls": CALLS | VALUES, "part": VALUES, "made_up": VALUES},
    ),
    max_size=3,
)
USUAL: dict[str, st.SearchStrategy[Any]] = {
    "max_tokens": st.integers(1, 9),
    "min_tokens": st.integers(0, 3),
    "temperature": st.floats(0.0, 3.0),
    "top_p": st.floats(0.01, 1.0),
    "top_k": st.integers(-1, 600),
    "seed": st.integers(-(2**63), 2**63 - 1),
    "n": st.integers(1, 3),
    "stop": st.lists(TEXTS, max_size=3),
    "stop_token_ids": st.lists(st.integers(-2, 600), max_size=600),
    "stream": st.booleans(),
    "ignore_eos": st.booleans(),
    "logprobs": st.booleans() | st.integers(0, 20),
    "top_logprobs": st.integers(0, 20),
}
"""Mostly valid fields, so that unusual values reach the engine."""
FIELDS = sorted(
    {*CompletionRequest.__struct_fields__, *ChatRequest.__struct_fields__, *_NEUTRAL, "made_up"}
    - {"prompt", "messages"}
)


def bodies(inputs: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    usual = st.fixed_dictionaries({}, optional=USUAL)
    odd = st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=2)
    return st.tuples(inputs, usual, odd).map(lambda parts: parts[0] | parts[1] | parts[2])


PROMPTS = st.one_of(
    st.lists(st.integers(0, 511), min_size=1, max_size=LONGEST + 2),
    TEXTS,
    VALUES,
    st.lists(st.lists(st.integers(-1, 512), max_size=3), max_size=3),
)
COMPLETIONS = bodies(st.fixed_dictionaries({"prompt": PROMPTS}))
CHATS = bodies(st.fixed_dictionaries({"messages": MESSAGES | VALUES}))


def check(api: Api, path: str, body: bytes) -> None:
    failed_steps = api.engine.stats().failed_steps
    status, content = api.post(path, body)
    assert status == 200 or 400 <= status < 500, (status, content)
    if content.startswith(b"data: "):
        assert content.endswith(b"data: [DONE]\n\n"), content
    else:
        answer = json.loads(content)
        if status != 200:
            assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert api.engine.failure is None
    assert api.engine.stats().failed_steps == failed_steps
    assert api.post(COMPLETION, GOOD)[0] == 200


@pytest.mark.thorough
@settings(max_examples=_EXAMPLES)
@given(body=COMPLETIONS)
@example({"prompt": [1], "min_tokens": 1, "max_tokens": 4, "stop_token_ids": [99_999_999]})
@example({"prompt": [1], "min_tokens": 3, "stop_token_ids": list(range(512)), "temperature": 1.0})
@example({"prompt": [1], "temperature": 1e308, "top_p": 1e-300, "top_k": 2**63 - 1})
@example({"prompt": [1] * (LONGEST - 1), "n": 256, "max_tokens": 2**63 - 1})
def test_any_completion_is_answered_or_refused(api: Api, body: dict[str, Any]) -> None:
    check(api, COMPLETION, json.dumps(body).encode())


@settings(max_examples=_EXAMPLES)
@given(body=CHATS)
@example({"messages": []})
def test_any_chat_is_answered_or_refused(api: Api, body: dict[str, Any]) -> None:
    check(api, CHAT, json.dumps(body).encode())


@settings(max_examples=_EXAMPLES)
@given(
    body=COMPLETIONS | CHATS,
    path=st.sampled_from([COMPLETION, CHAT, "/tokenize", "/detokenize"]),
    cut=st.integers(0, 200),
    put=st.binary(max_size=3),
)
@example({"prompt": "x", "user": "u"}, COMPLETION, 16, b"\xff")
def test_any_bytes_are_answered_or_refused(
    api: Api, body: dict[str, Any], path: str, cut: int, put: bytes
) -> None:
    raw = json.dumps(body, ensure_ascii=False).encode("utf-8", "surrogatepass")
    check(api, path, raw[:cut] + put + raw[cut:])
    check(api, path, raw[:cut] + put)


@pytest.mark.parametrize("opening", [b"[", b'{"a":'])
@pytest.mark.parametrize("name", [b"made_up", b"prompt", b"stop", b"messages", b"logit_bias"])
def test_deep_nesting_is_refused(api: Api, name: bytes, opening: bytes) -> None:
    check(api, COMPLETION, b'{"prompt": "x", "' + name + b'": ' + opening * 50_000)
    check(api, CHAT, b'{"messages": [], "' + name + b'": ' + opening * 50_000)


@pytest.mark.parametrize("opening", [b"[1],", b"{},", b'{"a": {}},'])
@pytest.mark.parametrize("path", [COMPLETION, CHAT, "/tokenize", "/detokenize"])
def test_body_with_too_many_lists_or_objects_is_rejected_before_parsing(
    api: Api, path: str, opening: bytes
) -> None:
    num = MOST_CONTAINERS // (opening.count(b"[") + opening.count(b"{"))
    body = b'{"prompt": [' + opening * num + b"1]}"
    status, answer = api.post(path, body)
    assert (status, b"body_too_large" in answer) == (413, True)


@pytest.mark.parametrize("path", [COMPLETION, CHAT, "/tokenize", "/detokenize"])
def test_body_with_too_many_members_is_rejected_before_parsing(api: Api, path: str) -> None:
    body = b'{"prompt": "x"' + b',"":1' * MOST_MEMBERS + b"}"
    status, answer = api.post(path, body)
    assert (status, b"body_too_large" in answer) == (413, True)


@pytest.mark.parametrize(
    "text", [":" * (MOST_MEMBERS + 1), "[{" * MOST_CONTAINERS, '\\"[\\' * (MOST_CONTAINERS + 1)]
)
def test_brackets_in_a_text_do_not_count_as_lists(text: str) -> None:
    body = json.dumps({"prompt": [text, "]"], "stop": ["\\"]}).encode()
    assert parse(body, CompletionRequest).prompt == [text, "]"]


@given(value=VALUES, text=st.text(st.sampled_from('[{:\\"a')))
def test_lists_and_objects_are_counted_outside_of_texts(value: Any, text: str) -> None:
    def amounts(value: Any) -> tuple[int, int]:
        if not isinstance(value, (list, dict)):
            return 0, 0
        inner = list(map(amounts, value.values() if isinstance(value, dict) else value))
        num_members = len(value) if isinstance(value, dict) else 0
        return 1 + sum(num for num, _ in inner), num_members + sum(num for _, num in inner)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(protocol, "MOST_CONTAINERS", 0)
        body = [text, value, {text: text}]
        assert protocol._amounts(json.dumps(body).encode()) == amounts(body)


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
def test_large_chats_are_rendered_in_threads_two_at_a_time(api: Api, path: str) -> None:
    loop_thread, inside, most_inside = threading.get_ident(), [0], [0]

    def slow(*args: Any, **given: Any) -> str:
        assert threading.get_ident() != loop_thread
        inside[0] += 1
        most_inside[0] = max(most_inside[0], inside[0])
        time.sleep(0.02)
        inside[0] -= 1
        return "x" * 30_000

    body = json.dumps({"messages": [{"role": "user", "content": "a" * 30_000}]}).encode()
    answers = api.post_all(path, body, num=6, template=slow)
    assert {status for status, _ in answers} == {400}  # the prompt is too long
    assert most_inside == [2]


def test_detokenization_failure_ends_only_its_own_request(
    api: Api, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(ids: Sequence[int]) -> str:
        raise ValueError("no such token")

    with monkeypatch.context() as patched:
        patched.setattr(api.tokenizer, "decode", broken)
        status, content = api.post(COMPLETION, b'{"prompt": [1], "max_tokens": 30}')
    assert status == 500
    assert json.loads(content)["error"]["code"] == "error"
    (record,) = caplog.records
    assert record.getMessage().endswith("ends with an error: ValueError: no such token")
    assert api.post(COMPLETION, GOOD)[0] == 200
    assert api.engine.stats().running == 0


def test_failing_step_is_a_500_and_the_next_request_is_served(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(batch: object) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(api.engine._runner, "execute", broken)
        assert api.post(COMPLETION, GOOD)[0] == 500
        status, content = api.post(COMPLETION, GOOD[:-1] + b', "stream": true}')
        assert (status, json.loads(content)["error"]["type"]) == (500, "server_error")
    assert api.post(COMPLETION, GOOD)[0] == 200
