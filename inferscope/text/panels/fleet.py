"""All engines of a host, a line each, and the one that stands out.

An engine stands out among those of its model if one of its figures is more than twice the median of
the others' (TTFT p95, TBT p99, waiting requests), or less than half of it (tokens per second). With
few requests a percentile is chance: latencies count from `ENOUGH` requests on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

from inferscope.fold import EngineView, Snapshot
from inferscope.text.lines import TRIANGLE, Line, Role, Span, frame
from inferscope.text.panels.kv import kv_share
from inferscope.text.panels.objectives import burn_rate
from inferscope.text.panels.phases import phase_rows
from inferscope.text.panels.ranks import busy_skew
from inferscope.text.plots import (
    UNKNOWN,
    fit,
    fit_name,
    milliseconds,
    per_second,
    plain,
    share,
    sparkline,
    split_bar,
)

FACTOR = 2.0
ENOUGH = 20
_LEAST_WAITING = 2.0
_WIDE = 110
_PHASES = 18


class Outlier(NamedTuple):
    """Figure by which an engine stands out."""

    engine_id: str
    figure: str
    """Name of the figure, as in the heading."""
    ratio: float
    """Its value over the median of the others', or the inverse where less is worse."""


def worst_burn(view: EngineView) -> float | None:
    """Return the highest burn rate over 5 minutes; None without a judged request."""
    levels = view.levels
    if levels is None:
        return None
    rates = [
        burn_rate(one.objective, one.windows[0].num_good, one.windows[0].num_bad)
        for one in levels.objectives
    ]
    return max((rate for rate in rates if rate is not None), default=None)


def outliers(views: Sequence[EngineView]) -> list[Outlier]:
    """Return the figures by which engines stand out, the largest ratio first."""
    found = []
    for view in views:
        others = [
            each
            for each in views
            if each.model == view.model and each is not view and not each.has_ended
        ]
        if view.has_ended:
            continue
        for figure, value_of, is_low in _FIGURES:
            value = value_of(view)
            known = [each for each in map(value_of, others) if each is not None]
            if value is None or not known:
                continue
            usual = median(known)
            if figure == "WAIT":
                usual, value = max(usual, _LEAST_WAITING), float(value)
            high, low = (usual, value) if is_low else (value, usual)
            if low > 0 and high > FACTOR * low:
                found.append(Outlier(view.engine_id, figure, high / low))
    return sorted(found, key=lambda each: -each.ratio)


def _latency(name: str, quantile: str) -> Callable[[EngineView], float | None]:
    def value(view: EngineView) -> float | None:
        latency = getattr(view, name)
        known: int | None = getattr(latency, quantile)
        return known if latency.num >= ENOUGH else None

    return value


_FIGURES: tuple[tuple[str, Callable[[EngineView], float | None], bool], ...] = (
    ("TTFT p95", _latency("ttft", "p95_ns"), False),
    ("TBT p99", _latency("tbt", "p99_ns"), False),
    ("WAIT", lambda view: float(view.num_waiting), False),
    ("TOK/S", lambda view: view.decode_tok_s or None, True),
)


def outlier_sentence(snapshot: Snapshot) -> str:
    """Return which engine stands out most, by what; empty if none does."""
    found = outliers(snapshot.engines)
    if not found:
        return ""
    engine_id, figure, ratio = found[0]
    noun, is_low = {
        "WAIT": ("queue", False),
        "TOK/S": ("output rate", True),
    }.get(figure, (figure, False))
    how = f"1/{ratio:.1f} of" if is_low else f"{ratio:.1f}x"
    return f"{engine_id} stands out: its {noun} is {how} the median of the others of its model."


