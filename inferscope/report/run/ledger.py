"""The ledger by rank: where the time of fast and of slow requests went, by cause."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure as Canvas

from inferscope.insight.run import EngineFacts, LedgerBand
from inferscope.report.axes import plain_duration
from inferscope.report.blocks import (
    Block,
    Cell,
    Column,
    Details,
    Figure,
    Number,
    Section,
    Table,
    prose,
)
from inferscope.report.causes import cause_cell, cause_style, in_order
from inferscope.report.plots import DIM, PAPER, bare, draw
from inferscope.text import CAUSE_MEANINGS, many
from inferscope.text.plots import duration, milliseconds

_METRICS = (
    ("e2e", "E2E", "time to the last token"),
    ("ttft", "TTFT", "time to the first token"),
)
_LEGEND = (
    "Causes in the order of a request's life. ◆ orange: prefill; ● blue: decode; ▲ red: lost work;"
    " grey: waiting and the host. Hatches tell causes of one colour apart."
)
_SMALL = 0.01
"""Share of a band's time below which a cause is drawn with the small ones."""


def ledger(engine: EngineFacts) -> Section:
    """Return mean ledgers by rank of E2E and of TTFT."""
    blocks: list[Block] = []
    for (name, short, meaning), bands in zip(
        _METRICS, (engine.e2e_bands, engine.ttft_bands), strict=True
    ):
        if bands:
            blocks.append(_figure(name, short, meaning, bands))
            table = _table(name, short, bands)
            blocks.append(
                Details((f"Mean ms of a request by cause and rank of {short}",), (table,))
            )
    if not blocks:
        why = engine.view.ledger_missing
        reason = f" ({why})" if why else ""
        blocks.append(prose(f"No finished request has a ledger{reason}.", role="dim"))
    return Section("ledger", "Where latency went, by percentile", tuple(blocks))


def _bandname(band: LedgerBand) -> str:
    low, high, rest = (f"{round(100 * at, 1):g}" for at in (band.low, band.high, 1 - band.low))
    if band.low == 0:
        return "all" if band.high == 1 else f"fastest {high} %"
    return f"slowest {rest} %" if band.high == 1 else f"p{low} to p{high}"


def _figure(name: str, short: str, meaning: str, bands: tuple[LedgerBand, ...]) -> Figure:
    largest = max(band.sum_ns / band.num for band in bands)
    causes = in_order({cause for band in bands for cause, ns in band.by_cause.items() if ns > 0})
    drawn = [
        cause
        for cause in causes
        if any(band.by_cause.get(cause, 0) > _SMALL * band.sum_ns for band in bands)
    ]
    styles = {cause: cause_style(cause) for cause in drawn}
    tooltips: dict[str, str] = {}

    def plot(canvas: Canvas) -> None:
        axes = canvas.subplots()
        bare(axes, left=False)
        for row, band in enumerate(bands):
            left = 0.0
            for at, cause in enumerate(drawn):
                mean_ns = band.by_cause.get(cause, 0) / band.num
                if not mean_ns:
                    continue
                style, gid = styles[cause], f"{row}-{at}"
                axes.barh(
                    row,
                    mean_ns,
                    left=left,
                    height=0.62,
                    color=style.colour,
                    hatch=style.hatch,
                    edgecolor=PAPER,
                    linewidth=0.8,
                    gid=gid,
                )
                part = band.by_cause.get(cause, 0) / band.sum_ns
                tooltips[gid] = (
                    f"{cause} ({CAUSE_MEANINGS.get(cause, '')}): {milliseconds(mean_ns)} ms,"
                    f" {100 * part:.1f}% of {_bandname(band)}"
                )
                left += mean_ns
            axes.text(band.sum_ns / band.num + largest * 0.008, row,
                      duration(band.sum_ns / band.num), va="center", fontsize=9)  # fmt: skip
        axes.set_yticks(
            range(len(bands)), [f"{_bandname(band)}\n{many(band.num, 'request')}" for band in bands]
        )
        axes.invert_yaxis()
        axes.set_xlim(0, largest * 1.09)
        axes.xaxis.set_major_formatter(lambda ns, _: plain_duration(ns) if ns else "0")
        handles: list[Any] = [
            axes.barh(0, 0, color=styles[cause].colour, hatch=styles[cause].hatch,
                      edgecolor=PAPER, linewidth=0.8)
            for cause in drawn
        ]  # fmt: skip
        canvas.legend(
            handles, drawn, loc="outside lower left", ncols=6, handlelength=1.6, handleheight=1.1,
            labelcolor=DIM,
        )  # fmt: skip
        axes.set_title(f"Mean {meaning}, by rank of {short}")

    height = 1.1 + 0.52 * len(bands) + 0.22 * -(-len(drawn) // 6)
    picture = draw(
        (11.5, height),
        plot,
        label=f"Mean ledger of requests by rank of {short}",
        tooltips=tooltips,
    )
    return Figure(
        picture,
        _LEGEND if name == "e2e" else "",
    )


def _table(name: str, short: str, bands: tuple[LedgerBand, ...]) -> Table:
    causes = in_order({cause for band in bands for cause, ns in band.by_cause.items() if ns})
    rows: list[tuple[Cell, ...]] = []
    for cause in causes:
        cells = [
            _mean(f"{name}.{number}.{cause}_ns", band.by_cause.get(cause, 0), band)
            for number, band in enumerate(bands)
        ]
        rows.append((cause_cell(cause), CAUSE_MEANINGS.get(cause, "-"), *cells))
    sums = [
        _mean(f"{name}.{number}.sum_ns", band.sum_ns, band) for number, band in enumerate(bands)
    ]
    sizes = [Number.count(f"{name}.{number}.num", band.num) for number, band in enumerate(bands)]
    rows.append(("requests", "", *sizes))
    headings = [
        Column(_bandname(band), "number", f"{short} from {duration(band.fastest_ns)} to "
               f"{duration(band.slowest_ns)}")
        for band in bands
    ]  # fmt: skip
    return Table(
        (Column("cause"), Column("meaning"), *headings),
        tuple(rows),
        total=("sum", "", *sums),
        method=(
            "Apportioned: each request's time is divided over causes in whole nanoseconds; within a"
            " step by counterfactuals of the cost model. Bands are cut between bins of 1 % of the"
            " latency."
        ),
    )


def _mean(key: str, sum_ns: int, band: LedgerBand) -> Number:
    return Number.ms(key, sum_ns / band.num)
