"""One request in full: its ledger, its resources and its identity."""

from __future__ import annotations

from typing import NamedTuple

from inferscope.cost import RESIDUAL_STEPS
from inferscope.fold import EngineView, RequestRow
from inferscope.text.labels import BAD_FINISHES, STATE_MARKS, view_verdict
from inferscope.text.lines import (
    TRIANGLE,
    Line,
    Role,
    fit_line,
    frame,
    join_columns,
    rule,
    width_of,
)
from inferscope.text.panels.gaps import LEAST_ROWS, gap_lines, gaps_note
from inferscope.text.panels.ledger import equation, in_lifecycle_order, waterfall
from inferscope.text.panels.waited import waited_for, waited_line
from inferscope.text.plots import (
    UNKNOWN,
    bar,
    clock,
    closed,
    count,
    duration,
    fit,
    milliseconds,
    plain,
    share,
)

_FRAMED = 100
_FOOT_HEIGHT = 7
_NUM_CAUSES = 25
_MOST_GAP_ROWS = 8
_FEW_CAUSES = 4
"""Maximum number of causes up to the first token if the gaps need the space."""


def breadcrumb(row: RequestRow, width: int, *, arrived_real_ns: int, is_gone: bool) -> Line:
    """Return the line that identifies the request and its state."""
    mark, role = STATE_MARKS.get(row.state, ("·", "body"))
    state = f"{mark} {row.state}".strip()
    if row.finish:
        state = f"{state}: {row.finish}"
        role = "alarm" if row.finish in BAD_FINISHES else "strong"
    spans: list[tuple[str, Role]] = [
        (" Requests ▸ ", "dim"),
        (plain(row.external_id or row.request_id), "strong"),
        (f"   {state}", role),
        (f"   prompt {count(row.prompt_tokens)} ({count(row.cached_tokens)} cached)", "body"),
        (f"   output {count(row.output_tokens)}", "body"),
    ]
    if row.joined_late:
        spans.append(("   ▲ joined late", "alarm"))
    if is_gone:
        spans.append(("   left the screen's window", "dim"))
    elif arrived_real_ns:
        millis = arrived_real_ns // 1_000_000 % 1000
        arrived = f"   arrived {clock(arrived_real_ns)}.{millis:03d}"
        if width_of(tuple(spans)) + len(arrived) <= width:
            spans.append((arrived, "dim"))
    return fit_line(tuple(spans), width)


class _Rows(NamedTuple):
    """Number of rows of each part; 0 leaves it out."""

    first: int
    whole: int
    gaps: int


def request_detail(
    row: RequestRow,
    view: EngineView,
    width: int,
    height: int,
    *,
    chart: bool | None = None,
    blame_idx: int = 0,
) -> list[Line]:
    """Return the ledger to the first token, the whole ledger, gaps, resources and identity.

    Where the request waited for others, these are listed as well.

    Args:
        row: the request.
        view: its engine.
        width: width of every line.
        height: number of lines.
        chart: whether to draw the gaps. True draws them even in place of the first ledger; None
            only if the ledgers are hardly shortened.
        blame_idx: index of the selected one of the requests that it waited for.
    """
    verdict = "" if row.ledger_missing else view_verdict(view)
    if verdict:
        head: Line = (
            (f" {TRIANGLE} ", "alarm"),
            (f"{verdict}, over the engine's last {RESIDUAL_STEPS} steps", "body"),
        )
        lines = _detail(row, view, width, height - 1, chart=chart, blame_idx=blame_idx)
        return [fit_line(head, width), *lines]
    return _detail(row, view, width, height, chart=chart, blame_idx=blame_idx)


