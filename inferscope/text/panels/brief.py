"""Overview of a narrow or low screen: two columns without frames, six rows."""

from __future__ import annotations

from inferscope.fold import EngineView
from inferscope.text.labels import format_window, has_gpu
from inferscope.text.lines import Line, Span, fit_line, join_columns, rule, width_of
from inferscope.text.panels.kv import kv_share
from inferscope.text.panels.levels import LEVELS, level_cells
from inferscope.text.panels.peaks import format_peaks
from inferscope.text.panels.phases import Unit, phase_lines
from inferscope.text.panels.throughput import rate_now
from inferscope.text.plots import fit, per_second, share, sparkline

HEIGHT = 7


def brief(view: EngineView, width: int, height: int, *, unit: Unit = "%") -> list[Line]:
    """Return phases, levels, the engine's counts and the token rates in `HEIGHT` rows."""
    left_width = width // 2
    right_width = width - left_width
    word = "GPU time" if has_gpu(view) else "Device time"
    peaks = format_peaks(view).replace("%  ", " ")  # fits half of 80 cells
    left = [
        rule(f"{word} {format_window(view.window_ns)}", left_width, note=peaks),
        *[_indented(line, left_width) for line in phase_lines(view, left_width - 2, unit=unit)],
    ]
    right = [_level_rule(right_width)]
    for name, level_unit, field in LEVELS:
        cells = level_cells(getattr(view, field), level_unit, width=7)
        line: Line = (
            (f" {name:6}", "strong"),
            (f"{level_unit:<3}", "dim"),
            *[(fit(cell, 8, align="right"), "body") for cell in cells],
        )
        right.append(fit_line(line, right_width))
    counts = f" run {view.num_running}  wait {view.num_waiting}  held {view.num_held}"
    right.append(
        fit_line(((counts, "body"), (f"  KV {share(kv_share(view))}", "body")), right_width)
    )
    lines = [*join_columns([left, right]), _rates(view, width)]
    return [fit_line(line, width) for line in lines[:height]]


def _rates(view: EngineView, width: int) -> Line:
    series = view.series
    prefill = f" prefill {per_second(rate_now(series.prefill_tok_s)):>5}/s "
    decode = f"  decode {per_second(rate_now(series.decode_tok_s)):>5}/s "
    chart = max((width - len(prefill) - len(decode) - 1) // 2, 0)
    return (
        (prefill, "body"),
        (sparkline(series.prefill_tok_s, chart), "prefill"),
        (decode, "body"),
        (sparkline(series.decode_tok_s, chart), "decode"),
    )


def _level_rule(width: int) -> Line:
    spans: list[Span] = [("─", "border"), (" Latency", "title")]
    for name in ("p50", "p95", "p99"):
        spans += [(" ───", "border"), (f" {name}", "dim")]
    rest = width - width_of(tuple(spans)) - 1
    return (*spans, (" " + "─" * max(rest, 0), "border"))


def _indented(line: Line, width: int) -> Line:
    return fit_line(((" ", "body"), *line), width)
