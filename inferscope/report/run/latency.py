"""Distributions of the latencies: histograms with their percentiles and limits."""

from __future__ import annotations

import math

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

from inferscope.insight.run import EngineFacts
from inferscope.log_histogram import BINS_PER_E, EDGE_NS, LogHistogram
from inferscope.report.axes import log_time_axis, plain_duration
from inferscope.report.blocks import Cell, Column, Figure, Number, Section, Table, prose
from inferscope.report.plots import ALARM, BAR, DIM, INK, PAPER, bare, draw

_MOST_BARS = 56
_NARROWEST = 4.0
"""Smallest ratio of the ends of a time axis: between them are at least two labels."""
_METRICS = (
    ("ttft", "Time to first token (TTFT)", "responses"),
    ("tbt", "Time between tokens (TBT)", "gaps"),
    ("e2e", "Time to last token (E2E)", "answers"),
)
_METHOD = (
    "Measured (probe clock). Mean and maximum are exact; percentiles come from bins of 1 % and are"
    " off by at most 0.5 %. TTFT and TBT are of streamed responses, E2E of answers that ended with"
    " stop or length; requests that began before the records are left out."
)


def latencies(engine: EngineFacts) -> Section:
    """Return the distributions of TTFT, TBT and E2E."""
    histograms = {"ttft": engine.ttft, "tbt": engine.tbt, "e2e": engine.e2e}
    table = Table(
        (
            Column("latency"),
            Column("values", "number"),
            *(Column(f"{name} ms", "number") for name in ("mean", "p50", "p95", "p99", "max")),
        ),
        tuple(_row(name, title, histograms[name]) for name, title, _ in _METRICS),
        method=_METHOD,
    )
    if not any(each.num for each in histograms.values()):
        none = prose("No request finished that was observed from its beginning.", role="dim")
        return Section("latency", "Latencies", (none, table))
    return Section("latency", "Latencies", (_figure(engine, histograms), table))


def _row(name: str, title: str, of: LogHistogram) -> tuple[Cell, ...]:
    p50, p95, p99 = of.percentiles_ns()
    mean_ns = of.mean_ns
    return (
        title,
        Number.count(f"{name}.num", of.num),
        Number.ms(f"{name}.mean_ns", None if mean_ns is None else round(mean_ns)),
        Number.ms(f"{name}.p50_ns", p50),
        Number.ms(f"{name}.p95_ns", p95),
        Number.ms(f"{name}.p99_ns", p99),
        Number.ms(f"{name}.max_ns", of.longest_ns if of.num else None),
    )


def _figure(engine: EngineFacts, histograms: dict[str, LogHistogram]) -> Figure:
    limits: dict[str, int | None] = {
        count.objective.metric: count.objective.threshold_ns
        for count in engine.found.objectives or ()
    }
    tooltips: dict[str, str] = {}

    def plot(canvas: Canvas) -> None:
        for axes, (name, title, noun) in zip(canvas.subplots(1, 3), _METRICS, strict=True):
            axes.set_title(title)
            found = _histogram(axes, name, histograms[name], noun, limits.get(name))
            tooltips.update(found)

    picture = draw(
        (11.5, 3.1),
        plot,
        label="Histograms of TTFT, TBT and E2E with their 50th, 95th and 99th percentiles",
        tooltips=tooltips,
    )
    return Figure(
        picture,
        "Logarithmic time; each bar counts values. Lines: p50, p95, p99; dashed with ▲: the"
        " objective's limit.",
    )


def _histogram(
    axes: Axes, name: str, of: LogHistogram, noun: str, limit_ns: int | None
) -> dict[str, str]:
    """Draw a histogram; return the tooltips of its bars."""
    bare(axes)
    if not of.num:
        axes.text(0.5, 0.5, "-", transform=axes.transAxes, ha="center", color=DIM)
        axes.set_xticks([])
        axes.set_yticks([])
        return {}
    first, last = min(of.bins), max(of.bins)
    per_bar = max(1, -(-(last - first + 1) // _MOST_BARS))
    counts: dict[int, int] = {}
    for number, num in of.bins.items():
        counts[(number - first) // per_bar] = counts.get((number - first) // per_bar, 0) + num
    tooltips = {}
    for bar, num in sorted(counts.items()):
        low, high = (_edge_ns(first + (bar + end) * per_bar) for end in (0, 1))
        gid = f"{name}-{bar}"
        axes.bar(low, num, width=(high - low) * 0.94, align="edge", color=BAR, gid=gid)
        tooltips[gid] = f"{num:,} {noun} from {plain_duration(low)} to {plain_duration(high)}"
    _span(axes, _edge_ns(first - per_bar), _edge_ns(last + 2 * per_bar), limit_ns)
    low, high = axes.get_xlim()
    most = max(counts.values())
    axes.set_ylim(0, most * 1.3)
    axes.set_ylabel(noun)
    for at, (percentile, value_ns) in enumerate(
        zip(("p50", "p95", "p99"), of.percentiles_ns(), strict=True)
    ):
        assert value_ns is not None
        height = most * (1.25 - 0.09 * at)
        axes.plot([value_ns, value_ns], [0, height], color=INK, linewidth=0.9)
        is_right = math.log(value_ns / low) > 0.7 * math.log(high / low)
        text = f"{percentile} {plain_duration(value_ns)}"
        axes.annotate(
            text,
            (value_ns, height),
            xytext=(-3 if is_right else 3, 0),
            textcoords="offset points",
            ha="right" if is_right else "left",
            va="top",
            fontsize=8.5,
            bbox={"facecolor": PAPER, "linewidth": 0, "pad": 0.6},
        )
    return tooltips


def _span(axes: Axes, low: float, high: float, limit_ns: int | None) -> None:
    """Set the range of the time axis, wide enough for labels, and draw the limit."""
    if limit_ns is not None:
        low, high = min(low, limit_ns * 0.8), max(high, limit_ns * 1.25)
        axes.axvline(limit_ns, color=ALARM, linewidth=1.2, linestyle=(0, (4, 3)))
        axes.plot([limit_ns], [0], marker="^", markersize=7, color=ALARM, clip_on=False)
    wider = max(1.0, math.sqrt(_NARROWEST * low / high))
    axes.set_xlim(low / wider, high * wider)
    log_time_axis(axes)


def _edge_ns(number: int) -> float:
    return EDGE_NS * math.exp(number / BINS_PER_E)
