"""The screens as plain text, once: for `attach --once`, and if stdout is not a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from textwrap import wrap

from inferscope.fold import EngineView, Snapshot
from inferscope.text.bodies import (
    engine_body,
    fleet_body,
    roofline_body,
    slo_body,
    timeline_body,
)
from inferscope.text.columns import columns_for, heading_line, order_rows, row_line
from inferscope.text.header_line import caveats, format_probe
from inferscope.text.labels import format_listed, format_window, has_gpu, view_verdict
from inferscope.text.lines import TRIANGLE, Line, text_of
from inferscope.text.panels import (
    burn_sentence,
    client_names,
    decomposition,
    largest_problem,
    outlier_sentence,
    provenance,
    roof_of,
)
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
_BODY_HEIGHT = 36
"""Lines of a screen of 40 without its header, tabs, remark and footer."""
_TWO_COLUMNS = 100
"""Width from which panels stand side by side."""


def once_text(snapshot: Snapshot, *, screen: int = 1, width: int = 100, ascii: bool = False) -> str:
    """Return one of the screens as text, for each engine; the fleet for all of them.

    The overview has no charts, and the list of requests has no end at the screen's lower edge.

    Args:
        snapshot: Snapshot to format; the timeline and the roofline need its steps.
        screen: Number of the screen, as its key.
        width: Maximum line width.
        ascii: Use ASCII characters only.
    """
    lines: list[str] = []
    if screen == 0 and snapshot.engines:
        lines += _fleet(snapshot, width)
    else:
        for engine_idx, view in enumerate(snapshot.engines):
            scene = Scene(snapshot=snapshot, engine_idx=engine_idx)
            if lines:
                lines.append("")
            lines += _SCREENS[screen](scene, view, width)
    if not lines:
        lines.append(f"InferScope  {plain(snapshot.source)}: no records from an engine yet")
    lines += [f"note: {plain(note)}" for note in snapshot.notes]
    cut = [(line if len(line) <= width else fit(line, width)).rstrip() for line in lines]
    text = "\n".join(cut) + "\n"
    return to_ascii(text) if ascii else text


def _overview(scene: Scene, view: EngineView, width: int) -> list[str]:
    word = "GPU time by phase" if has_gpu(view) else "Device time by phase"
    window = format_window(view.window_ns)
    return [
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
        *_requests(view, width, most=_NUM_REQUESTS),
        *_remark(largest_problem(view), width),
    ]


def _all_requests(scene: Scene, view: EngineView, width: int) -> list[str]:
    rows = _requests(view, width, most=len(view.requests))
    return [*_header(scene, view), "", *rows, *_remark(largest_problem(view), width)]


def _timeline(scene: Scene, view: EngineView, width: int) -> list[str]:
    step = view.steps[-1] if view.steps else None
    text = decomposition(step, client_names(view), width) if step is not None else ""
    return _drawn(scene, view, timeline_body, width, note=text)


def _roofline(scene: Scene, view: EngineView, width: int) -> list[str]:
    text = provenance(view, roof_of(view)) if view.kinds else ""
    return _drawn(scene, view, roofline_body, width, note=text)


def _levels(scene: Scene, view: EngineView, width: int) -> list[str]:
    return [*_drawn(scene, view, slo_body, width), *_remark(burn_sentence(view.levels), width)]


def _engine(scene: Scene, view: EngineView, width: int) -> list[str]:
    lines = _drawn(scene, view, engine_body, width)
    if width < _TWO_COLUMNS:
        lines += map(text_of, engine_body(view, width, _BODY_HEIGHT, shows_facts=True))
    return [*lines, *_remark(largest_problem(view), width)]


def _fleet(snapshot: Snapshot, width: int) -> list[str]:
    when = clock(snapshot.real_ns) if snapshot.mode == "live" else moment(snapshot.real_ns)
    head = f"InferScope  {plain(snapshot.source)}  {snapshot.mode}  {when}"
    height = 2 * len(snapshot.engines) + (21 if width >= _TWO_COLUMNS else 12)
    body = fleet_body(snapshot, width, height, cursor=0)
    return [head, "", *map(text_of, body), *_remark(outlier_sentence(snapshot), width)]


_SCREENS: dict[int, Callable[[Scene, EngineView, int], list[str]]] = {
    1: _overview,
    2: _all_requests,
    3: _timeline,
    4: _roofline,
    5: _levels,
    6: _engine,
}


def _drawn(
    scene: Scene,
    view: EngineView,
    body: Callable[[EngineView, int, int], list[Line]],
    width: int,
    *,
    note: str = "",
) -> list[str]:
    """Return a header and the body of a screen, with a sentence on what it shows."""
    return [
        *_header(scene, view),
        "",
        *map(text_of, body(view, width, _BODY_HEIGHT)),
        *wrap(note, width),
    ]


def _remark(problem: str, width: int) -> list[str]:
    return ["", *wrap(f"{TRIANGLE} {plain(problem)}", width)] if problem else []


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


def _requests(view: EngineView, width: int, *, most: int) -> list[str]:
    if not view.requests:
        return [f"Requests: {format_listed(view)}" if view.num_finished else "Requests: none yet"]
    columns = columns_for(width)
    by_p99 = next(column for column in columns if column.name == _SORT)
    order = order_rows(view.requests, range(len(view.requests)), by_p99, is_reversed=True)
    head = heading_line(columns, width - 2, unit="ms", sort=_SORT, is_reversed=True)
    rows = [row_line(view.requests[i], columns, width - 2, unit="ms") for i in order[:most]]
    lines = [f"Requests ({format_listed(view)}; by TBT p99)", *_texts([head, *rows])]
    num_more = len(order) - most
    return [*lines, f"  … {num_more} more"] if num_more > 0 else lines


def _texts(lines: Iterable[Line]) -> list[str]:
    return [f"  {text_of(line)}" for line in lines]
