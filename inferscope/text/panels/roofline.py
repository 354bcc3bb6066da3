"""Roofline: steps by kind against the device's ceilings, what limits them, what would move them.

Points are means over the window, their trails the seconds of it. FLOPs and bytes are computed from
the model's shape, time is measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import NamedTuple

from inferscope.fold import EngineView, KindSums
from inferscope.insight import (
    Ceiling,
    Load,
    Point,
    ceilings,
    compute_bound_from,
    load_of,
    point_of,
    speedup,
    total,
)
from inferscope.text.labels import format_window
from inferscope.text.lines import Line, Role, Span, fit_line, frame, rule
from inferscope.text.panels.lanes import KIND_MARKS
from inferscope.text.plots import UNKNOWN, Dots, count, fit, milliseconds, per_second, plain, share

_KINDS = ("prefill", "decode", "mixed")
_MOVES = "What would move it (modelled)"
_NO_PEAK = "no peak of this device is known: inferscope calibrate measures it"
_AXIS = 9
_MOST_SECONDS = 60
_UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
_TRAIL = "·"


@dataclass(frozen=True)
class Roof:
    """Points of an engine's steps and the ceilings of its device."""

    sums: dict[str, KindSums]
    points: dict[str, Point]
    trails: dict[str, list[Point]]
    """Points of single seconds, oldest first."""
    ceilings: list[Ceiling]
    weight_bytes: float
    """Bytes of all weights on the observed ranks."""
    is_counted: bool
    device: str
    weight_bits: int | None

    @property
    def ceiling(self) -> Ceiling | None:
        """Return the ceiling that rates are compared with: the measured one where it is known."""
        return self.ceilings[0] if self.ceilings else None


class _Axes(NamedTuple):
    """Decades of the chart."""

    x_first: int
    x_last: int
    y_first: int
    y_last: int

    def x(self, intensity: float, width: int) -> int:
        """Return the column of an intensity."""
        span = self.x_last - self.x_first
        return int((math.log10(intensity) - self.x_first) / span * width)

    def y(self, flops_s: float, height: int) -> int:
        """Return the row of a rate, from the top."""
        span = self.y_last - self.y_first
        return int((self.y_last - math.log10(flops_s)) / span * height)


def roof_of(view: EngineView) -> Roof:
    """Return the points of an engine, by the sums of its snapshot."""
    sums = {kind: total(view.kinds.get(kind, ())) for kind in _KINDS}
    points = {kind: point for kind in _KINDS if (point := point_of(sums[kind])) is not None}
    trails = {
        kind: [
            point
            for second in view.kinds.get(kind, ())[-_MOST_SECONDS:]
            if (point := point_of(second)) is not None
        ]
        for kind in _KINDS
    }
    seen = view.num_ranks_seen or view.num_ranks  # of an engine that has ended, none is seen
    part = seen / view.num_ranks if view.num_ranks else 1.0
    bits = view.deployment.quantization.partition("kv")[0].removeprefix("w")
    return Roof(
        sums,
        points,
        trails,
        ceilings(view.counters),
        (view.weight_bytes or 0) * min(part, 1.0),
        view.is_counted,
        view.device,
        int(bits) if bits.isdigit() else None,
    )


# --- the chart ----------------------------------------------------------------------------------


def roofline_chart(roof: Roof, width: int, height: int, *, window_ns: int) -> list[Line]:
    """Return the log-log chart of FLOP/s over FLOPs per byte."""
    note = ", ".join(_format_ceiling(each) for each in roof.ceilings) or "no peak is known"
    foot = f"points: mean of {format_window(window_ns)}; trail: its seconds"
    if not roof.points:
        why = "waiting for steps" if roof.is_counted else "the model's shape is not known"
        return frame("Roofline", [((why, "dim"),)], width, height, note=note)
    lines: list[Line] = [(("FLOP/s", "dim"),)] if height > 12 else []
    columns, rows = max(width - 4 - _AXIS, 4), max(height - 3 - len(lines), 2)
    axes = _axes(roof)
    dots = Dots(columns, rows)
    for at, ceiling in enumerate(roof.ceilings):
        _draw_ceiling(dots, ceiling, axes, is_dotted=at > 0)
    cells: list[list[tuple[str, Role]]] = [[(char, "bar") for char in row] for row in dots.rows()]
    _label_ridge(cells, roof, axes)
    for kind in _KINDS:
        _, role = KIND_MARKS[kind]
        for point in roof.trails[kind][:-1]:
            _put(cells, point, axes, _TRAIL, "body" if kind == "mixed" else role)
    for kind, point in roof.points.items():
        mark, role = KIND_MARKS[kind]
        _put(cells, point, axes, mark, role)
    labels = _y_labels(axes, rows)
    for row in range(rows):
        text, mark = labels.get(row, ("", " "))
        lines.append(((f"{text:>{_AXIS - 2}} {mark}", "dim"), *_runs(cells[row])))
    lines += _x_axis(axes, columns)
    return frame("Roofline", lines, width, height, note=note, foot=foot)


