"""Prefill and decode on the device's roofline: what limits each, compute or memory."""

from __future__ import annotations

import math

from matplotlib.figure import Figure as Canvas

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
    " `inferscope calibrate`."
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
    if not _ceilings(engine):
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


def _ceilings(engine: EngineFacts) -> dict[str, tuple[float | None, float | None]]:
    """Return compute and memory peaks by their origin, spec or measured."""
    counters = engine.view.counters
    compute, memory = counters.compute_peaks_flops_s, counters.memory_peaks_bytes_s
    return {
        name: (compute.get(name), memory.get(name))
        for name in ("spec", "measured")
        if name in compute or name in memory
    }


def _table(engine: EngineFacts, points: list[RooflinePoint]) -> Table:
    how = "Measured by counters" if all(each.is_sampled for each in points) else "Modelled"
    ceilings = _ceilings(engine)
    columns = [
        Column("phase"),
        Column("tokens", "number"),
        Column("device ms", "number"),
        Column("tok/s", "number", "per second of the phase's device time"),
        Column("FLOP/s", "number"),
        Column("byte/s", "number"),
        Column("FLOP/byte", "number"),
    ]
    for name in ceilings:
        columns.append(Column(f"of {name} compute", "number"))
        columns.append(Column(f"of {name} memory", "number"))
    return Table(
        tuple(columns),
        tuple(_row(each, ceilings) for each in points),
        method=_METHOD.format(how=how).replace("`", ""),
    )


def _row(
    point: RooflinePoint, ceilings: dict[str, tuple[float | None, float | None]]
) -> tuple[Cell, ...]:
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
    for name, (compute, memory) in ceilings.items():
        cells.append(_of(f"{key}.of_{name}_compute", point.flops_s, compute))
        cells.append(_of(f"{key}.of_{name}_memory", point.bytes_s, memory))
    return tuple(cells)


def _of(key: str, rate: float | None, peak: float | None) -> Number:
    return Number.share(key, rate / peak if rate is not None and peak else None)


def _amount(key: str, value: float | None) -> Number:
    return Number(key, value, UNKNOWN if value is None else amount(value))


def _figure(engine: EngineFacts, points: list[RooflinePoint]) -> Figure:
    ceilings = {
        name: (compute, memory)
        for name, (compute, memory) in _ceilings(engine).items()
        if compute and memory
    }
    intensities = [each.flops_per_byte or 1.0 for each in points]
    ridges = [compute / memory for compute, memory in ceilings.values() if compute and memory]
    low = 10 ** math.floor(math.log10(min(intensities + ridges)) - 0.5)
    high = 10 ** math.ceil(math.log10(max(intensities + ridges)) + 0.5)
    tooltips: dict[str, str] = {}

    def plot(canvas: Canvas) -> None:
        axes = canvas.subplots()
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.grid(visible=True, which="major", linewidth=0.7)
        for name, (compute, memory) in ceilings.items():
            assert compute is not None
            assert memory is not None
            ridge = compute / memory
            axes.plot([low, ridge, high], [low * memory, compute, compute], color=INK,
                      linestyle=_LINES[name], linewidth=1.3)  # fmt: skip
            axes.annotate(f"{name} {amount(compute)}FLOP/s, {amount(memory)}B/s", (high, compute),
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
        peaks = [compute for compute, _ in ceilings.values() if compute]
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