def fleet(snapshot: Snapshot, width: int, height: int, *, cursor: int) -> list[Line]:
    """Return the table of engines; `cursor` is the index of the selected one."""
    views, inner = snapshot.engines, width - 4
    title = "Fleet"
    if not views:
        return frame(title, [(("waiting for an engine", "dim"),)], width, height)
    out = {(each.engine_id, each.figure) for each in outliers(views)}
    is_wide = inner >= _WIDE - 4
    lines: list[Line] = [_head(inner, is_wide)]
    rows = max(height - 3, 1)
    has_trends = len(views) * 2 <= rows
    start = max(0, min(cursor - rows // 2, len(views) - rows))
    for at, view in enumerate(views[start : start + rows], start):
        lines.append(_row(view, out, inner, is_wide, is_selected=at == cursor))
        if has_trends:
            lines.append(_trends(view, inner))
    alive = sum(view.is_alive and not view.has_ended for view in views)
    total = sum(view.decode_tok_s or 0.0 for view in views)
    note = f"{alive} of {len(views)} engines alive, {per_second(total)} decode tokens/s"
    foot = f"{TRIANGLE} over {FACTOR:g}x the median of the others of its model"
    return frame(title, lines, width, height, note=note, foot=foot if is_wide else "")


def _trends(view: EngineView, inner: int) -> Line:
    """Return output rate, queue and KV of an engine over the window."""
    series = view.series
    charts: tuple[tuple[str, Sequence[float | None], float | None, Role], ...] = (
        ("tok/s ", series.decode_tok_s, None, "decode"),
        ("  wait ", series.waiting, None, "bar"),
        ("  KV ", series.kv_share, 1.0, "bar"),
    )
    room = max((inner - 4 - sum(len(name) for name, _, _, _ in charts)) // len(charts), 0)
    spans: list[Span] = [("    ", "body")]
    for name, values, top, role in charts:
        spans += [(name, "dim"), (sparkline(values, room, top=top), role)]
    return tuple(spans)


def _names(inner: int, is_wide: bool) -> tuple[int, int]:
    """Return the widths of the engine's and of the model's name."""
    if not is_wide:
        return max(inner - 57, 8), 0
    room = inner - _PHASES - 75
    return room * 6 // 10, room - room * 6 // 10


def _head(inner: int, is_wide: bool) -> Line:
    names, models = _names(inner, is_wide)
    text = f"{'  ENGINE':<{names}}"
    if is_wide:
        text += f"{'MODEL':<{models}}{'PHASES':<{_PHASES}}"
    text += f"{'RUN':>4}{'WAIT':>7}{'TTFT p95 ms':>12}{'TBT p99 ms':>11}"
    text += f"{'KV':>7}{'TOK/S':>9}{'BURN':>7}"
    if is_wide:
        text += f"{'SKEW':>8}  {'BOUND BY':<8}"
    return ((text, "dim"),)


def _row(
    view: EngineView,
    out: set[tuple[str, str]],
    inner: int,
    is_wide: bool,
    *,
    is_selected: bool,
) -> Line:
    names, models = _names(inner, is_wide)

    def cell(text: str, cells: int, figure: str = "", *, alarms: bool = False) -> Span:
        is_out = (view.engine_id, figure) in out
        role: Role = "alarm" if is_out or alarms else "body"
        return (fit(f"{TRIANGLE if is_out else ''}{text}", cells, align="right"), role)

    state: Span = (f"{TRIANGLE} ", "alarm") if not view.is_alive else ("  ", "body")
    if view.has_ended:
        state = ("○ ", "dim")
    if is_selected:
        state = ("▸ ", "key")
    spans: list[Span] = [
        state,
        (fit_name(plain(view.engine_id), names - 3) + " ", "strong" if is_selected else "body"),
    ]
    if is_wide:
        spans.append((fit_name(plain(view.model) or UNKNOWN, models - 1) + " ", "dim"))
        rows = {row.name: row.tenths / 1000 for row in phase_rows(view)}
        prefill, decode = split_bar((rows["prefill"], rows["decode"]), _PHASES - 2)
        rest = " " * (_PHASES - 2 - len(prefill) - len(decode))
        spans += [(prefill, "prefill"), (decode, "decode"), (rest, "gauge"), ("  ", "body")]
    used, burn, skew = kv_share(view), worst_burn(view), busy_skew(view)
    spans += [
        cell(str(view.num_running), 4),
        cell(str(view.num_waiting), 7, "WAIT"),
        cell(milliseconds(view.ttft.p95_ns, width=7), 12, "TTFT p95"),
        cell(milliseconds(view.tbt.p99_ns, width=7), 11, "TBT p99"),
        cell(share(used), 7, alarms=(used or 0.0) > 0.95),
        cell(per_second(view.decode_tok_s), 9, "TOK/S"),
        cell(UNKNOWN if burn is None else f"{burn:.1f}x", 7, alarms=(burn or 0.0) > 1.0),
    ]
    if is_wide:
        bound = view.binding if view.num_waiting else ""
        spans += [cell(share(skew), 8), (f"  {bound or UNKNOWN:<8}", "body" if bound else "dim")]
    return tuple(spans)