def _axes(roof: Roof) -> _Axes:
    points = [*roof.points.values(), *(p for trail in roof.trails.values() for p in trail)]
    xs = [point.intensity for point in points]
    ys = [point.flops_s for point in points]
    for ceiling in roof.ceilings:
        if ceiling.ridge is not None:
            xs.append(ceiling.ridge)
        if ceiling.flops_s:
            ys.append(ceiling.flops_s * 1.5)
    x_first, x_last = math.floor(math.log10(min(xs))), math.ceil(math.log10(max(xs) * 1.2))
    y_first, y_last = math.floor(math.log10(min(ys))), math.ceil(math.log10(max(ys)))
    return _Axes(x_first, max(x_last, x_first + 2), y_first, max(y_last, y_first + 2))


def _draw_ceiling(dots: Dots, ceiling: Ceiling, axes: _Axes, *, is_dotted: bool) -> None:
    """Draw the attainable rate over all intensities."""
    last = None
    for x in range(dots.width):
        intensity = 10 ** (axes.x_first + (x + 0.5) / dots.width * (axes.x_last - axes.x_first))
        attainable = ceiling.attainable(intensity)
        if attainable is None:
            return
        y = axes.y(attainable, dots.height)
        if not (is_dotted and x % 4 > 1):
            step = range(y, last) if last is not None and last > y + 1 and not is_dotted else (y,)
            for each in step:
                dots.set(x, each)
        last = y


def _label_ridge(cells: list[list[tuple[str, Role]]], roof: Roof, axes: _Axes) -> None:
    """Write the ridge above the corner of the first ceiling that has one."""
    for ceiling in roof.ceilings:
        if ceiling.ridge is None or ceiling.flops_s is None:
            continue
        text = f"ridge {per_second(ceiling.ridge)}"
        row = axes.y(ceiling.flops_s, len(cells)) - 1
        column = axes.x(ceiling.ridge, len(cells[0]))
        column = max(min(column, len(cells[0]) - len(text)), 0)
        if 0 <= row < len(cells):
            for at, char in enumerate(text):
                cells[row][column + at] = (char, "dim")
        return


def _put(
    cells: list[list[tuple[str, Role]]], point: Point, axes: _Axes, mark: str, role: Role
) -> None:
    row, column = axes.y(point.flops_s, len(cells)), axes.x(point.intensity, len(cells[0]))
    if 0 <= row < len(cells) and 0 <= column < len(cells[0]):
        cells[row][column] = (mark, role)


def _y_labels(axes: _Axes, rows: int) -> dict[int, tuple[str, str]]:
    """Return the labels of decades, by row."""
    found: dict[int, tuple[str, str]] = {}
    for decade in range(axes.y_first, axes.y_last + 1):
        row = min(axes.y(10.0**decade, rows), rows - 1)
        found.setdefault(row, (_engineering(10.0**decade), "┤"))
    return found


def _x_axis(axes: _Axes, columns: int) -> list[Line]:
    """Return the line of decades, with the name of the axis at its end."""
    name = "FLOP/byte"
    text = [" "] * columns
    for decade in range(axes.x_first, axes.x_last + 1):
        label = f"{10.0**decade:g}"
        at = max(min(axes.x(10.0**decade, columns), columns - len(label)), 0)
        if at + len(label) <= columns - len(name) - 1 or decade == axes.x_first:
            text[at : at + len(label)] = label
    text[columns - len(name) :] = name
    return [((f"{'':{_AXIS}}{''.join(text)}", "dim"),)]


# --- the panels ---------------------------------------------------------------------------------


