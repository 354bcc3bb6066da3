"""Tests of the memory and time that a client can cost the server."""

from __future__ import annotations

import gc
import os
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest

from inferscope.engine import BadRequest, Engine
from tests.engine.server.running import Server, in_background


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) << 12


def processor_s(pid: int) -> float:
    """Return the CPU seconds of a process, which exclude other load."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def waits_beside(server: Server, path: str, body: object) -> tuple[int, list[float]]:
    """Post a body; return its status and the latencies of concurrent requests in seconds."""
    thread, results = in_background(server.post, path, body)
    waits_s = []
    while thread.is_alive():
        began_s = time.monotonic()
        server.ask("GET", "/version")
        waits_s.append(time.monotonic() - began_s)
    thread.join()
    return results[0][0], waits_s


def test_a_prompt_that_cannot_be_served_never_reaches_the_engine(server: Server) -> None:
    core, _ = server.children()
    before = resident_bytes(core)
    body = b'{"n": 40, "prompt": [' + b"1," * 1_000_000 + b"1]}"
    status, answer, _ = server.post("/v1/completions", body)
    assert status == 400
    assert answer["error"]["param"] == "prompt"
    assert "1000001 tokens" in answer["error"]["message"]
    server.wait_until_idle()
    assert resident_bytes(core) - before < 50 << 20


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised(server: Server) -> None:
    _, front_end = server.children()
    before_s = processor_s(front_end)
    status, answer, _ = server.post("/v1/completions", {"prompt": "a b c " * 1_000_000})
    assert status == 400
    assert "6000000 characters" in answer["error"]["message"]
    assert processor_s(front_end) - before_s < 1  # tokenizing takes several


class Tokens(list[int]):
    """Token list that supports weak references."""


def test_rejected_prompt_is_freed(tiny_engine: Callable[..., Engine]) -> None:
    engine = tiny_engine()
    prompt = Tokens([1] * 100_000)
    kept = weakref.ref(prompt)
    gc.disable()
    try:
        with pytest.raises(BadRequest):
            engine.submit(prompt)
        del prompt
        assert kept() is None
    finally:
        gc.enable()
    assert engine.has_work  # the rejection is not yet recorded


@pytest.mark.thorough
def test_tokenizing_many_prompts_delays_no_other_client(server: Server) -> None:
    texts = ["x = 1; y = x + 2\n" * 1100] * 24
    status, waits_s = waits_beside(server, "/v1/completions", {"prompt": texts})
    assert status == 400  # each prompt is too long
    assert len(waits_s) > 5
    assert max(waits_s) < sum(waits_s) / 2


def test_messages_and_ids_are_bounded(server: Server) -> None:
    alternating = [{"role": role} for role in ("user", "system")] * 5001
    for path in ("/v1/chat/completions", "/tokenize"):
        status, answer, _ = server.post(path, {"messages": alternating})
        assert (status, answer["error"]["param"]) == (400, "messages")
    status, answer, _ = server.post("/detokenize", {"tokens": [1] * 250_001})
    assert (status, answer["error"]["param"]) == (400, "tokens")
    status, answer, _ = server.post("/tokenize", {"prompt": "a b c " * 1_000_000})
    assert "6000000 characters" in answer["error"]["message"]


def test_a_chat_of_very_many_messages_delays_no_other_request(server: Server) -> None:
    parts = [{"type": "text", "text": name, "part": name} for name in "ab"]
    body = {"messages": [{"role": "user", "content": parts}] * 10_000}
    status, waits_s = waits_beside(server, "/v1/chat/completions", body)
    assert status == 400  # the prompt is too long
    assert max(waits_s) < sum(waits_s) / 2
