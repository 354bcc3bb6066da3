"""Table of recent steps, the slices of one step, and a step's time as a sum."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from heapq import nlargest

from inferscope.fold import EngineView, StepView
from inferscope.text.lines import Line, Role, Span, fit_line, frame, rule
from inferscope.text.panels.lanes import KIND_MARKS
from inferscope.text.plots import (
    UNKNOWN,
    closed,
    count,
    fit,
    fit_name,
    milliseconds,
    per_second,
    plain,
    share,
)

SORTS: dict[str, Callable[[StepView], float]] = {
    "time": lambda step: step.start_ns,
    "device ms": lambda step: step.measured_ns,
    "gap ms": lambda step: step.host_gap_ns,
    "slowness": lambda step: -1.0 if step.residual is None else step.residual,
}
"""Orders of the table, largest first."""
_FRAMED = 100
_SLOW = 0.5
"""Excess over the modelled time from which a step is noted as slow."""
_MOST_NAMED = 2


@dataclass(frozen=True)
class _Column:
    heading: str
    width: int
    text: Callable[[StepView], str]
    is_left: bool = False
    least: int = 0
    """Width of the screen from which it is shown."""


def client_names(view: EngineView) -> dict[str, str]:
    """Return the clients' names of the requests, by ID, where they gave one."""
    return {row.request_id: row.external_id for row in view.requests if row.external_id}


def step_named(
    view: EngineView, text: str, names: Mapping[str, str], *, rank: int = 0
) -> StepView | None:
    """Return the step that a text names, as the table prints it; None if it is not kept.

    Args:
        view: engine with recent steps.
        text: number of a step, `rank.number` with replicas, or the beginning of a request's name
            or ID, for its newest step.
        names: names of requests by the engine's IDs.
        rank: replica to prefer for a number without one.
    """
    for step in sorted(view.steps, key=lambda step: step.dp_rank != rank):
        if text in (str(step.step), _number(step)):
            return step
    for step in reversed(view.steps):
        for request_id in step.request_ids:
            if request_id.startswith(text) or names.get(request_id, "").startswith(text):
                return step
    return None


def order_steps(steps: Sequence[StepView], sort: str, most: int) -> list[StepView]:
    """Return the first steps by an order, at most `most`."""
    if sort == "time":
        return list(reversed(steps[-most:])) if most else []
    return nlargest(most, steps, key=SORTS[sort])


def step_table(
    view: EngineView,
    width: int,
    height: int,
    *,
    shown: Sequence[StepView],
    selected: StepView | None,
    sort: str,
    names: Mapping[str, str],
) -> list[Line]:
    """Return the table of steps.

    Args:
        view: engine of the steps.
        width: width of every line.
        height: number of lines.
        shown: steps to list, in order.
        selected: step under the cursor.
        sort: name of the order.
        names: names of requests by the engine's ids.
    """
    columns = _columns(view, shown, width, names)
    heads = [
        fit(column.heading, column.width, align="left" if column.is_left else "right")
        for column in columns
    ]
    rows: list[Line] = [((" ".join(heads), "dim"),)]
    for step in shown:
        mark, role = KIND_MARKS.get(step.kind, ("·", "dim"))
        spans: list[Span] = []
        for column in columns:
            text = fit(column.text(step), column.width, align="left" if column.is_left else "right")
            is_kind = column.heading == "KIND"
            spans.append(
                (
                    f"{mark} {text[2:]} " if is_kind else f"{text} ",
                    role if is_kind else _tone(column, step),
                )
            )
        rows.append(tuple(spans))
    num = len(view.steps)
    kept_ns = view.steps[-1].end_ns - view.steps[0].start_ns if num else 0
    note = f"sort: {sort} ▼"
    title = f"Steps: the last {num}, {kept_ns / 1e9:.1f} s" if num else "Steps"
    return _framed(title, rows, width, height, note=note, cursor=_index(shown, selected))


