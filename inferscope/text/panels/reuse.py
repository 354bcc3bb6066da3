"""Work saved and lost: prefix cache, preemption, speculation, experts, adapters, transfers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from inferscope.fold import CacheView, EngineView, KvTransfer
from inferscope.text.lines import Line, Role, frame
from inferscope.text.panels.kv import expert_load
from inferscope.text.plots import UNKNOWN, count, duration, fit, plain, share, sparkline

_HEAD = 11
_NUMBERS = 42
_BASE = "base model"
_MOST_CLASSES = 3


def reuse(view: EngineView, width: int, height: int) -> list[Line]:
    """Return a row each: over time where the window holds it by second, else as a sum."""
    inner, series = width - 4, view.series
    chart = max(inner - _HEAD - _NUMBERS, 0)
    cached, prompt = sum(series.cached_tokens), sum(series.prompt_tokens)
    lines: list[Line] = [
        _row(
            "prefix hit",
            ratios(series.cached_tokens, series.prompt_tokens),
            f"{share(cached / prompt if prompt else None)} of {count(prompt)} prompt tokens",
            chart,
            top=1.0,
        ),
        *_misses(view.cache, inner - _HEAD),
        _row(
            "preempted",
            [float(num) for num in series.preempted],
            f"{sum(series.preempted)} in this window, {count(view.num_preemptions)} in all",
            chart,
            role="alarm" if any(series.preempted) else "bar",
        ),
        *_drafts(view, chart),
        *_experts(view),
        _labelled("adapters", _adapters(view, inner - _HEAD)),
        _labelled("transfers", _transfers(view)),
    ]
    return frame("Reuse and loss", lines, width, height)


def ratios(parts: Sequence[int], wholes: Sequence[int]) -> list[float | None]:
    """Return the ratio of each second; None for one without a whole."""
    return [part / whole if whole else None for part, whole in zip(parts, wholes, strict=True)]


def _row(
    name: str,
    values: Sequence[float | None],
    text: str,
    chart: int,
    *,
    top: float | None = None,
    role: Role = "bar",
) -> Line:
    return (
        (fit(name, _HEAD), "dim"),
        (sparkline(values, chart, top=top), role),
        ("  ", "body"),
        (text, "body"),
    )


def _labelled(name: str, text: str) -> Line:
    return ((fit(name, _HEAD), "dim"), (text, "body" if text != UNKNOWN else "dim"))


def _misses(cache: CacheView | None, width: int) -> list[Line]:
    """Return why prompt tokens were not in the cache, the most first, and larger caches' hits.

    Of the larger caches, those are left out for which there is no room.
    """
    if cache is None:
        return []
    whole = sum(cache.tokens.values())
    missed = sorted(
        ((num, name) for name, num in cache.tokens.items() if name != "hit"), reverse=True
    )
    text = ", ".join(f"{name} {share(num / whole)}" for num, name in missed[:_MOST_CLASSES])
    points = () if cache.curve is None else cache.curve.points
    before = "; KV "
    for point in points:
        if point.size > 1 and point.hit_share is not None:
            more = f"{before}{point.size:g}× hits {share(point.hit_share)}"
            if len(text + more) > width:
                break
            text, before = text + more, ", "
    return [_labelled("misses", text)]


def _drafts(view: EngineView, chart: int) -> list[Line]:
    series = view.series
    proposed, accepted = sum(series.proposed_tokens), sum(series.accepted_tokens)
    if not proposed:
        return [_labelled("drafts", f"{UNKNOWN} no step verified a draft in this window")]
    rows = [row for row in view.requests if row.proposed_tokens]
    lines = [
        _row(
            "drafts",
            ratios(series.accepted_tokens, series.proposed_tokens),
            f"{share(accepted / proposed)} of {count(proposed)} proposed accepted",
            chart,
            top=1.0,
        )
    ]
    if rows:
        by_share = sorted(row.accepted_tokens / row.proposed_tokens for row in rows)
        middle = by_share[len(by_share) // 2]
        lines.append(
            _labelled(
                "",
                f"of {len(rows)} listed requests: {share(by_share[0])} worst, "
                f"{share(middle)} median, {share(by_share[-1])} best",
            )
        )
    return lines


def _experts(view: EngineView) -> list[Line]:
    """Return the load of a mixture's experts; nothing for a dense model."""
    return [] if view.experts is None else [_labelled("experts", expert_load(view.experts))]


def _adapters(view: EngineView, room: int) -> str:
    names = Counter(row.adapter or _BASE for row in view.requests)
    if set(names) <= {_BASE}:
        return f"{UNKNOWN} no listed request names one"
    parts = [f"{plain(name)} {num}" for name, num in names.most_common()]
    text = "  ".join(parts)
    return text if len(text) <= room else fit(text, room)


def _transfers(view: EngineView) -> str:
    moved: list[KvTransfer] = [each for row in view.requests for each in row.transfers]
    if not moved:
        return f"{UNKNOWN} none recorded"
    num_bytes = sum(each.num_bytes for each in moved)
    took_ns = sum(each.end_ns - each.start_ns for each in moved)
    rate = f", {num_bytes / took_ns:.2f} GB/s" if took_ns else ""
    peers = sorted({plain(each.peer) for each in moved})
    return (
        f"{len(moved)} from {', '.join(peers)}: {num_bytes / 1e9:.2f} GB{rate}, "
        f"mean {duration(took_ns / len(moved))}"
    )
