"""What is sent under which name and as what: other people's queries and alerts rest on it.

A name that is new goes into the list. One that is renamed, or changes its kind or unit, stays
beside its successor for two releases; only then is its line removed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from inferscope_otlp import OtlpExporter, names
from msgspec.structs import replace as changed
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from inferscope.fold.final_records import DeviceHealth, FinalRequest, KvTransfer
from inferscope.fold.join.request_counters import NAMES, Provenance, RequestCounters
from inferscope.fold.snapshots import DeviceCounters, Snapshot
from inferscope.records import RECOMPUTED
from inferscope.slo.verdicts import Judged
from tests.exporters.otlp.conftest import Finals
from tests.exporters.otlp.sink import ROOT, receiving

LIST = Path(__file__).parents[2] / "golden" / "otlp.txt"
_TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
_OPEN = (names.LEDGER, names.COUNTERS_METHOD, names.COUNTERS_ERROR, names.SLO)
"""Beginnings of names that end in a word of a closed list, or in the name of an objective."""
_NOTED = {
    **{"endpoint": "/v1/chat/completions", "response_id": "x", "stream": "true", "tenant": "t"},
    "conversation": "c-1",
    **{"priority": "1", "max_tokens": "9", "temperature": "0.5", "top_p": "0.5", "top_k": "4"},
    **{"frequency_penalty": "1", "presence_penalty": "1", "seed": "3", "n": "2"},
    **{names.SERVER_ADDRESS: "10.0.0.1", names.SERVER_PORT: "8000"},
}


def with_everything(request: FinalRequest) -> FinalRequest:
    """Return a request of which everything is known."""
    counted = dict.fromkeys(NAMES.values(), 1)
    middle_ns = (request.arrived_ns + request.delivered_ns) // 2
    causes = ("queue", "prefill_interference", "decode_interference")
    return changed(
        request,
        external_id="x",
        trace=_TRACE,
        attributes=_NOTED,
        adapter="sql",
        reasoning_tokens=1,
        num_preemptions=1,
        preempted_ns=((middle_ns, middle_ns + 1),),
        transfers=(KvTransfer(request.arrived_ns, request.arrived_ns + 1, 9, "peer"),),
        prefill_flops=1,
        decode_flops=1,
        is_alone=False,
        judged=Judged({"ttft": False}, "queue"),
        blame=tuple((cause, "another", 1) for cause in causes),
        counters=RequestCounters(
            counted, counted, dict.fromkeys(counted, Provenance("measured", "test", 0.1))
        ),
    )


def on_a_gpu(look: Snapshot) -> Snapshot:
    """Return a look at the engine as if samplers emitted_names everything of its device."""
    (view,) = look.engines
    device = replace(view.devices[0], device="GPU-1b2c", health=DeviceHealth(xids={"xid_79": 2}))
    emitted_names = {
        "busy_share": 0.5,
        "memory_used_bytes": 6e9,
        "memory_total_bytes": 8e9,
        "power_w": 9.5,
    }
    view = replace(
        view,
        device="H200",
        devices=(device,),
        counters=replace(
            view.counters, devices={"GPU-1b2c": DeviceCounters("H200", {}, emitted_names)}
        ),
        is_alive=True,
        is_synthetic=True,
    )
    return replace(look, engines=(view,))


def emitted_names(finals: Finals) -> list[str]:
    """Return a line for each name that arrives, of all the places where it does."""
    whole = max(finals.requests, key=lambda request: len(request.ledger_ns))
    bad = changed(whole, request_id="bad", finish="engine_lost", delivered_ns=10**15)
    late = changed(whole, request_id="late", joined_late=True)
    unobserved = changed(whole, request_id="unobserved", ledger_missing="core not observed")
    with receiving() as sink:
        settings = {"ttft_ms": 1, "tbt_ms": 1, "metrics_interval_s": 3600}
        exporter = OtlpExporter({"endpoint": sink.url, **settings})
        exporter.open()
        assert finals.view is not None
        exporter.on_snapshot(on_a_gpu(finals.view))
        for step in finals.steps:
            exporter.on_step(changed(step, flags=step.flags | RECOMPUTED))
        for request in (whole, bad, late, unobserved):
            exporter.on_request(with_everything(request))
        exporter.on_snapshot(on_a_gpu(finals.view))
        exporter.close()
        assert exporter.num_sent == 4
        lines = set[str]()
        for group in (group for post in sink.posts for group in post.resource_spans):
            lines |= set(_lines("resource", group.resource.attributes))
            for span in group.scope_spans[0].spans:
                lines |= set(_of_span(span))
        for metrics in (group for post in sink.metrics for group in post.resource_metrics):
            for metric in metrics.scope_metrics[0].metrics:
                kind = str(metric.WhichOneof("data"))
                where = f"metric {metric.name} {kind} {metric.unit}"
                lines.add(where)
                for point in getattr(metric, kind).data_points:
                    lines |= set(_lines(f"metric {metric.name}", point.attributes))
    return sorted(lines)


def _of_span(span: Span) -> Iterator[str]:
    where = "root" if span.kind == ROOT else f"span {span.name}"
    yield where
    yield from _lines(where, span.attributes)
    for event in span.events:
        yield from _lines(f"event {event.name}", event.attributes)


def _lines(where: str, pairs: Iterable[KeyValue]) -> Iterator[str]:
    for pair in pairs:
        name = pair.key
        for beginning in _OPEN:
            if name.startswith(beginning) and name != names.SLO_CAUSE:
                name = f"{beginning}*"
        yield f"{where} {name} {_kind(pair.value)}"


def _kind(value: Any) -> str:
    kind = str(value.WhichOneof("value")).removesuffix("_value")
    if kind == "array":
        (of,) = {_kind(each) for each in value.array_value.values}
        return f"{kind}[{of}]"
    return kind


def test_names_kinds_and_units_are_those_of_the_list(finals: Finals) -> None:
    assert emitted_names(finals) == LIST.read_text(encoding="utf-8").splitlines()


def test_the_list_has_every_name_there_is() -> None:
    listed = {
        word for line in LIST.read_text(encoding="utf-8").splitlines() for word in line.split()
    }
    ours = {value for name, value in vars(names).items() if name.isupper() and type(value) is str}
    ours -= {names.SCOPE, names.DEFAULT_OPERATION}
    assert {f"{name}*" if name in _OPEN else name for name in ours} <= listed
