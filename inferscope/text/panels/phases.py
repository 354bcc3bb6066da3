"""Device wall time by phase: rows that sum to 100 %."""

from __future__ import annotations

from collections import Counter
from typing import Literal, NamedTuple

from inferscope.fold import CountersView, EngineView, PhaseUse
from inferscope.text.labels import format_window, has_gpu
from inferscope.text.lines import DIAMOND, DOT, Line, Role, frame
from inferscope.text.plots import bar, closed, fit, milliseconds, share, sparkline

Unit = Literal["%", "ms"]

_WITH_SUM, _WITH_WORDS = 44, 66
_FRAMING = 9
"""Cells of a frame's lower edge that its note cannot use."""

_ROWS: tuple[tuple[str, str, Role, tuple[str, ...]], ...] = (
    (DIAMOND, "prefill", "prefill", ("prefill",)),
    (DOT, "decode", "decode", ("decode",)),
    (" ", "other", "bar", ("padding", "unattributed", "foreign")),
    (" ", "host gap", "bar", ("idle_host_gap",)),
    (" ", "no work", "bar", ("idle_no_work",)),
)


class PhaseRow(NamedTuple):
    """One row of device time."""

    mark: str
    name: str
    role: Role
    device_ns: int | None
    """Device time in ns; None without a source."""
    tenths: int
    """Tenths of a percent, rounded so that all rows sum to 1000."""


def phase_rows(view: EngineView) -> list[PhaseRow]:
    """Return the device seconds of the window as the five rows of the screen."""
    sums: list[int | None] = []
    for _, _, _, sources in _ROWS:
        known = [view.device_ns[source] for source in sources if source in view.device_ns]
        sums.append(sum(known) if known else None)
    tenths = closed([value or 0 for value in sums], 1000)
    return [
        PhaseRow(mark, name, role, value, tenth)
        for (mark, name, role, _), value, tenth in zip(_ROWS, sums, tenths, strict=True)
    ]


def phase_lines(view: EngineView, width: int, *, unit: Unit = "%") -> list[Line]:
    """Return the five rows as bars of one scale."""
    lines: list[Line] = []
    for row in phase_rows(view):
        if row.device_ns is None or not sum(view.device_ns.values()):
            number, length = "-", None
        elif unit == "%":
            number, length = f"{row.tenths / 10:.1f}%", row.tenths / 1000
        else:
            number, length = milliseconds(row.device_ns, width=7), row.tenths / 1000
        head = f"{row.mark} {row.name:8}"
        lines.append(
            (
                (head, "body" if row.role == "bar" else row.role),
                (fit(number, 8, align="right"), "body"),
                ("  ", "body"),
                (bar(length, width - len(head) - 10), row.role),
            )
        )
    return lines


def format_counted(counters: CountersView) -> str:
    """Return a short text of sampled phase counters, or the reason for their absence."""
    if not counters.use:
        cores = counters.host.get("cpu_cores")
        cpu = f"CPU {cores:.1f} cores  " if cores is not None else ""
        return f"{cpu}SM -, HBM -: {counters.reason}" if counters.reason else ""
    prefill, decode = (counters.use.get(phase) for phase in ("prefill", "decode"))
    sm = "/".join(share(each.sm_share if each else None) for each in (prefill, decode))
    hbm = "/".join(_terabytes(each) for each in (prefill, decode))
    watts = [
        each.gauges["power_w"] for each in counters.devices.values() if "power_w" in each.gauges
    ]
    power = f"  {sum(watts):.0f} W" if watts else ""
    return f"SM {sm}  HBM {hbm} TB/s{power}"


def format_device_health(view: EngineView) -> str:
    """Return a short text of current throttling and past errors of the devices."""
    reports = [device.health for device in view.devices if device.health is not None]
    now = dict.fromkeys(word for health in reports for word in health.throttled_now)
    errors = Counter[str]()
    for health in reports:
        errors.update(health.xids or {})
    notes = [f"throttled: {', '.join(now)}"] if now else []
    notes += [f"Xid {word} x{num}" for word, num in errors.items() if num]
    return "  ".join(notes).replace("_", " ")


def _terabytes(use: PhaseUse | None) -> str:
    if use is None or use.read_bytes_s is None or use.write_bytes_s is None:
        return "-"
    return f"{(use.read_bytes_s + use.write_bytes_s) / 1e12:.2f}"


def device_time(view: EngineView, width: int, height: int, *, unit: Unit = "%") -> list[Line]:
    """Return device time by phase, the decode share over time, steps and host gaps."""
    inner = width - 4
    note = format_window(view.window_ns)
    if unit == "ms":
        note += ", ms"
    elif width >= _WITH_SUM:
        note += ", sums to 100%"
    gap, step = view.host_gap, view.step
    measures = (
        f"gap {milliseconds(gap.p50_ns, width=5)}/{milliseconds(gap.p99_ns, width=5)}"
        f"  step {milliseconds(step.p50_ns, width=5)}/{milliseconds(step.p99_ns, width=5)} ms"
    )
    if inner >= _WITH_WORDS:
        measures = (
            f"host gap p50 {milliseconds(gap.p50_ns)}  p99 {milliseconds(gap.p99_ns)} ms"
            f"    step p50 {milliseconds(step.p50_ns)}  p99 {milliseconds(step.p99_ns)} ms"
        )
    lines = phase_lines(view, inner, unit=unit)
    label = "decode share "
    chart = sparkline(view.series.decode_share, inner - len(label), top=1.0)
    lines.append(((label, "dim"), (chart, "decode")))
    lines.append(((measures, "dim"),))
    title = "GPU time by phase" if has_gpu(view) else "Device time by phase"
    room = width - _FRAMING
    foot = format_counted(view.counters) if inner >= _WITH_WORDS else "p50/p99"
    trouble = format_device_health(view)
    if trouble:  # shown first, as far as it fits
        both = f"{foot}  {trouble}"
        foot = both if foot and len(both) <= room else fit(trouble, min(len(trouble), room))
    return frame(title, lines, width, height, note=note, foot=foot)
