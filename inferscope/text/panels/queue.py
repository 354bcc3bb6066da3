"""Queue and batch over time: waiting requests by the limit that kept them, and running ones."""

from __future__ import annotations

from inferscope.fold import EngineView
from inferscope.text.lines import Line, Role, Span, frame, width_of
from inferscope.text.panels.throughput import time_axis
from inferscope.text.plots import EMPTY, UNKNOWN, columns, fit, stacked

_SCALE = 7
_KINDS: tuple[tuple[str, str, str, Role], ...] = (
    ("blocks", "█", "blocks", "alarm"),
    ("slots", "▓", "slots", "bar"),
    ("budget", "▒", "budget", "bar"),
    ("none", "░", "next step", "dim"),
)
"""Constraint, fill, label and role."""


def queue_and_batch(view: EngineView, width: int, height: int) -> list[Line]:
    """Return waiting requests by constraint above running ones, over a common time axis."""
    series, inner = view.series, width - 4
    title = "Queue and batch"
    waiting = [series.waiting_by.get(kind, ()) for kind, _, _, _ in _KINDS]
    if not view.has_scheduler or not any(waiting):
        why = "the scheduler is not observed here"
        return frame(title, [((f"{UNKNOWN} {why}", "dim"),)], width, height)
    chart = max(inner - _SCALE, 1)
    rows = max(height - 5, 2)
    upper, lower = rows - rows // 2, rows // 2
    most = max(
        (sum(value or 0.0 for value in second) for second in zip(*waiting, strict=True)),
        default=0.0,
    )
    drawn = stacked(
        waiting, chart, upper, top=most or 1.0, fills=[fill for _, fill, _, _ in _KINDS]
    )
    lines: list[Line] = [_legend(waiting, inner)]
    for at, runs in enumerate(drawn):
        label = _scale_number(most) if at == 0 and most else ""
        cells: list[Span] = [
            (text, "body" if kind == EMPTY else _KINDS[kind][3]) for text, kind in runs
        ]
        lines.append((_scale(label), *cells))
    peak = max(series.running, default=0)
    limit = f" of {view.max_running}" if view.max_running else ""
    lines.append((("running ", "dim"), (f"{view.num_running}{limit}", "strong"),
                  (f"   peak {peak}   held {view.num_held}", "dim")))  # fmt: skip
    for at, row in enumerate(columns(running_by_second(view), chart, lower)):
        lines.append((_scale(str(peak) if at == 0 else ""), (row, "bar")))
    lines.append(((" " * _SCALE + time_axis(len(series.running), chart), "dim"),))
    binding = f"now bound by: {view.binding}" if view.binding else ""
    return frame(title, lines, width, height, note=binding)


def running_by_second(view: EngineView) -> list[int | None]:
    """Return the running requests by second; None for one without a plan or a step.

    The last plan of an idle engine is old: what ran then has ended.
    """
    series = view.series
    planned = next(iter(series.waiting_by.values()), ())
    busy = zip(series.prefill_share, series.decode_share, planned, strict=True)
    return [
        None if mean is None and not prefill + decode else running
        for running, (prefill, decode, mean) in zip(series.running, busy, strict=True)
    ]


def mean_waiting(values: tuple[float | None, ...]) -> float | None:
    """Return the mean number of waiting requests over the seconds with a plan."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _legend(waiting: list[tuple[float | None, ...]], width: int) -> Line:
    spans: list[Span] = []
    for (_, fill, label, role), values in zip(_KINDS, waiting, strict=True):
        gap = "" if label == _KINDS[-1][2] else "  "
        spans += [
            (f"{fill} ", role),
            (f"{label} {_mean_number(mean_waiting(values))}{gap}", "body"),
        ]
    head = "mean waiting for "
    is_short = len(head) + width_of(tuple(spans)) > width
    return (("waiting " if is_short else head, "dim"), *spans)


def _mean_number(mean: float | None) -> str:
    """Return a mean in four characters, or that it is below what these can show."""
    if mean is None:
        return UNKNOWN
    if 0 < mean < 0.005:
        return "<0.01"
    return f"{mean:.2f}" if mean < 9.995 else f"{mean:.1f}"


def _scale_number(most: float) -> str:
    """Return the top of the scale, which is far below 1 if requests wait rarely."""
    return f"{most:.1f}" if most >= 0.95 else f"{most:.3f}"


def _scale(label: str) -> Span:
    return (fit(label, _SCALE - 1, align="right") + " ", "dim")
