"""Kernels of an engine by phase, from a profile of a few seconds."""

from __future__ import annotations

from inferscope.insight import KERNEL, ProfileDocument
from inferscope.text.lines import Line, Role, frame
from inferscope.text.plots import UNKNOWN, bar, count, duration, fit, plain, share

_NUMBERS = 29
_BAR = 16


def kernels(profile: ProfileDocument, width: int, height: int) -> list[Line]:
    """Return the longest kernels of each phase, or the longest operations if there are none."""
    inner = width - 4
    kind = KERNEL if any(row.kind == KERNEL for row in profile.rows) else "cpu_op"
    rows = [row for row in profile.rows if row.kind == kind]
    phases = list(dict.fromkeys(row.phase for row in rows))
    each = max((height - 2 - 2 * len(phases)) // max(len(phases), 1), 1)
    lines: list[Line] = []
    for phase in phases:
        of_phase = [row for row in rows if row.phase == phase]
        whole_ns = sum(row.self_ns for row in of_phase) or 1
        role: Role = "prefill" if phase == "prefill" else "decode" if phase == "decode" else "bar"
        what = "kernels" if kind == KERNEL else "operations"
        lines.append(((f"{phase}: {duration(whole_ns)} in {what}", "strong"),))
        for row in of_phase[:each]:
            part = row.self_ns / whole_ns
            lines.append(
                (
                    (
                        f"{share(part):>7}{duration(row.self_ns):>11}{count(row.num_calls):>7} x ",
                        "body",
                    ),
                    (bar(part, _BAR), role),
                    (" " + fit(plain(row.name), max(inner - _NUMBERS - _BAR, 8)), "body"),
                )
            )
        lines.append(())
    cost = UNKNOWN if profile.slowdown is None else f"{profile.slowdown:+.0%} of a decode step"
    note = f"pid {profile.pid}, cost {cost}"
    return frame(
        "Kernels by phase", lines, width, height, note=note, foot=f"trace: {profile.trace}"
    )
