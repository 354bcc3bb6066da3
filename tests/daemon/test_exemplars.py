"""From a page of metrics, through a real Prometheus, to the trace that an OTLP receiver has."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests import debian
from tests.daemon.prometheus import prometheus
from tests.daemon.running import collecting, eventually
from tests.engine.server.running import Server, Stream, serving
from tests.exporters.otlp.sink import receiving

pytestmark = pytest.mark.thorough

_OTLP = '  otlp: {endpoint: "%s", keep_share: 0}\npins: off\n'
_RECORDED = "4bf92f3577b34da6a3ce929d0e0e4736"
_NOT_RECORDED = "0af7651916cd43dd8448eb211c80319c"
_SHOWN = (
    *("time_to_first_token", "time_between_tokens", "time_per_output_token"),
    *("request_duration", "request_queue", "request_prefill", "request_decode", "request_stall"),
)


def stream(server: Server, trace: str, flags: str) -> None:
    """Stream an answer to a client that records its trace, or does not."""
    body = {"prompt": "def f", "max_tokens": 9, "ignore_eos": True}
    headers = {"traceparent": f"00-{trace}-00f067aa0ba902b7-{flags}"}
    with Stream(server.port, "/v1/completions", body, headers=headers) as answer:
        assert list(answer.events())[-1] == "[DONE]"


def test_prometheus_keeps_exemplars_of_traces_that_were_sent(tmp_path: Path) -> None:
    debian.program("prometheus")
    with (
        serving(tmp_path, "builtin") as server,
        receiving() as sink,
        collecting(server.rings, tmp_path, _OTLP % sink.url) as collector,
        prometheus(tmp_path, [collector.url]) as asked,
    ):
        server.wait()
        stream(server, _RECORDED, "01")
        eventually(lambda: len(asked.exemplars("inferscope_request_duration_seconds_bucket")) == 1)
        stream(server, _NOT_RECORDED, "00")
        server.post("/v1/completions", {"prompt": "def g", "max_tokens": 3})
        eventually(lambda: asked.one("sum(inferscope_requests_total)") == 3)
        expected = {f"inferscope_{name}_seconds_bucket" for name in _SHOWN}
        buckets = '{__name__=~"inferscope_.+_bucket"}'
        eventually(lambda: {each.name for each in asked.exemplars(buckets)} == expected)
        # Scrapes go on, and must tell the same of what is the same.
        num_scrapes = asked.one("count_over_time(up[1h])") or 0
        eventually(lambda: (asked.one("count_over_time(up[1h])") or 0) >= num_scrapes + 2)
        found = asked.exemplars(buckets)
        rejected = asked.own("prometheus_tsdb_exemplar_out_of_order_exemplars_total")
        eventually(lambda: bool(sink.roots()))
    assert {root.span.trace_id.hex() for root in sink.roots()} == {_RECORDED}
    assert {each.labels["trace_id"] for each in found} == {_RECORDED}
    assert Counter(each.name for each in found) == dict.fromkeys(expected, 1), found
    assert rejected == 0
    (root,) = sink.roots()
    for each in found:
        assert each.value <= float(each.series["le"])
        assert abs(each.at_s - root.span.end_time_unix_nano / 1e9) < 0.05
    values = {each.name: each.value for each in found}
    took_s = (root.span.end_time_unix_nano - root.span.start_time_unix_nano) / 1e9
    assert abs(values["inferscope_request_duration_seconds_bucket"] - took_s) < 1e-6
