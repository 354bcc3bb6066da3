"""KV block pool over time: used, cached and free blocks.

Records hold the totals of the pool. The owners of single blocks are not recorded, so there is no
map of them.
"""

from __future__ import annotations

from inferscope.fold import EngineView
from inferscope.text.lines import Line, Role, frame
from inferscope.text.panels.throughput import time_axis
from inferscope.text.plots import EMPTY, UNKNOWN, count, fit, share, stacked

_SCALE = 7
_KINDS: tuple[tuple[str, str, Role], ...] = (("█", "used", "bar"), ("▒", "cached", "dim"))
_FULL = 0.95


def kv_pool(view: EngineView, width: int, height: int) -> list[Line]:
    """Return the pool as a stacked chart, with the present number of each kind below."""
    title, inner = "KV block pool", width - 4
    series, total = view.series, view.blocks_total
    if not total:
        why = "the engine reports no KV blocks"
        return frame(title, [((f"{UNKNOWN} {why}", "dim"),)], width, height)
    rows, chart = max(height - 4, 1), max(inner - _SCALE, 1)
    drawn = stacked(
        (series.blocks_used, series.blocks_cached),
        chart,
        rows,
        top=max((*series.blocks_total, total)),
        fills=[fill for fill, _, _ in _KINDS],
    )
    labels = {0: count(total), rows // 2: count(total // 2)} if rows >= 4 else {0: count(total)}
    lines: list[Line] = []
    for at, runs in enumerate(drawn):
        cells: list[tuple[str, Role]] = [
            (text, "body" if kind == EMPTY else _KINDS[kind][2]) for text, kind in runs
        ]
        lines.append(((fit(labels.get(at, ""), _SCALE - 1, align="right") + " ", "dim"), *cells))
    lines.append(((" " * _SCALE + time_axis(len(series.blocks_used), chart), "dim"),))
    lines.append(_legend(view, inner))
    unit = "token" if view.block_tokens == 1 else "tokens"
    peak = max(series.blocks_used, default=0)
    note = f"{total} blocks x {view.block_tokens or UNKNOWN} {unit}, peak {share(peak / total)}"
    foot = "totals: owners of single blocks are not recorded"
    return frame(title, lines, width, height, note=note, foot=foot)


def _legend(view: EngineView, width: int) -> Line:
    total = view.blocks_total
    numbers = (view.blocks_used, view.blocks_cached)
    free = max(total - sum(numbers), 0)
    spans: list[tuple[str, Role]] = []
    for (fill, name, role), num in zip(_KINDS, numbers, strict=True):
        is_full = name == "used" and num > _FULL * total
        spans += [
            (f"{fill} ", role),
            (f"{name} {num} ({share(num / total)})  ", "alarm" if is_full else "body"),
        ]
    spans.append((f"  free {free} ({share(free / total)})", "body"))
    return tuple(spans)
