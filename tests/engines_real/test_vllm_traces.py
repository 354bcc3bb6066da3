"""On a real vLLM server that traces: its spans and ours are one trace, the client's."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from inferscope_otlp import OtlpExporter

from inferscope.readers.source import catch_up, open_source
from tests.engines_real.vllm_server import Server, export, needs_vllm, serving, stop
from tests.exporters.otlp.sink import Received, receiving

pytestmark = [pytest.mark.slow, needs_vllm, pytest.mark.timeout(300)]

CLIENT = {
    "traced": ("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"),
    "another": ("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"),
}
"""Trace and parent span by the client's request ID."""
BODIES: dict[str, dict[str, Any]] = {
    "traced": {
        "max_tokens": 4,
        "temperature": 0.5,
        "top_p": 0.75,
        "top_k": 20,
        "frequency_penalty": 0.125,
        "presence_penalty": 0.25,
        "seed": 7,
        "stream": True,
    },
    "another": {"temperature": 0, "top_p": 1},
}
ASKED = {
    "traced": BODIES["traced"],
    "another": {"max_tokens": 16, "temperature": 0, "stream": False},
}
"""Expected attributes of the spans: without a limit vLLM's API has one of 16 tokens."""


@pytest.mark.conformance("vLLM", "what was asked of the sampling (`gen_ai.request.*`)")
@pytest.mark.conformance("vLLM", "its own traces and ours are the client's (`traceparent`)")
def test_the_servers_spans_and_ours_are_in_the_clients_trace(tmp_path: Path) -> None:
    with receiving() as sink:
        with serving(
            tmp_path,
            *("--otlp-traces-endpoint", sink.url),
            OTEL_EXPORTER_OTLP_TRACES_PROTOCOL="http/protobuf",
            OTEL_BSP_SCHEDULE_DELAY="200",
        ) as server:
            for name in CLIENT:
                _ask(server, name)
            assert stop(server) == 0
        theirs = {_parent(each): each for each in sink.spans()}
        _send_ours(server, sink.url)
        ours = {_parent(root): root for root in sink.roots() if root not in theirs.values()}

    assert set(CLIENT.values()) <= theirs.keys()
    assert ours.keys() == set(CLIENT.values())
    ids = {each["external_id"]: each["request"] for each in export(server) if "external_id" in each}
    for name, place in CLIENT.items():
        assert ours[place].attributes["inferscope.request.id"] == ids[name]
        assert ours[place].span.span_id != theirs[place].span.span_id
        _, _, url = server.url.partition("//")
        at = ours[place].attributes["server.address"], ours[place].attributes["server.port"]
        assert at == (url.partition(":")[0], int(url.partition(":")[2]))
        attributes = _asked(ours[place])
        assert attributes == ASKED[name]
        by_vllm = _asked(theirs[place])
        both = by_vllm.keys() & attributes.keys()
        assert "max_tokens" in both
        assert {word: by_vllm[word] for word in both} == {word: attributes[word] for word in both}


def _ask(server: Server, name: str) -> None:
    trace, span = CLIENT[name]
    request = urllib.request.Request(
        f"{server.url}/v1/completions",
        json.dumps({"model": "tiny", "prompt": "hello", **BODIES[name]}).encode(),
        {
            "Content-Type": "application/json",
            "X-Request-Id": name,
            "traceparent": f"00-{trace}-{span}-01",
        },
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.status == 200
        answer.read()


def _send_ours(server: Server, endpoint: str) -> None:
    exporter = OtlpExporter({"endpoint": endpoint})
    exporter.open()
    source = open_source(server.home, sinks=(exporter,))
    catch_up(source)
    exporter.on_snapshot(source.snapshot(10**10))
    source.close()
    exporter.close()
    assert exporter.num_sent == len(CLIENT)


def _asked(each: Received) -> dict[str, Any]:
    start = "gen_ai.request."
    values = {k.removeprefix(start): v for k, v in each.attributes.items() if k.startswith(start)}
    return {word: value for word, value in values.items() if word not in ("id", "model")}


def _parent(each: Received) -> tuple[str, str]:
    return each.span.trace_id.hex(), each.span.parent_span_id.hex()
