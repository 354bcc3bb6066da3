"""What a trace costs: on the fold's thread, on the courier's, and by two ways of encoding.

Folds `samples/demo.isr` once and tells the exporter's parts what became final, over and over. Two
ways to the same bytes are compared: the SDK's span objects and its encoder (what is shipped), and
protobuf messages filled by hand. Prints microseconds of processor time.
"""

from __future__ import annotations

import argparse
import gzip
import json
import platform
import time
from array import array
from collections.abc import Callable
from pathlib import Path

from inferscope_otlp.attributes import Attributes, Value
from inferscope_otlp.exporter import OtlpExporter
from inferscope_otlp.facts import FactTable
from inferscope_otlp.finished import Engine
from inferscope_otlp.sdk import readable_spans, resource
from inferscope_otlp.settings import Settings
from inferscope_otlp.spans import Span, Trace, trace_of
from msgspec.structs import replace
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span as WireSpan

from inferscope.collector.finals import FinalRequest, FinalStep
from inferscope.collector.source import catch_up, open_source

DEMO = Path(__file__).parent.parent / "samples" / "demo.isr"
BATCH = 64
ENGINE = Engine("benchmark", "engine", "1", "model", "device")


class Told:
    """A sink that keeps what it is told."""

    def __init__(self) -> None:
        """Start empty."""
        self.steps: list[FinalStep] = []
        self.requests: list[FinalRequest] = []

    def step(self, step: FinalStep) -> None:
        """Keep a step."""
        self.steps.append(step)

    def request(self, request: FinalRequest) -> None:
        """Keep a request."""
        self.requests.append(request)


def by_hand(traces: list[Trace]) -> bytes:
    """Encode traces without the SDK."""
    export = ExportTraceServiceRequest()
    group = export.resource_spans.add()
    scope = group.scope_spans.add()
    for trace in traces:
        trace_id = trace.trace_id.to_bytes(16, "big")
        root_id = trace.root.span_id.to_bytes(8, "big")
        scope.spans.append(wire(trace.root, trace_id, b"", WireSpan.SPAN_KIND_SERVER))
        for child in trace.children:
            scope.spans.append(wire(child, trace_id, root_id, WireSpan.SPAN_KIND_INTERNAL))
    return bytes(export.SerializeToString())


def wire(span: Span, trace_id: bytes, parent_id: bytes, kind: WireSpan.SpanKind) -> WireSpan:
    """Return one span as it travels."""
    return WireSpan(
        trace_id=trace_id,
        span_id=span.span_id.to_bytes(8, "big"),
        parent_span_id=parent_id,
        name=span.name,
        kind=kind,
        start_time_unix_nano=span.start_ns,
        end_time_unix_nano=span.end_ns,
        attributes=pairs(span.attributes),
        events=[
            WireSpan.Event(
                name=event.name, time_unix_nano=event.at_ns, attributes=pairs(event.attributes)
            )
            for event in span.events
        ],
    )


def pairs(attributes: Attributes) -> list[KeyValue]:
    """Return attributes as they travel."""
    return [KeyValue(key=name, value=any_value(value)) for name, value in attributes.items()]


def any_value(value: Value) -> AnyValue:
    """Return a value as it travels."""
    if isinstance(value, bool):
        return AnyValue(bool_value=value)
    if isinstance(value, str):
        return AnyValue(string_value=value)
    if isinstance(value, int):
        return AnyValue(int_value=value)
    if isinstance(value, float):
        return AnyValue(double_value=value)
    return AnyValue(array_value=ArrayValue(values=[any_value(each) for each in value]))


def us_each(work: Callable[[], object], num: int, repeats: int) -> float:
    """Return the median cost of one of the `num` things that `work` does."""
    costs = []
    for _ in range(repeats):
        began = time.process_time()
        work()
        costs.append((time.process_time() - began) / num * 1e6)
    return round(sorted(costs)[repeats // 2], 2)


def busy_steps(like: FinalStep, num: int) -> list[FinalStep]:
    """Return steps of a full batch, one member of which changes in every tenth."""
    steps = []
    for number in range(num):
        ids = tuple(f"request-{number // 10 + row}" for row in range(BATCH))
        ones = like.tokens[:1].repeat(BATCH)
        steps.append(
            replace(
                like,
                step=number,
                request_ids=ids,
                phases=like.phases[:1].repeat(BATCH),
                tokens=ones,
                contexts=ones,
                flags=like.flags[:1].repeat(BATCH),
                shares_ns=ones,
            )
        )
    return steps


def main() -> None:
    """Run the benchmark."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--repeats", type=int, default=15)
    arguments.add_argument("--out", type=Path)
    options = arguments.parse_args()

    told = Told()
    source = open_source(DEMO, sinks=(told,))
    catch_up(source)
    source.close()
    num = len(told.requests)
    # It is never told the wall clock, so it sends nothing and what it would send stays here.
    exporter = OtlpExporter({"queue_size": 1_000_000})
    exporter.open()
    assert exporter._courier is not None
    for step in told.steps:
        exporter.step(step)
    for request in told.requests:
        exporter.request(request)
    finished = list(exporter._courier._waiting)
    traces = [trace_of(each, ENGINE, 1) for each in finished]
    of = resource(ENGINE, Settings())

    def by_sdk() -> bytes:
        spans = [span for trace in traces for span in readable_spans(trace, of)]
        return bytes(encode_spans(spans).SerializeToString())

    long = array("q", range(0, 10_000 * 1000, 1000))
    longer = replace(told.requests[0], token_times_ns=long, tokens_per_event=(1,) * len(long))
    steps = busy_steps(told.steps[-1], 2000)
    body = by_sdk()
    repeats = options.repeats
    result = {
        "machine": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "requests": num,
        "spans_per_request": round(sum(1 + len(t.children) for t in traces) / num, 2),
        "bytes_per_request": {
            "plain": len(body) // num,
            "gzip": len(gzip.compress(body)) // num,
        },
        "fold_thread_us": {
            f"step_of_{BATCH}": us_each(
                lambda: [table.take(step) for table in [FactTable()] for step in steps],
                len(steps),
                repeats,
            ),
            "request": us_each(
                lambda: [exporter.request(each) for each in told.requests], num, repeats
            ),
            "request_of_10000_tokens": us_each(
                lambda: [exporter.request(longer) for _ in range(10)], 10, repeats
            ),
        },
        "courier_thread_us_per_request": {
            "spans": us_each(
                lambda: [trace_of(each, ENGINE, 1) for each in finished], num, repeats
            ),
            "encode_by_sdk": us_each(by_sdk, num, repeats),
            "encode_by_hand": us_each(lambda: by_hand(traces), num, repeats),
            "gzip": us_each(lambda: gzip.compress(body), num, repeats),
        },
    }
    print(json.dumps(result, indent=1))
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