def _detail(
    row: RequestRow,
    view: EngineView,
    width: int,
    height: int,
    *,
    chart: bool | None,
    blame_idx: int,
) -> list[Line]:
    is_framed = width >= _FRAMED
    foot = _FOOT_HEIGHT if is_framed else 2
    chrome = 4 if is_framed else 3
    rows = _share_out(row, height - foot, chrome, 2 if is_framed else 1, chart)
    inner = width - 4 if is_framed else width - 2
    is_over = row.state == "done"
    lines: list[Line] = []
    if rows.first:
        first_ns = row.ttft_ns
        if first_ns is None:
            first_ns = row.age_ns if not is_over else None
        first = waterfall(
            row.ttft_ledger_ns, inner, rows.first,
            total="first token", note=_first_note(row), missing=row.ledger_missing,
        )  # fmt: skip
        is_known = row.ttft_ns is not None
        equals = row.ledger_missing or equation(row.ttft_ledger_ns, first_ns, is_over=is_known)
        lines += _block("To the first token", first, width, chrome + rows.first, equals)
    gaps: list[Line] = []
    if rows.gaps:
        drawn = gap_lines(row, inner, rows.gaps)
        num_lines = rows.gaps + (2 if is_framed else 1)
        gaps = _block("Time between tokens", drawn, width, num_lines, gaps_note(row))
    whole = waterfall(
        row.ledger_ns, inner, rows.whole,
        total="last token" if is_over else "so far", note=_whole_note(row),
        missing=row.ledger_missing,
    )  # fmt: skip
    equals = row.ledger_missing or equation(row.ledger_ns, row.age_ns, is_over=is_over)
    lines += _block("Latency ledger", whole, width, height - foot - len(lines) - len(gaps), equals)
    lines += gaps
    if is_framed:
        waited = width * 42 // 100 if row.blame else 0
        half = (width - waited) // 2
        used = _resources(row, view, half - 4)
        how = _counted_how(row)
        resources = frame("Resources", used, half, foot, note="apportioned", foot=how)
        identity = frame("Identity", _identity(row, view), width - waited - half, foot)
        columns = [resources, identity]
        if waited:
            columns.append(waited_for(row, view, waited, foot, cursor=blame_idx))
        lines += join_columns(columns)
    else:
        lines += [waited_line(row, view), _summary(row)]
    return [fit_line(line, width) for line in lines[:height]]