def slice_table(
    step: StepView,
    width: int,
    height: int,
    *,
    order: Sequence[int],
    cursor: int,
    names: Mapping[str, str],
) -> list[Line]:
    """Return the slices of one step: who was in it, and with what share of its time.

    Args:
        step: step to list.
        width: width of every line.
        height: number of lines.
        order: indices of the slices to list.
        cursor: position in `order` of the one under the cursor.
        names: names of requests by the engine's ids.
    """
    room = max(width - (4 if width >= _FRAMED else 1), 20)
    name = min(max(room - 52, 12), 40)
    head = f"{'REQUEST':<{name}} {'PHASE':<9} {'TOKENS':>7} {'CONTEXT':>8}"
    head += f" {'SHARE ms':>9} {'OF STEP':>8}"
    rows: list[Line] = [((fit(head, room), "dim"),)]
    whole_ns = max(step.device_ns, 1)
    for at in order:
        share_ns = sum(of[at] for of in step.shares_ns)
        phase = step.phases[at]
        mark, role = KIND_MARKS.get("prefill" if phase == "prefill" else "decode", ("·", "dim"))
        who = plain(names.get(step.request_ids[at], step.request_ids[at]))
        rows.append(
            (
                (f"{fit_name(who, name)} ", "body"),
                (f"{mark} {phase:<7} ", role),
                (f"{step.tokens[at]:>7} {step.contexts[at]:>8} ", "body"),
                (f"{milliseconds(share_ns):>9} {share(share_ns / whole_ns):>8}", "strong"),
            )
        )
    num = step.num_requests
    title = f"Step {step.step}: {num} request{'s' if num != 1 else ''}, {step.kind}"
    return _framed(title, rows, width, height, note="Enter request  Esc steps", cursor=cursor)


def decomposition(step: StepView, names: Mapping[str, str], width: int) -> str:
    """Return a step's measured time as a sum; the printed parts add up to the printed time."""
    rank = step.ranks[0]
    where = "" if len(step.ranks) == 1 else f" on rank {rank.rank}"
    unit_ns, digits = (100_000, 1) if rank.measured_ns >= 10_000_000 else (10_000, 2)
    whole = round(rank.measured_ns / unit_ns)
    for most_named in range(_MOST_NAMED, -1, -1):
        parts = _parts(step, names, most_named)
        rounded = closed([part_ns for _, part_ns in parts], whole)
        terms = [
            f"{name} {number / 10**digits:.{digits}f}"
            for (name, _), number in zip(parts, rounded, strict=True)
        ]
        total = f"{whole / 10**digits:.{digits}f}"
        text = f"step {step.step}{where}: {total} ms = {' + '.join(terms) or UNKNOWN}"
        if len(text) <= width:
            break
    return text


def _parts(step: StepView, names: Mapping[str, str], most_named: int) -> list[tuple[str, int]]:
    """Return the parts of the first rank's time, the largest prefills by name."""
    rank = step.ranks[0]
    shares_ns = step.shares_ns[0] if step.shares_ns else ()
    prefills = sorted(
        (
            (share_ns, plain(names.get(request_id, request_id)))
            for request_id, phase, share_ns in zip(
                step.request_ids, step.phases, shares_ns, strict=True
            )
            if phase == "prefill"
        ),
        reverse=True,
    )
    named = prefills[:most_named]
    rest_ns = rank.prefill_ns - sum(share_ns for share_ns, _ in named)
    parts = [(f"prefill {name}", share_ns) for share_ns, name in named]
    num_rest = len(prefills) - len(named)
    if num_rest or (rest_ns and not prefills):
        name = "more prefill" if named else "prefill"
        parts.append((f"{name} ×{num_rest}" if num_rest > 1 else name, rest_ns))
    decodes = [at for at, phase in enumerate(step.phases) if phase != "prefill"]
    if len(decodes) == 1 and most_named:
        request_id = step.request_ids[decodes[0]]
        parts.append((f"decode {plain(names.get(request_id, request_id))}", rank.decode_ns))
    elif decodes or rank.decode_ns:
        parts.append((f"decode ×{len(decodes)}" if len(decodes) > 1 else "decode", rank.decode_ns))
    parts += [("padding", rank.padding_ns)] if rank.padding_ns else []
    parts += [("unattributed", rank.unattributed_ns)] if rank.unattributed_ns else []
    return parts


