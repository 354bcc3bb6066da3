"""Requests of the list by tenant, adapter, finish or model: numbers, latency and compute."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from inferscope.fold import EngineView, RequestRow
from inferscope.text.labels import BAD_FINISHES, format_listed
from inferscope.text.lines import Line, Role, Span, frame
from inferscope.text.plots import count, fit_name, milliseconds, plain, split_bar

GROUP_KEYS = ("tenant", "adapter", "finish", "model")
_NONE = {"tenant": "no tenant", "adapter": "base model", "finish": "in flight", "model": "-"}
_NUMBERS = 66
_LEAST_BAR = 10


class Group(NamedTuple):
    """Listed requests with one value of a key."""

    value: str
    """Value of the key; empty for requests without one."""
    rows: tuple[RequestRow, ...]

    @property
    def compute_ns(self) -> tuple[int, int]:
        """Return the attributed time of prefill and of decode."""
        return sum(row.prefill_ns for row in self.rows), sum(row.decode_ns for row in self.rows)

    @property
    def output_tokens(self) -> int:
        """Return the tokens generated so far."""
        return sum(row.output_tokens for row in self.rows)

    def ttft_ns(self, share: float) -> int | None:
        """Return the smallest TTFT that this share of its requests does not exceed."""
        known = sorted(row.ttft_ns for row in self.rows if row.ttft_ns is not None)
        return known[max(math.ceil(share * len(known)) - 1, 0)] if known else None

    @property
    def tbt_mean_ns(self) -> float | None:
        """Return the mean gap between tokens over all gaps of its requests."""
        gaps = [
            (row.tbt_mean_ns, row.output_tokens - 1)
            for row in self.rows
            if row.tbt_mean_ns is not None
        ]
        num = sum(each for _, each in gaps)
        return sum(mean_ns * each for mean_ns, each in gaps) / num if num else None


def grouped(view: EngineView, key: str, engines: Sequence[EngineView] = ()) -> list[Group]:
    """Return the listed requests by a key, the groups with most compute first.

    Args:
        view: engine whose requests are grouped.
        key: one of `GROUP_KEYS`.
        engines: all engines of the source; requests of all of them are grouped by model.
    """
    reads: dict[str, Callable[[RequestRow, EngineView], str]] = {
        "tenant": lambda row, _: row.tenant,
        "adapter": lambda row, _: row.adapter,
        "finish": lambda row, _: row.finish or "",
        "model": lambda _, of: of.model,
    }
    read, rows = reads[key], dict[str, list[RequestRow]]()
    for of in (engines or (view,)) if key == "model" else (view,):
        for row in of.requests:
            rows.setdefault(read(row, of), []).append(row)
    groups = [Group(value, tuple(of_value)) for value, of_value in rows.items()]
    return sorted(groups, key=lambda group: (-sum(group.compute_ns), group.value))


def groups(
    view: EngineView,
    key: str,
    width: int,
    height: int,
    *,
    cursor: int,
    engines: Sequence[EngineView] = (),
) -> list[Line]:
    """Return the groups as a table; `cursor` is the index of the selected one."""
    found, inner = grouped(view, key, engines), width - 4
    title = f"Requests by {key}"
    title += "" if key == "model" and len(engines) > 1 else f": {format_listed(view)}"
    if not found:
        return frame(title, [(("no request is listed", "dim"),)], width, height)
    rows = max(height - 3, 1)
    cursor = max(0, min(cursor, len(found) - 1))
    start = max(0, min(cursor - rows // 2, len(found) - rows))
    room = max(inner - _NUMBERS - 24, 0) if inner - _NUMBERS - 24 >= _LEAST_BAR else 0
    names = max(inner - _NUMBERS - room - (2 if room else 0), 8)
    head = f"{'  ' + key.upper():<{names}}{'LIVE':>6}{'DONE':>6}{'BAD':>5}{'OUT tok':>9}"
    head += f"{'TTFT p50':>10}{'p95 ms':>9}{'TBT avg':>9}{'COMPUTE ms':>12}"
    lines: list[Line] = [((head + ("  of all" if room else ""), "dim"),)]
    whole = max(sum(sum(group.compute_ns) for group in found), 1)
    for at, group in enumerate(found[start : start + rows], start):
        lines.append(_row(group, key, names, room, whole, is_selected=at == cursor))
    return frame(title, lines, width, height, foot="Enter: these requests, b: another key")


def _row(
    group: Group, key: str, names: int, room: int, whole_ns: int, *, is_selected: bool
) -> Line:
    done = [row for row in group.rows if row.state == "done"]
    bad = sum(row.finish in BAD_FINISHES for row in done)
    prefill_ns, decode_ns = group.compute_ns
    name = plain(group.value) or _NONE[key]
    bad_role: Role = "alarm" if bad else "dim"
    spans: list[Span] = [
        ("▸ " if is_selected else "  ", "key"),
        (fit_name(name, names - 3) + " ", "strong" if is_selected else "body"),
        (f"{len(group.rows) - len(done):>6}{len(done):>6}", "body"),
        (f"{bad:>5}", bad_role),
        (f"{count(group.output_tokens):>9}", "body"),
        (f"{milliseconds(group.ttft_ns(0.5), width=8):>10}", "body"),
        (f"{milliseconds(group.ttft_ns(0.95), width=8):>9}", "body"),
        (f"{milliseconds(group.tbt_mean_ns, width=8):>9}", "body"),
        (f"{milliseconds(prefill_ns + decode_ns, width=11):>12}", "body"),
    ]
    if room:
        prefill, decode = split_bar((prefill_ns / whole_ns, decode_ns / whole_ns), room)
        spans += [("  ", "body"), (prefill, "prefill"), (decode, "decode")]
        spans.append((" " * (room - len(prefill) - len(decode)), "gauge"))
    return tuple(spans)


def group_term(key: str, value: str) -> str:
    """Return the filter term that selects a group; empty where it would select all."""
    if key == "model":
        return ""
    if key == "finish" and not value:
        return "!state:done"
    return f"{key}:{value}" if value else f"{key}:-"
