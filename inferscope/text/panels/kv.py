"""Current state of the engine: running and waiting requests, KV cache, binding limit."""

from __future__ import annotations

from inferscope.cost import TIME_ONLY
from inferscope.fold import EngineView, ExpertsView
from inferscope.text.labels import BINDINGS, more_or_less
from inferscope.text.lines import Line, Role, frame
from inferscope.text.panels.peaks import peak_note
from inferscope.text.plots import UNKNOWN, bar, count, fit, per_second, share, split_bar

_HEAD = 36
_KV_FULL = 0.95


def kv_share(view: EngineView) -> float | None:
    """Return the used share of KV blocks; None if the engine does not report their number."""
    return view.blocks_used / view.blocks_total if view.blocks_total else None


def engine_and_kv(view: EngineView, width: int, height: int) -> list[Line]:
    """Return the scheduler's numbers, the batch and KV bars, and the cost model's residual."""
    inner = width - 4
    batch = view.num_running / view.max_running if view.max_running else None
    used = kv_share(view)
    tokens = view.blocks_total * view.block_tokens
    cached = view.blocks_cached / view.blocks_total if view.blocks_total else None
    batch_text = f"{view.num_running} / {view.max_running or UNKNOWN} sequences"
    kv_text = f"{share(used)} of {count(tokens or None)} tokens"
    lines: list[Line] = [
        _counts(view),
        _gauge("batch", batch_text, batch, inner),
        _gauge("KV", kv_text, used, inner, cached=cached, alarms=(used or 0) > _KV_FULL),
        _gauge(
            "prefix", f"{share(view.cached_share)} of prompt tokens", view.cached_share, inner
        ),
        _gauge("mixed", f"{share(view.mixed_share)} of steps", view.mixed_share, inner),
        _labelled("bound by", f"{view.binding or UNKNOWN}: {BINDINGS.get(view.binding, '?')}"
              if view.binding else UNKNOWN, view.binding not in ("", "none")),
        _labelled("model", _residual(view), False),
    ]  # fmt: skip
    if view.experts is not None:
        lines.append(_labelled("experts", expert_load(view.experts), False))
    note, foot = f"{view.num_finished} finished", peak_note(view)
    return frame("Engine / KV", lines, width, height, note=note, foot=foot)


def expert_load(experts: ExpertsView) -> str:
    """Return the load of a mixture's busiest experts, beside what an even router would give."""
    mean = experts.mean_tokens
    return (
        f"busiest {experts.busiest_tokens / mean:.1f}x mean, at random "
        f"{experts.even_tokens / mean:.1f}x; layer {experts.layer}: expert {experts.expert} "
        f"{share(experts.expert_share)}"
    )


def _counts(view: EngineView) -> Line:
    counts = (
        ("running", str(view.num_running), False),
        ("waiting", str(view.num_waiting), False),
        ("held", str(view.num_held), view.num_held > 0),
        ("preempted", count(view.num_preemptions), False),
        ("done", f"{per_second(view.finished_s)}/s", False),
    )
    spans: list[tuple[str, Role]] = []
    for name, value, alarms in counts:
        spans.append((f"{name} ", "dim"))
        spans.append((value, "alarm" if alarms else "strong"))
        spans.append(("  ", "body"))
    return tuple(spans[:-1])


def _gauge(
    name: str,
    text: str,
    value: float | None,
    width: int,
    *,
    cached: float | None = None,
    alarms: bool = False,
) -> Line:
    """Return a bar on its track; cached, evictable blocks follow the used ones."""
    head: Line = ((f"{name:9}", "dim"), (fit(text, _HEAD - 9), "alarm" if alarms else "body"))
    if value is None:
        return head
    room = width - _HEAD
    if not cached:
        return (*head, (bar(value, room), "gauge"))
    used_cells, cached_cells = split_bar((value, cached), room)
    rest = room - len(used_cells) - len(cached_cells)
    return (
        *head,
        (used_cells, "gauge"),
        (cached_cells.replace("█", "▒"), "gauge"),
        (" " * rest, "gauge"),
    )


def _labelled(name: str, text: str, alarms: bool) -> Line:
    return ((f"{name:9}", "dim"), (text, "alarm" if alarms else "body"))


def _residual(view: EngineView) -> str:
    counts = "" if view.is_counted else f", {TIME_ONLY}"
    if view.model_residual is None:
        return f"{UNKNOWN}" + (f" ({view.model_source}{counts})" if view.model_source else "")
    source = f", from {view.model_source}" if view.model_source else ""
    return f"last steps {more_or_less(view.model_residual)} than modelled{source}{counts}"