def _share_out(
    row: RequestRow, height: int, chrome: int, rule_rows: int, chart: bool | None
) -> _Rows:
    """Distribute the rows: the whole ledger first, then that of the first token, then the gaps."""
    room = height - 2 * chrome
    num_whole = len(in_lifecycle_order(row.ledger_ns, _NUM_CAUSES)) or 1
    num_first = len(in_lifecycle_order(row.ttft_ledger_ns, _NUM_CAUSES)) or 1
    if row.gaps_ns and chart is not False:
        left = room - num_whole - rule_rows - LEAST_ROWS
        if left >= min(num_first, _FEW_CAUSES):
            num_first = min(num_first, left)
            left = room - num_whole - num_first - rule_rows
            return _Rows(num_first, num_whole, min(left, _MOST_GAP_ROWS))
        if chart:
            room += chrome
            num_whole = max(min(num_whole, room - rule_rows - LEAST_ROWS), 1)
            return _Rows(0, num_whole, min(room - num_whole - rule_rows, _MOST_GAP_ROWS))
    if num_first + num_whole > room:
        num_first = max(min(num_first, room - num_whole, room // 2), min(3, num_first))
        num_whole = max(min(num_whole, room - num_first), 1)
    return _Rows(num_first, num_whole, 0)


def _block(title: str, lines: list[Line], width: int, height: int, note: str) -> list[Line]:
    if width >= _FRAMED:
        return frame(title, lines, width, height, note=note)
    body: list[Line] = [(("  ", "body"), *line) for line in lines]
    block = [rule(title, width, note=note), *body]
    return (block + [()] * height)[:height]


def _first_note(row: RequestRow) -> str:
    return "TTFT" if row.ttft_ns is not None else "TTFT: not yet"


def _whole_note(row: RequestRow) -> str:
    tbt = f"TBT mean {milliseconds(row.tbt_mean_ns)}  p99 {milliseconds(row.tbt_p99_ns)} ms"
    return f"{'E2E' if row.state == 'done' else 'age'}   {tbt}"


_BEFORE_COUNTERS = 20
"""Number of columns of a phase's name and time."""


def _resources(row: RequestRow, view: EngineView, width: int) -> list[Line]:
    compute_ns = row.prefill_ns + row.decode_ns
    tenths = closed([row.prefill_ns, row.decode_ns], round(compute_ns / 100_000))
    largest = max(compute_ns, 1)
    lines: list[Line] = []
    rows: tuple[tuple[str, int, int, Role], ...] = (
        ("prefill", row.prefill_ns, tenths[0], "prefill"),
        ("decode", row.decode_ns, tenths[1], "decode"),
    )
    for name, value_ns, tenth, role in rows:
        counted = _counted(row, name, value_ns, width - _BEFORE_COUNTERS)
        lines.append(
            (
                (f"{name:10}", "dim"),
                (f"{tenth / 10:6.1f} ms ", "body"),
                (counted, "body"),
                (bar(value_ns / largest, width - _BEFORE_COUNTERS - len(counted)), role),
            )
        )
    blocks = UNKNOWN
    if row.prompt_tokens is not None and view.block_tokens:
        blocks = count(-(-(row.prompt_tokens + row.output_tokens) // view.block_tokens))
    held = "" if row.state == "done" else f"   KV about {blocks} blocks"
    interfered = UNKNOWN if row.interference_share is None else share(row.interference_share)
    lines += [
        (("compute   ", "dim"), (f"{sum(tenths) / 10:6.1f} ms", "strong")),
        (("interfered", "dim"), (f"{interfered:>6}", "body"), (" of its life", "dim")),
        (("preempted ", "dim"),
         (f"{row.num_preemptions:>6}", "alarm" if row.num_preemptions else "body"),
         (f" times{held}", "dim")),
    ]  # fmt: skip
    return lines


def _counted(row: RequestRow, phase: str, compute_ns: int, width: int) -> str:
    """Return as many sampled counters of one of its phases as fit; empty without samples."""
    counted = row.counters.prefill if phase == "prefill" else row.counters.decode
    parts = []
    if "sm_active_ns" in counted and compute_ns:
        parts.append(f"SM {share(counted['sm_active_ns'] / compute_ns)}")
    if "hbm_read_bytes" in counted and "hbm_write_bytes" in counted:
        num_gb = (counted["hbm_read_bytes"] + counted["hbm_write_bytes"]) / 1e9
        parts.append(f"HBM {num_gb:.{2 if num_gb < 10 else 1}f} GB")
    if "energy_uj" in counted:
        parts.append(f"{counted['energy_uj'] / 1e6:.2f} J")
    shown = ""
    for word in parts:
        if len(shown) + len(word) <= width:
            shown += f"{word}  "
    return shown[:width]


def _counted_how(row: RequestRow) -> str:
    """Return the methods of these counters."""
    labels = {"sm_active_ns": "SM", "hbm_read_bytes": "HBM", "energy_uj": "J"}
    by_method: dict[str, list[str]] = {}
    for name, label in labels.items():
        known = row.counters.provenance.get(name)
        if known is not None:
            by_method.setdefault(f"{known.method} ({known.source})", []).append(label)
    return ", ".join(f"{' and '.join(what)} {how}" for how, what in by_method.items())


def _identity(row: RequestRow, view: EngineView) -> list[Line]:
    timed = "device clock" if view.clock == "device" else "host clock, launch to outputs ready"
    return [
        (("request   ", "dim"), (plain(row.request_id), "body")),
        (("external  ", "dim"), (plain(row.external_id or UNKNOWN), "body")),
        (("engine    ", "dim"), (plain(view.engine_id), "body")),
        (("trace     ", "dim"), (plain(row.trace or UNKNOWN), "body"))
        if row.trace
        else (
            ("life      " if row.state == "done" else "age       ", "dim"),
            (duration(row.age_ns), "body"),
        ),
        (("timed by  ", "dim"), (timed, "body")),
    ]


def _summary(row: RequestRow) -> Line:
    compute_ns = row.prefill_ns + row.decode_ns
    tenths = closed([row.prefill_ns, row.decode_ns], round(compute_ns / 100_000))
    text = (
        f" compute {tenths[0] / 10:.1f} prefill + {tenths[1] / 10:.1f} decode"
        f" = {sum(tenths) / 10:.1f} ms   preempted {row.num_preemptions}"
    )
    return ((fit(text, len(text)), "body"),)
