"""The screen as plain text, once: for `attach --once`, and if stdout is not a terminal."""

from __future__ import annotations

from collections.abc import Iterable
from textwrap import wrap

from inferscope.fold import EngineView, Snapshot
from inferscope.text.columns import columns_for, heading_line, order_rows, row_line
from inferscope.text.header_line import caveats, format_probe
from inferscope.text.labels import format_listed, format_window, has_gpu, view_verdict
from inferscope.text.lines import TRIANGLE, Line, text_of
from inferscope.text.panels import largest_problem
from inferscope.text.panels.causes import cause_rows
from inferscope.text.panels.kv import kv_share
from inferscope.text.panels.levels import level_lines
from inferscope.text.panels.peaks import peak_note
from inferscope.text.panels.phases import phase_lines
from inferscope.text.plots import (
    UNKNOWN,
    bar,
    clock,
    count,
    fit,
    milliseconds,
    moment,
    per_second,
    plain,
    share,
    to_ascii,
)
from inferscope.text.scene import Scene

_NUM_CAUSES = 8
_NUM_REQUESTS = 20
_SORT = "p99"


def once_text(snapshot: Snapshot, *, width: int = 100, ascii: bool = False) -> str:
    """Return a snapshot as text: engine, phases, service levels, causes, requests.

    Args:
        snapshot: Snapshot to format.
        width: Maximum line width.
        ascii: Use ASCII characters only.
    """
    lines: list[str] = []
    for engine_idx in range(len(snapshot.engines)):
        scene = Scene(snapshot=snapshot, engine_idx=engine_idx)
        if lines:
            lines.append("")
        lines += _engine(scene, snapshot.engines[engine_idx], width)
    if not lines:
        lines.append(f"InferScope  {plain(snapshot.source)}: no records from an engine yet")
    lines += [f"note: {plain(note)}" for note in snapshot.notes]
    cut = [(line if len(line) <= width else fit(line, width)).rstrip() for line in lines]
    text = "\n".join(cut) + "\n"
    return to_ascii(text) if ascii else text


def _engine(scene: Scene, view: EngineView, width: int) -> list[str]:
    word = "GPU time by phase" if has_gpu(view) else "Device time by phase"
    window = format_window(view.window_ns)
    lines = [
        *_header(scene, view),
        "",
        f"{word} ({window}, sums to 100%)",
        *_texts(phase_lines(view, min(width, 78) - 2)),
        "",
        f"Service levels ({window}, {view.ttft.num} first tokens)",
        *_texts(level_lines(view, 42)),
        "",
        f"Where latency went ({view.e2e.num} requests finished in {window})",
        *_causes(view, min(width, 78) - 2),
        "",
        *_requests(view, width),
    ]
    problem = largest_problem(view)
    return [*lines, "", *wrap(f"▲ {plain(problem)}", width)] if problem else lines


def _header(scene: Scene, view: EngineView) -> list[str]:
    snapshot = scene.snapshot
    mode = snapshot.mode if snapshot is not None else UNKNOWN
    real_ns = snapshot.real_ns if snapshot is not None else 0
    pids = ",".join(str(pid) for pid in view.pids) or UNKNOWN
    head = [
        "InferScope",
        plain(view.model) or UNKNOWN,
        plain(f"{view.engine} {view.version}".strip()),
        f"pid {pids}",
        plain(view.device) or UNKNOWN,
        mode,
        moment(real_ns) if mode in ("ended", "replay") else clock(real_ns),
    ]
    if view.is_synthetic:
        head.append("synthetic")
    notes = caveats(scene)
    lines = ["  ".join(head)]
    if notes:
        lines.append(f"▲ {', '.join(notes)}")
    lines.append(
        f"running {view.num_running}  waiting {view.num_waiting}  held {view.num_held}"
        f"  preempted {count(view.num_preemptions)}  finished {count(view.num_finished)}"
        f" ({per_second(view.finished_s)}/s)  KV {share(kv_share(view))}"
        f"  prefix hit {share(view.cached_share)}"
    )
    lines.append(
        f"prefill {per_second(view.prefill_tok_s)} tok/s  decode"
        f" {per_second(view.decode_tok_s)} tok/s  step p50 {milliseconds(view.step.p50_ns)} ms"
        f"  host gap p50 {milliseconds(view.host_gap.p50_ns)} ms"
        f"  probe {format_probe(view.health)}"
    )
    peaks, reason = peak_note(view), view.counters.reason
    if peaks or reason:
        lines.append(peaks or f"no MFU and MBU: {plain(reason)}")
    return lines


def _causes(view: EngineView, width: int) -> list[str]:
    rows = cause_rows(view.ledger_ns, _NUM_CAUSES)
    if not rows:
        missing = view.ledger_missing
        return [f"  - ({missing}: requests have no ledger)" if missing else "  none yet"]
    largest = max(tenths for _, _, tenths in rows)
    num = max(view.e2e.num, 1)
    verdict = view_verdict(view)
    return [
        *([f"  {TRIANGLE} {verdict}"] if verdict else ()),
        *(
            f"  {cause:21}{share(tenths / 1000):>7}{milliseconds(cause_ns / num):>10} ms mean  "
            + bar(tenths / largest, width - 49)
            for cause, cause_ns, tenths in rows
        ),
    ]


def _requests(view: EngineView, width: int) -> list[str]:
    if not view.requests:
        return [f"Requests: {format_listed(view)}" if view.num_finished else "Requests: none yet"]
    columns = columns_for(width)
    by_p99 = next(column for column in columns if column.name == _SORT)
    order = order_rows(view.requests, range(len(view.requests)), by_p99, is_reversed=True)
    head = heading_line(columns, width - 2, unit="ms", sort=_SORT, is_reversed=True)
    rows = [
        row_line(view.requests[i], columns, width - 2, unit="ms") for i in order[:_NUM_REQUESTS]
    ]
    lines = [f"Requests ({format_listed(view)}; by TBT p99)", *_texts([head, *rows])]
    num_more = len(order) - _NUM_REQUESTS
    return [*lines, f"  … {num_more} more"] if num_more > 0 else lines


def _texts(lines: Iterable[Line]) -> list[str]:
    return [f"  {text_of(line)}" for line in lines]
