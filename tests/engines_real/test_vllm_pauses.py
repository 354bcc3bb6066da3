"""A real vLLM server that is paused with a request under way and another in its queue."""

from __future__ import annotations

import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.engines_real.clients import Ask, ask_all
from tests.engines_real.folded import is_paused
from tests.engines_real.vllm_laws import of_kind
from tests.engines_real.vllm_server import Server, export, needs_vllm, serving

pytestmark = [pytest.mark.slow, needs_vllm, pytest.mark.timeout(600)]

PAUSED_S = 3.0
WAYS = {
    "keep": ("/pause?mode=keep", "/resume"),
    "asleep": ("/sleep?level=0&mode=keep", "/wake_up?tags=scheduling"),
}


@pytest.mark.conformance("vLLM", "a pause is what requests wait for")
def test_a_pause_is_what_requests_wait_for(tmp_path: Path) -> None:
    with serving(tmp_path, VLLM_SERVER_DEV_MODE="1") as server:
        most_ns: dict[str, int] = {}
        for way, (pause, go_on) in WAYS.items():
            running, late = _stream(f"{way}-running", 600), _stream(f"{way}-late", 4)
            first = _asking(server, running)
            _eventually(lambda running=running: running.text)
            assert not is_paused(server.home)
            began_ns = time.monotonic_ns()
            _post(server, pause)
            second = _asking(server, late)
            _eventually(lambda: is_paused(server.home))
            time.sleep(max(0.0, PAUSED_S - (time.monotonic_ns() - began_ns) / 1e9))
            _post(server, go_on)
            most_ns |= dict.fromkeys((running.name, late.name), time.monotonic_ns() - began_ns)
            for asking in (first, second):
                asking.join(60)
            assert not is_paused(server.home)
        lines = {line["external_id"]: line for line in of_kind(export(server), "request")}
    for name, pause_ns in most_ns.items():
        line = lines[name]
        assert line["finish"] == "length"
        ledger = line["ledger_ns"]
        assert sum(ledger.values()) == line["delivered_ns"] - line["arrived_ns"]
        # The second one was asked when the pause had begun.
        least_ns = 0 if "late" in name else PAUSED_S * 9e8
        assert least_ns < ledger["paused"] < pause_ns


def _stream(name: str, num_tokens: int) -> Ask:
    body = {"model": "tiny", "prompt": [5] * 50, "max_tokens": num_tokens, "ignore_eos": True}
    return Ask(name, {**body, "stream": True, "stream_options": {"include_usage": True}})


def _asking(server: Server, ask: Ask) -> threading.Thread:
    asking = threading.Thread(target=ask_all, args=(server.url, [ask]), kwargs={"at_once": 1})
    asking.start()
    return asking


def _post(server: Server, path: str) -> None:
    asked = urllib.request.Request(server.url + path, method="POST")
    with urllib.request.urlopen(asked, timeout=30) as answer:
        assert answer.status == 200


def _eventually(is_so: Any) -> None:
    until_s = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < until_s
        time.sleep(0.05)
