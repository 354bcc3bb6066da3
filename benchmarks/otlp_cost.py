"""Cost of a trace on the fold's thread and on the delivery thread.

Folds `samples/demo.isr` once and tells the exporter's parts what became final, over and over.
Prints microseconds of processor time.
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

from demo_finals import BATCH, demo_records, full_step
from inferscope_otlp.exporter import OtlpExporter
from inferscope_otlp.facts import FactTable
from inferscope_otlp.finished import EngineResource
from inferscope_otlp.resource import resource
from inferscope_otlp.spans import trace_of
from inferscope_otlp.wire import resource_bytes, resource_spans, scope_bytes, trace_bytes
from msgspec.structs import replace

ENGINE = EngineResource("benchmark", "engine", "1", "model", "device")


def us_each(work: Callable[[], object], num: int, repeats: int) -> float:
    """Return the median cost per item of `work`, which processes `num` items."""
    costs = []
    for _ in range(repeats):
        began = time.process_time()
        work()
        costs.append((time.process_time() - began) / num * 1e6)
    return round(sorted(costs)[repeats // 2], 2)


def main() -> None:
    """Run the benchmark."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--repeats", type=int, default=15)
    arguments.add_argument("--out", type=Path)
    options = arguments.parse_args()

    recorded = demo_records()
    num = len(recorded.requests)
    # It is never recorded the wall clock, so it sends nothing and what it would send stays here.
    exporter = OtlpExporter({"queue_size": 1_000_000})
    exporter.open()
    assert exporter._traces is not None
    for step in recorded.steps:
        exporter.on_step(step)
    for request in recorded.requests:
        exporter.on_request(request)
    finished = list(exporter._traces[1]._waiting)
    traces = [trace_of(each, ENGINE, 1) for each in finished]
    of, scope = resource_bytes(resource(ENGINE, service_name=None)), scope_bytes("inferscope", "0")

    def encoded() -> bytes:
        return resource_spans(of, scope, [trace_bytes(trace) for trace in traces])

    long = array("q", range(0, 10_000 * 1000, 1000))
    longer = replace(recorded.requests[0], token_times_ns=long, tokens_per_event=(1,) * len(long))
    steps = [full_step(recorded.steps[-1], number) for number in range(2000)]
    body = encoded()
    repeats = options.repeats
    result: dict[str, object] = {
        "machine": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "requests": num,
        "spans_per_request": round(sum(1 + len(t.children) for t in traces) / num, 2),
        "bytes_per_request": {
            "plain": len(body) // num,
            "gzip": len(gzip.compress(body, 1)) // num,
        },
        "fold_thread_us": {
            f"step_of_{BATCH}": us_each(
                lambda: [table.add_step(step) for table in [FactTable()] for step in steps],
                len(steps),
                repeats,
            ),
            "request": us_each(
                lambda: [exporter.on_request(each) for each in recorded.requests], num, repeats
            ),
            "request_of_10000_tokens": us_each(
                lambda: [exporter.on_request(longer) for _ in range(10)], 10, repeats
            ),
        },
        "courier_thread_us_per_request": {
            "spans": us_each(
                lambda: [trace_of(each, ENGINE, 1) for each in finished], num, repeats
            ),
            "encode": us_each(encoded, num, repeats),
            "gzip": us_each(lambda: gzip.compress(body, 1), num, repeats),
        },
    }
    fold, courier = result["fold_thread_us"], result["courier_thread_us_per_request"]
    assert isinstance(fold, dict)
    assert isinstance(courier, dict)
    result["us_per_request"] = round(fold["request"] + sum(courier.values()), 1)
    print(json.dumps(result, indent=1))
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
