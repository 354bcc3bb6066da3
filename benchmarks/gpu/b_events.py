"""(b) What timing events cost the host, and how much of a step's span the device is busy."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from load import Decoding, open_engine
from part import Setting, Unmet, main
from watched import Sampler, Windows, told

from inferscope.engine.devices import step_timer
from inferscope.engine.load import describe
from inferscope.probe import Probe
from inferscope.records import StepSpan

_CALLS = 2000


def measure(setting: Setting) -> dict[str, Any]:
    """Time the calls, then hold spans against PM sampling's busy share."""
    setting.need_gpu()
    costs = call_costs()
    lines = ["events: " + ", ".join(f"{name} {ns / 1e3:.2f} µs" for name, ns in costs.items())]
    result: dict[str, Any] = {"call_ns": costs, "lines": lines}
    try:
        result["spans"] = spans_against_busy(setting)
    except Unmet as reason:
        result["spans"] = {"reason": str(reason)}
        lines.append(f"spans against busy time: {reason}")
        return result
    lines += [
        f"batch {row['batch']}: spans are {row['span_over_wall']:.1%} of the wall, "
        f"the device is busy for {row['busy_over_span']:.1%} of them"
        for row in result["spans"]
    ]
    return result


def call_costs() -> dict[str, float]:
    """Return the host's nanoseconds per call, the device idle before each batch of calls."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(_CALLS)]
    aside = torch.cuda.Stream()
    calls: dict[str, Callable[[int], object]] = {
        "record": lambda at: events[at].record(),
        "query": lambda at: events[at].query(),
        "elapsed": lambda at: events[at].elapsed_time(events[-1]),
        "record aside": lambda at: events[at].record(aside),
    }
    found = {}
    for name, call in calls.items():
        torch.cuda.synchronize()
        began_ns = time.perf_counter_ns()
        for at in range(_CALLS):
            call(at)
        found[name] = (time.perf_counter_ns() - began_ns) / _CALLS
    return found


def spans_against_busy(setting: Setting) -> list[dict[str, Any]]:
    """Decode under probe and PM sampling; compare sums over the same stretch."""
    engine = open_engine(setting)
    rows = []
    for batch in (1, 16, 64):
        with tempfile.TemporaryDirectory() as folder, Sampler("pm") as sampler:
            os.environ["INFERSCOPE_DIR"] = folder
            info, timer = describe(engine, name=setting.model), step_timer(engine.model.device)
            probe = engine.probe = Probe.open(info, timer=timer)
            decoding = Decoding(engine, batch=batch, context=256)
            first_ns = time.monotonic_ns()
            phase = decoding.run(100)
            decoding.close()
            time.sleep(0.3)
            probe.close()
            engine.probe = Probe.disabled()
            assert probe.path is not None
            spans = [
                span
                for span in told(probe.path, StepSpan)
                if first_ns <= span.launch_start_ns and span.ready_ns <= phase.end_ns + 10**8
            ][:100]
        busy = Windows(sampler.of("pm"), "busy_share")
        share = busy.mean(phase.start_ns, phase.end_ns)
        span_ns = sum(
            span.device_end_ns - span.device_start_ns
            for span in spans
            if span.device_start_ns is not None and span.device_end_ns is not None
        )
        wall_ns = phase.end_ns - phase.start_ns
        rows.append(
            {
                "batch": batch,
                "num_spans": len(spans),
                "span_over_wall": span_ns / wall_ns,
                "busy_over_wall": share,
                "busy_over_span": (share or 0.0) * wall_ns / max(1, span_ns),
            }
        )
    return rows


if __name__ == "__main__":
    sys.exit(main(measure, __doc__ or ""))
