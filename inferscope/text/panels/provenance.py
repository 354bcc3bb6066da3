"""Method and source of the numbers on screen, as they are now."""

from __future__ import annotations

from inferscope.fold import EngineView
from inferscope.text.labels import more_or_less
from inferscope.text.lines import Line
from inferscope.text.plots import UNKNOWN, count, duration, plain, share

_HEAD = 14


def number_sources(view: EngineView) -> list[Line]:
    """Return a line per source: clocks, division of steps, cost model, counters, peaks."""
    counters = view.counters
    clock = "CUDA events of the device" if view.clock == "device" else "the host, launch to outputs"
    if view.clock == "device" and counters.clock_error_ns is not None:
        clock += f", error {duration(counters.clock_error_ns)}"
    rows: list[tuple[str, str]] = [
        ("step times", clock),
        ("shares", "apportioned: each step's time divided among its requests by the cost model"),
    ]
    for model in view.cost_models:
        off = (
            UNKNOWN
            if model.residual is None
            else f"recent steps took {more_or_less(model.residual)}"
        )
        state = model.source + (", provisional" if model.is_provisional else "")
        rows.append(
            (
                "cost model",
                f"{plain(model.mode)}: {state}, {count(model.num_steps)} steps, {off}",
            )
        )
    rows.append(
        (
            "FLOPs, bytes",
            "modelled from the shape" if view.is_counted else "unknown: the shape is not known",
        )
    )
    for name, method in sorted(counters.methods.items()):
        error = counters.errors.get(name)
        text = f"{method} ({counters.sources.get(name, UNKNOWN)})"
        rows.append((name, text + ("" if error is None else f", error {share(error)}")))
    if not counters.methods:
        rows.append(("counters", f"{UNKNOWN} {counters.reason or 'no source reports'}"))
    for name, peaks in (
        ("compute peak", counters.compute_peaks_flops_s),
        ("memory peak", counters.memory_peaks_bytes_s),
    ):
        if peaks:
            rows.append((name, ", ".join(f"{what} {value:.3g}/s" for what, value in peaks.items())))
    rows.append(("unknown", "- is a number without a source, never 0"))
    return [((f"  {name:<{_HEAD}}", "dim"), (text, "body")) for name, text in rows]