def kind_panel(roof: Roof, kind: str, width: int, height: int) -> list[Line]:
    """Return what the steps of one kind reach, and what limits them."""
    mark, _ = KIND_MARKS[kind]
    sums, point = roof.sums[kind], roof.points.get(kind)
    title = f"{kind.capitalize()} {mark}"
    if point is None:
        why = "no warm step in this window" if roof.is_counted else "work is not counted"
        return frame(title, [((f"- ({why})", "dim"),)], width, height)
    lines: list[Line] = [
        _pair(f"{_engineering(point.flops_s)}FLOP/s", _of_peaks(point.flops_s, roof, "flops_s")),
        _pair(f"{_engineering(point.bytes_s)}B/s", _of_peaks(point.bytes_s, roof, "bytes_s")),
        _pair(f"{per_second(point.intensity)} FLOP/B", limit_of(point, roof.ceiling)),
        _pair(f"{milliseconds(sums.wall_ns / sums.steps)} ms/step", _units(sums, kind)),
    ]
    moved = sums.read_bytes + sums.write_bytes
    lines.append(_pair(f"{_engineering(moved / sums.steps)}B/step", ""))
    for name, part in (
        ("weights", sums.weight_bytes),
        ("KV read", sums.kv_bytes),
        ("act., KV write", moved - sums.weight_bytes - sums.kv_bytes),
    ):
        text = f"  {name:<15}{_engineering(part / sums.steps) + 'B':>8} {share(part / moved):>7}"
        lines.append(((text, "body"),))
    return frame(title, lines, width, height, note=f"{count(sums.steps)} steps")


def moves_panel(roof: Roof, width: int, height: int) -> list[Line]:
    """Return what would move the points, by the model of the roofline alone."""
    return frame(_MOVES, _move_lines(roof, width - 4), width, height)


def brief_moves(roof: Roof, width: int, height: int) -> list[Line]:
    """Return what would move the points without a frame."""
    lines = [rule(_MOVES, width)]
    lines += [fit_line(((" ", "body"), *line), width) for line in _move_lines(roof, width - 2)]
    lines += [fit_line((), width)] * (height - len(lines))
    return lines[:height]


def _move_lines(roof: Roof, width: int) -> list[Line]:
    rows = moves(roof)
    if not rows:
        why = _NO_PEAK if not roof.ceilings else "one peak alone gives no ridge"
        return [((part, "dim"),) for part in wrap(f"- ({why})", max(width, 10))]
    return [((f"{name:<18}", "dim"), (text, "body")) for name, text in rows]


def moves(roof: Roof) -> list[tuple[str, str]]:
    """Return what would change the rates, each computed from the ceilings: a change, its effect."""
    ceiling = roof.ceiling
    if ceiling is None or ceiling.ridge is None:
        return []
    rows = [("ridge", f"{per_second(ceiling.ridge)} FLOP/byte")]
    decode = load_of(roof.sums["decode"], is_prefill=False)
    prefill = load_of(roof.sums["prefill"], is_prefill=True)
    for name, load, unit in (("decode", decode, "seqs"), ("prefill", prefill, "tok")):
        if load is not None:
            at = compute_bound_from(load, ceiling, weight_bytes=roof.weight_bytes)
            assert at is not None  # there is a ridge
            now = f"{load.units:.1f}" if load.units < 99.95 else count(load.units)
            where = "never (KV reads)"
            if math.isfinite(at):
                where = f"{count(math.ceil(at))} {unit}, now {now}"
            rows.append((f"{name} ridge at", where))
    if decode is not None:
        rows += _decode_moves(roof, decode, ceiling)
    return rows


def _decode_moves(roof: Roof, decode: Load, ceiling: Ceiling) -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    twice = speedup(decode, ceiling, times_units=2, weight_bytes=roof.weight_bytes)
    if twice is not None:
        rows.append(("batch ×2", f"{twice:.2f}× decode tok/s"))
    bits = roof.weight_bits
    if bits is not None and bits > 8:
        narrow = speedup(decode, ceiling, times_weights=8 / bits, weight_bytes=roof.weight_bytes)
        if narrow is not None:
            rows.append(("weights at 8 bits", f"{narrow:.2f}× decode tok/s"))
    return rows


def limit_of(point: Point, ceiling: Ceiling | None) -> str:
    """Return which ceiling is above a point, by its side of the ridge."""
    ridge = ceiling.ridge if ceiling is not None else None
    if ridge is None:
        return UNKNOWN
    return "memory-bound" if point.intensity < ridge else "compute-bound"


