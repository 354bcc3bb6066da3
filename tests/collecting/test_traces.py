"""A client's traceparent, through a server's processes and a collector, to an OTLP receiver."""

from __future__ import annotations

from pathlib import Path

from tests.collecting.running import collecting, eventually
from tests.engine.server.running import Server
from tests.exporters.otlp.sink import receiving

_OTLP = '  otlp: {endpoint: "%s"}\npins: off\n'
_TRACE, _PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def test_a_requests_spans_join_the_trace_of_its_client(tmp_path: Path) -> None:
    server = Server(tmp_path, "builtin")
    with receiving() as sink, collecting(server.rings, tmp_path, _OTLP % sink.url) as collector:
        server.wait()
        status, answer, _ = server.post(
            "/v1/completions",
            {
                "prompt": "def f",
                "max_tokens": 9,
                "ignore_eos": True,
                "top_k": 5,
                "stop": "nobody says",
            },
            {"traceparent": f"00-{_TRACE}-{_PARENT}-01", "X-Request-Id": "of-the-client"},
        )
        assert status == 200
        eventually(lambda: bool(sink.spans()))
        eventually(lambda: collector.scrape().total("inferscope_requests_total") == 1)
        # It was no stream: all its tokens came with the answer.
        scrape = collector.scrape()
        assert scrape.one("inferscope_request_duration_seconds_count") == 1
        for name in ("time_to_first_token", "time_between_tokens", "time_per_output_token"):
            assert scrape.one(f"inferscope_{name}_seconds_count") == 0
        server.stop()
    spans = {received.name: received for received in sink.spans()}
    root = spans["text_completion builtin"]
    assert root.span.trace_id.hex() == _TRACE
    assert root.span.parent_span_id.hex() == _PARENT
    assert root.attributes["gen_ai.usage.output_tokens"] == answer["usage"]["completion_tokens"]
    assert root.attributes["gen_ai.usage.input_tokens"] == answer["usage"]["prompt_tokens"]
    assert root.attributes["gen_ai.request.stream"] is False
    assert "of-the-client" in root.attributes.values()
    asked = {k: v for k, v in root.attributes.items() if k.startswith("gen_ai.request.")}
    assert asked == {
        "gen_ai.request.id": asked["gen_ai.request.id"],
        "gen_ai.request.model": "builtin",
        "gen_ai.request.stream": False,
        "gen_ai.request.max_tokens": 9,
        "gen_ai.request.top_k": 5.0,
    }
    assert root.attributes["server.address"] == "127.0.0.1"
    assert root.attributes["server.port"] == server.port
    for name in ("inferscope.queue", "inferscope.prefill", "inferscope.decode"):
        child = spans[name].span
        assert child.trace_id.hex() == _TRACE
        assert child.parent_span_id == root.span.span_id
