"""Prefill and decode on the device's roofline: what limits each, compute or memory."""

from __future__ import annotations

import math

from matplotlib.figure import Figure as Canvas

from inferscope.insight import Ceiling, ceilings
from inferscope.insight.run import EngineFacts, RooflinePoint
from inferscope.report.axes import amount
from inferscope.report.blocks import (
    Block,
    Cell,
    Column,
    Figure,
    Marked,
    Number,
    Role,
    Section,
    Table,
    prose,
)
from inferscope.report.plots import DECODE, DIM, INK, PREFILL, TRACK, draw
from inferscope.text.plots import UNKNOWN

_STYLES = {"prefill": (PREFILL, "D"), "decode": (DECODE, "o")}
_ROLES: dict[str, Role] = {"prefill": "prefill", "decode": "decode"}
_LINES = {"measured": "-", "spec": (0, (5, 3))}
_METHOD = (
    "Modelled: FLOPs, from the model's shape. {how}: bytes. Apportioned: device time of the phase,"
    " over all finished requests and ranks. Ceilings: spec is the maker's figure, measured that of"
    " inferscope calibrate."
)


def roofline(engine: EngineFacts) -> Section:
    """Return each phase's work, rates and intensity, under the device's ceilings."""
    points = [each for each in engine.roofline if each.compute_ns]
    if not points:
        none = prose("No finished request has known compute.", role="dim")
        return Section("roofline", "Roofline", (none,))
    blocks: list[Block] = []
    placed = [each for each in points if each.flops_s and each.flops_per_byte]
    if placed:
        blocks.append(_figure(engine, placed))
    blocks.append(_table(engine, points))
    if not ceilings(engine.view.counters):
        blocks.append(
            prose(
                "The device's ceilings are unknown: run `inferscope calibrate` on its host before"
                " the engine starts.",
                role="dim",
            )
        )
    if not placed:
        blocks.append(
            prose("FLOPs and bytes are unknown: the cost model does not count this model's layers.",
                  role="dim")
        )  # fmt: skip
    return Section("roofline", "Roofline", tuple(blocks))


def _table(engine: EngineFacts, points: list[RooflinePoint]) -> Table:
    how = "Measured by counters" if all(each.is_sampled for each in points) else "Modelled"
    known = ceilings(engine.view.counters)
    columns = [
        Column("phase"),
        Column("tokens", "number"),
        Column("device ms", "number"),
        Column("tok/s", "number", "per second of the phase's device time"),
        Column("FLOP/s", "number"),
        Column("byte/s", "number"),
        Column("FLOP/byte", "number"),
    ]
    for ceiling in known:
        columns += [
            Column(f"of {ceiling.name} compute", "number"),
            Column(f"of {ceiling.name} memory", "number"),
            Column("limited by", title=f"by the ridge of the {ceiling.name} ceilings"),
        ]
    return Table(
        tuple(columns), tuple(_row(each, known) for each in points), method=_METHOD.format(how=how)
    )


def _row(point: RooflinePoint, known: list[Ceiling]) -> tuple[Cell, ...]:
    key = point.phase
    cells: list[Cell] = [
        Marked(key, _ROLES[key]),
        Number.count(f"{key}.tokens", point.tokens),
        Number.ms(f"{key}.compute_ns", point.compute_ns),
        Number.rate(f"{key}.tok_s", point.tok_s),
        _amount(f"{key}.flops_s", point.flops_s),
        _amount(f"{key}.bytes_s", point.bytes_s),
        _amount(f"{key}.flops_per_byte", point.flops_per_byte),
    ]
    for ceiling in known:
        name = ceiling.name
        cells += [
            _of(f"{key}.of_{name}_compute", point.flops_s, ceiling.flops_s),
            _of(f"{key}.of_{name}_memory", point.bytes_s, ceiling.bytes_s),
            _limit(point, ceiling),
        ]
    return tuple(cells)


def _limit(point: RooflinePoint, ceiling: Ceiling) -> str:
    if point.flops_per_byte is None or ceiling.ridge is None:
        return UNKNOWN
    return "memory" if point.flops_per_byte < ceiling.ridge else "compute"


def _of(key: str, rate: float | None, peak: float | None) -> Number:
    return Number.share(key, rate / peak if rate is not None and peak else None)


def _amount(key: str, value: float | None) -> Number:
    return Number(key, value, UNKNOWN if value is None else amount(value))


def _figure(engine: EngineFacts, points: list[RooflinePoint]) -> Figure:
    known = [each for each in ceilings(engine.view.counters) if each.ridge is not None]
    intensities = [each.flops_per_byte or 1.0 for each in points]
    ridges = [each.ridge or 1.0 for each in known]
    low = 10 ** math.floor(math.log10(min(intensities + ridges)) - 0.5)
    high = 10 ** math.ceil(math.log10(max(intensities + ridges)) + 0.5)
    tooltips: dict[str, str] = {}

    def plot(canvas: Canvas) -> None:
        axes = canvas.subplots()
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.grid(visible=True, which="major", linewidth=0.7)
        for ceiling, ridge in zip(known, ridges, strict=True):
            heights = [ceiling.attainable(at) or 0.0 for at in (low, ridge, high)]
            axes.plot([low, ridge, high], heights, color=INK, linestyle=_LINES[ceiling.name],
                      linewidth=1.3)  # fmt: skip
            rates = f"{amount(ceiling.flops_s or 0)}FLOP/s, {amount(ceiling.bytes_s or 0)}B/s"
            axes.annotate(f"{ceiling.name} {rates}, ridge {ridge:.3g}", (high, heights[-1]),
                          xytext=(-2, 3), textcoords="offset points", ha="right", fontsize=8.5,
                          color=DIM)  # fmt: skip
        for point in points:
            colour, marker = _STYLES[point.phase]
            x, y = point.flops_per_byte or 0.0, point.flops_s or 0.0
            axes.plot([x], [y], marker=marker, markersize=9, color=colour, linestyle="none",
                      gid=point.phase)  # fmt: skip
            axes.annotate(point.phase, (x, y), xytext=(8, -3), textcoords="offset points")
            tooltips[point.phase] = (
                f"{point.phase}: {amount(y)}FLOP/s at {x:.3g} FLOP/byte,"
                f" {amount(point.bytes_s or 0)}B/s"
            )
        heights = [each.flops_s or 1.0 for each in points]
        peaks = [each.flops_s or 1.0 for each in known]
        axes.set_ylim(min(heights) / 8, max(heights + peaks) * 4)
        axes.set_xlim(low, high)
        axes.yaxis.set_major_formatter(lambda value, _: f"{amount(value)}FLOP/s")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.minorticks_off()
        axes.set_xlabel("FLOP per byte of device memory")
        axes.tick_params(grid_color=TRACK)

    picture = draw(
        (11.5, 3.8),
        plot,
        label="Roofline: FLOPs per second over FLOPs per byte of prefill and decode",
        tooltips=tooltips,
    )
    return Figure(
        picture,
        "◆ prefill, ● decode: the whole run. Under the slope a phase is limited by memory, under"
        " the flat part by compute. A phase that shares its steps can lie above the roof: its"
        " apportioned time is shorter than what it takes alone.",
    )