def _columns(
    view: EngineView, shown: Sequence[StepView], width: int, names: Mapping[str, str]
) -> list[_Column]:
    is_tera = any(_flops_s(step) >= 1e12 for step in shown)
    flops, flops_unit = (1e12, "TFLOP/s") if is_tera else (1e9, "GFLOP/s")
    is_tera = any(_bytes_s(step) >= 1e12 for step in shown)
    moved, moved_unit = (1e12, "TB/s") if is_tera else (1e9, "GB/s")
    has_ranks = any(len(step.ranks) > 1 for step in shown)
    has_replicas = any(step.dp_rank for step in view.steps[-64:])
    columns = [
        _Column("STEP", 8, _number if has_replicas else lambda step: str(step.step)),
        _Column("KIND", 9, lambda step: f"  {step.kind}", is_left=True),
        _Column("SEQS", 4, lambda step: str(step.num_requests) if step.request_ids else UNKNOWN),
        _Column("PREFILL", 7, lambda step: count(step.prefill_tokens)),
        _Column("DECODE", 6, lambda step: count(step.decode_tokens)),
        _Column("DEVICE ms", 9, lambda step: _ms(step.measured_ns)),
        _Column("GAP ms", 6, lambda step: _ms(step.host_gap_ns)),
        _Column("SKEW ms", 7, lambda step: _ms(skew_ns(step)), least=0 if has_ranks else 10_000),
        _Column(flops_unit, 7, lambda step: _rate(_flops_s(step), flops)),
        _Column(moved_unit, 5, lambda step: _rate(_bytes_s(step), moved), least=76),
        _Column("KV Δ", 5, _added, least=90),
        _Column("ATTRIB", 6, _attributed, least=_FRAMED),
    ]
    columns = [column for column in columns if width >= column.least]
    room = width - (4 if width >= _FRAMED else 1) - sum(column.width + 1 for column in columns) - 1
    if room >= 8:
        columns.append(_Column("NOTE", room, lambda step: note_of(step, names), is_left=True))
    return columns


def note_of(step: StepView, names: Mapping[str, str]) -> str:
    """Return what stands out in a step, in a few words."""
    notes: list[str] = []
    if step.is_cold:
        notes.append("cold")
    if step.num_preempted:
        notes.append(f"preempted {step.num_preempted}")
    if step.residual is not None and step.residual > _SLOW and not step.is_cold:
        notes.append(f"{1 + step.residual:.1f}× modelled")
    if step.binding in ("slots", "blocks") and step.num_waiting:
        notes.append(f"{step.num_waiting} wait for {step.binding}")
    chunks = [at for at, phase in enumerate(step.phases) if phase == "prefill"]
    if chunks:
        largest = max(chunks, key=lambda at: step.tokens[at])
        who = plain(names.get(step.request_ids[largest], step.request_ids[largest]))
        context = step.contexts[largest]
        notes.append(f"{who} +{step.tokens[largest]}" + (f" at {context}" if context else ""))
    return ", ".join(notes)


def skew_ns(step: StepView) -> int:
    """Return how much later the last rank ended than the first."""
    return max(rank.end_ns for rank in step.ranks) - min(rank.end_ns for rank in step.ranks)


def _tone(column: _Column, step: StepView) -> Role:
    if column.heading == "NOTE":
        return "alarm" if step.num_preempted else "dim"
    if column.heading == "DEVICE ms":
        return "strong"
    return "body"


def _number(step: StepView) -> str:
    return f"{step.dp_rank}.{step.step}"


def _ms(value_ns: int) -> str:
    return f"{value_ns / 1e6:.2f}" if value_ns < 9_995_000 else milliseconds(value_ns, width=7)


def _rate(value: float, unit: float) -> str:
    return per_second(value / unit) if value else UNKNOWN


def _flops_s(step: StepView) -> float:
    """Return the modelled FLOPs per second of one of its devices; 0 where they are not known."""
    return (step.flops or 0) * 1e9 / step.device_ns if step.device_ns else 0.0


def _bytes_s(step: StepView) -> float:
    moved = (step.read_bytes or 0) + (step.write_bytes or 0)
    return moved * 1e9 / step.device_ns if step.device_ns else 0.0


def _added(step: StepView) -> str:
    return (
        UNKNOWN
        if step.blocks_added is None
        else f"{step.blocks_added:+d}"
        if step.blocks_added
        else "0"
    )


def _attributed(step: StepView) -> str:
    unattributed_ns = sum(rank.unattributed_ns for rank in step.ranks)
    return share(1 - unattributed_ns / step.device_ns) if step.device_ns else UNKNOWN


def _index(shown: Sequence[StepView], selected: StepView | None) -> int | None:
    for at, step in enumerate(shown):
        if step is selected:
            return at
    return None


def _framed(
    title: str, rows: list[Line], width: int, height: int, *, note: str, cursor: int | None
) -> list[Line]:
    if width >= _FRAMED:
        lines = frame(title, rows, width, height, note=note)
        first = 2
    else:
        lines = [rule(title, width, note=note)]
        lines += [fit_line(((" ", "body"), *row), width) for row in rows]
        lines += [fit_line((), width)] * (height - len(lines))
        first = 2
    if cursor is not None and first + cursor < len(lines) - (width >= _FRAMED):
        text, role = lines[first + cursor][0]
        lines[first + cursor] = (
            ("", "cursor"),
            (text[:-1] + "▸", role),
            *lines[first + cursor][1:],
        )
    return lines[:height]