def kind_table(roof: Roof, width: int) -> list[Line]:
    """Return the kinds as rows: the panels of a narrow screen."""
    head = f"{'KIND':<11}{'FLOP/s':>8}{'of peak':>9}{'B/s':>8}{'of peak':>9}{'FLOP/B':>8}"
    head += f"{'ms/step':>9}  BOUND"
    lines: list[Line] = [fit_line(((f" {head}", "dim"),), width)]
    for kind in _KINDS:
        mark, role = KIND_MARKS[kind]
        name: Span = (f" {mark} {kind:<9}", role)
        point, sums = roof.points.get(kind), roof.sums[kind]
        if point is None:
            lines.append(fit_line((name, (f"{UNKNOWN:>8}{UNKNOWN:>9}", "dim")), width))
            continue
        ceiling = roof.ceiling
        text = (
            f"{_engineering(point.flops_s):>8}"
            f"{_part(point.flops_s, ceiling.flops_s if ceiling else None):>9}"
            f"{_engineering(point.bytes_s):>8}"
            f"{_part(point.bytes_s, ceiling.bytes_s if ceiling else None):>9}"
            f"{per_second(point.intensity):>8}{milliseconds(sums.wall_ns / sums.steps):>9}"
            f"  {limit_of(point, ceiling).removesuffix('-bound')}"
        )
        lines.append(fit_line((name, (text, "body")), width))
    return lines


def provenance(view: EngineView, roof: Roof) -> str:
    """Return how the numbers are made, and what to do about a missing peak."""
    if not roof.ceilings:
        return f"{_NO_PEAK} ({plain(view.device) or 'unknown device'})."
    clock = "device events" if view.clock == "device" else "host clock"
    names = {"measured": "calibrated", "spec": "maker's"}
    peaks = ", ".join(names[each.name] for each in roof.ceilings)
    # One line of 80 columns.
    return f"FLOP, bytes: modelled. Time: {clock}, warm. Peaks: {peaks}."


# --- formatting ---------------------------------------------------------------------------------


def _units(sums: KindSums, kind: str) -> str:
    if kind == "decode":
        busy = sums.decode_tokens * 1e9 / sums.wall_ns
        return f"{sums.requests / sums.steps:.1f} seqs, {per_second(busy)} tok/s"
    busy = (sums.prefill_tokens + sums.decode_tokens) * 1e9 / sums.wall_ns
    tokens = (sums.prefill_tokens + sums.decode_tokens) / sums.steps
    return f"{tokens:.0f} tok, {per_second(busy)} tok/s"


def _of_peaks(value: float, roof: Roof, name: str) -> str:
    known = [each for each in roof.ceilings if getattr(each, name)]
    if len(known) == 1:
        return f"{_part(value, getattr(known[0], name))} of {known[0].name}"
    shares = "/".join(f"{100 * value / getattr(each, name):.0f}" for each in known)
    return f"{shares}% {'/'.join(each.name for each in known)}" if known else f"{UNKNOWN} of peak"


def _part(value: float, peak: float | None) -> str:
    return share(value / peak) if peak else UNKNOWN


def _pair(left: str, right: str) -> Line:
    return ((fit(left, 13) + " ", "strong"), (right, "body"))


def _format_ceiling(ceiling: Ceiling) -> str:
    flops = f"{_engineering(ceiling.flops_s)}FLOP/s" if ceiling.flops_s else ""
    moved = f"{_engineering(ceiling.bytes_s)}B/s" if ceiling.bytes_s else ""
    return f"{ceiling.name} {' '.join(part for part in (flops, moved) if part)}"


def _engineering(value: float) -> str:
    """Return three digits with a prefix and a space before it: `613 T`, `3.60 G`."""
    factor, prefix = next((unit for unit in _UNITS if value >= unit[0] * 0.9995), _UNITS[-1])
    scaled = value / factor
    digits = 2 if scaled < 9.995 else 1 if scaled < 99.95 else 0
    text = f"{scaled:.{digits}f}"
    if "." in text and float(text) == round(float(text)):
        text = f"{float(text):.0f}"
    return f"{text} {prefix}"


def _runs(cells: Sequence[tuple[str, Role]]) -> list[Span]:
    spans: list[Span] = []
    for text, role in cells:
        if spans and spans[-1][1] == role:
            spans[-1] = (spans[-1][0] + text, role)
        else:
            spans.append((text, role))
    return spans
