"""The course of the run: load, device use and latencies over time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

from inferscope.insight.run import CourseBin, EngineFacts
from inferscope.report.axes import plain_duration
from inferscope.report.blocks import Figure, Section
from inferscope.report.plots import BAR, DECODE, DIM, INK, PAPER, PREFILL, bare, draw
from inferscope.text.plots import duration, share


def course(engine: EngineFacts) -> Section | None:
    """Return a plot of the run over its time."""
    if len(engine.course) < 2:
        return None
    return Section("course", "Course of the run", (_figure(engine),))


def _figure(engine: EngineFacts) -> Figure:
    starts = [start for start, _ in engine.course]
    bins = [each for _, each in engine.course]
    origin_ns, width = starts[0], engine.course_ns / 1e9
    times = [(start - origin_ns) / 1e9 for start in starts]
    num_ranks = max(1, engine.view.num_ranks_seen)
    tooltips: dict[str, str] = {}

    def plot(canvas: Canvas) -> None:
        rows = canvas.subplots(3, 1, sharex=True, height_ratios=(1, 1, 1.2))
        load, use, latency = rows
        _steps(load, times, width, [each.most_running for each in bins], INK, "running")
        _steps(load, times, width, [each.most_waiting for each in bins], BAR, "waiting", "--")
        load.set_ylabel("requests")
        load.set_ylim(bottom=0)
        _legend(load)
        scale = 100 / (engine.course_ns * num_ranks)
        prefill = [each.prefill_ns * scale for each in bins]
        decode = [each.decode_ns * scale for each in bins]
        use.bar(times, decode, width, align="edge", color=DECODE, label="decode")
        use.bar(times, prefill, width, bottom=decode, align="edge", color=PREFILL, label="prefill",
                hatch="////", edgecolor=PAPER)  # fmt: skip
        use.set_ylabel("device %")
        use.set_ylim(0, max(100.0, *(a + b for a, b in zip(prefill, decode, strict=True))))
        _legend(use)
        latency.set_yscale("log")
        _steps(latency, times, width, _quantiles(bins, lambda each: each.ttft.quantile_ns(0.95)),
               INK, "TTFT p95")  # fmt: skip
        _steps(latency, times, width, _quantiles(bins, lambda each: each.tbt.quantile_ns(0.99)),
               BAR, "TBT p99", "--")  # fmt: skip
        latency.set_ylabel("latency")
        _whole_decades(latency)
        latency.yaxis.set_major_formatter(lambda ms, _: plain_duration(ms * 1e6))
        latency.yaxis.minorticks_off()
        _legend(latency)
        latency.set_xlabel("s after the first record")
        for at, each in enumerate(bins):
            gid = f"bin-{at}"
            rows[2].axvspan(times[at], times[at] + width, color=DIM, alpha=0.0, gid=gid)
            tooltips[gid] = _tooltip(times[at], width, each)
        for axes in rows:
            bare(axes)
            axes.set_xlim(times[0], times[-1] + width)

    picture = draw(
        (11.5, 4.6),
        plot,
        label="Requests, device use and latencies over the time of the run",
        tooltips=tooltips,
    )
    return Figure(
        picture,
        f"Bins of {width:g} s. Requests: the largest batch and the longest queue of a plan. Device:"
        " time of the steps by phase, of the wall time of all ranks. Latencies: of the tokens that"
        " came in the bin.",
        method="Measured: latencies, plans, time of steps. Apportioned: its division over phases.",
    )


def _whole_decades(axes: Axes) -> None:
    """Extend a logarithmic axis to whole decades, of which the ends are labelled."""
    low, high = (max(end, 1e-9) for end in axes.get_ylim())
    axes.set_ylim(10 ** math.floor(math.log10(low)), 10 ** math.ceil(math.log10(high)))


def _legend(axes: Axes) -> None:
    """Draw a legend above a plot's right end."""
    axes.legend(loc="lower right", bbox_to_anchor=(1, 0.97), ncols=2, borderpad=0)


def _quantiles(
    bins: Sequence[CourseBin], of: Callable[[CourseBin], int | None]
) -> list[float | None]:
    return [None if (ns := of(each)) is None else ns / 1e6 for each in bins]


def _steps(
    axes: Axes,
    times: Sequence[float],
    width: float,
    values: Sequence[float | None],
    colour: str,
    label: str,
    linestyle: str = "-",
) -> None:
    """Draw a step line that is interrupted where values are unknown."""
    known = [float("nan") if value is None else value for value in values]
    edges = [*times, times[-1] + width]
    axes.stairs(known, edges, baseline=None, color=colour, label=label, linestyle=linestyle,
                linewidth=1.4)  # fmt: skip


def _tooltip(time_s: float, width: float, each: CourseBin) -> str:
    ttft, tbt = each.ttft.quantile_ns(0.95), each.tbt.quantile_ns(0.99)
    return (
        f"{time_s:g} to {time_s + width:g} s: {each.num_finished} finished, TTFT p95"
        f" {duration(ttft)}, TBT p99 {duration(tbt)}, {each.most_running} running,"
        f" {each.most_waiting} waiting, KV {share(each.kv_share)}"
    )
