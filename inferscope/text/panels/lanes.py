"""Lanes of the recent steps over time: phases, gaps, scheduler, queue, KV cache, ranks, requests.

A cell is a slice of time. The height of a phase's lane in it is the part of that time that the
phase took, so that the lanes of one column fill it; the shares at the right sum to 100 %.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from inferscope.fold import EngineView, StepView
from inferscope.text.lines import BLANK, DIAMOND, DOT, Line, Role, Span, frame
from inferscope.text.plots import UNKNOWN, closed, columns, count, duration, fit, fit_name, share

SPANS_NS = tuple(
    milliseconds * 1_000_000
    for milliseconds in (10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000)
)
"""Lengths of time that the lanes may show."""
MIXED = "◐"
KIND_MARKS: dict[str, tuple[str, Role]] = {
    "prefill": (DIAMOND, "prefill"),
    "decode": (DOT, "decode"),
    "mixed": (MIXED, "strong"),
}
_NAME, _VALUE = 18, 9
_NARROW_NAME, _NARROW_VALUE = 12, 7
_NARROW = 100
_RECENT_NS = 1_500_000_000
"""Age of the newest step up to which times count from it; from now if it is older."""
_MANY_GAPS = 0.2
"""Share of host gaps from which their lane is an alarm."""
_Cover = tuple[int, int, float]
"""Start, end, and part of a lane that an interval fills."""


class Sight(NamedTuple):
    """Part of the time that is on display."""

    since_ns: int
    until_ns: int

    @property
    def span_ns(self) -> int:
        """Return its length."""
        return self.until_ns - self.since_ns

    def cell(self, at_ns: int, width: int) -> int:
        """Return the column of a time; it may lie outside."""
        return (at_ns - self.since_ns) * width // max(self.span_ns, 1)


def newest_ns(view: EngineView) -> int:
    """Return the end of the newest step."""
    return max((step.end_ns for step in view.steps[-8:]), default=view.folded_ns)


def in_sight(steps: Sequence[StepView], sight: Sight) -> Sequence[StepView]:
    """Return the steps that overlap the time on display; steps are in the order of starts."""
    first = bisect_left(steps, sight.since_ns, key=lambda step: step.start_ns)
    while first > 0 and steps[first - 1].end_ns > sight.since_ns:
        first -= 1
    last = bisect_left(steps, sight.until_ns, key=lambda step: step.start_ns)
    return steps[first:last]


def lanes(
    view: EngineView,
    width: int,
    height: int,
    *,
    sight: Sight,
    selected: StepView | None = None,
    names: Mapping[str, str] | None = None,
) -> list[Line]:
    """Return the lanes; what is left of the height goes to the requests with the largest shares.

    Args:
        view: engine with recent steps.
        width: width of every line.
        height: number of lines.
        sight: time on display.
        selected: marked step.
        names: names of requests by the engine's ids.
    """
    steps = in_sight(view.steps, sight)
    span = duration(sight.span_ns)
    note = f"{span}, {len(steps)} steps  ← → pan  + - zoom"
    if not view.steps:
        why = "no step is recorded yet" if view.num_finished == 0 else "no recent step is kept"
        return frame("Step timeline", [((why, "dim"),)], width, height, note=span)
    drawer = _Drawer(view, steps, sight, width - 4)
    room = height - 2
    tall = 4 if room >= 30 else 2 if room >= 16 else 1
    lines = drawer.fixed(tall=tall, selected=selected)
    if len(lines) > room:  # the axis and the phases stay
        lines = [*lines[: room - 1], lines[-1]]
    free = room - len(lines)
    if free >= 2:
        lines[-1:-1] = drawer.requests(free, names or {})
    return frame("Step timeline", lines, width, height, note=note)


class _Drawer:
    """Lanes of some steps at one width."""

    def __init__(
        self, view: EngineView, steps: Sequence[StepView], sight: Sight, inner: int
    ) -> None:
        self._view, self._steps, self._sight = view, steps, sight
        is_narrow = inner < _NARROW - 4
        self._name = _NARROW_NAME if is_narrow else _NAME
        self._value = _NARROW_VALUE if is_narrow else _VALUE
        self._room = max(inner - self._name - self._value, 1)
        self._bin_ns = max(sight.span_ns / self._room, 1.0)
        self._known = self._known_cells()

    def fixed(self, *, tall: int, selected: StepView | None) -> list[Line]:
        """Return the lanes that every engine has, the time axis last."""
        lines = self._phases(tall)
        lines.append(self._marks())
        lines.append(self._selection(selected))
        lines += self._ranks()
        lines += [self._scheduler(), self._queue(), self._kv(), self._axis()]
        return lines

    # --- phases ---------------------------------------------------------------------------------

    def _phases(self, tall: int) -> list[Line]:
        """Return prefill, decode and what else the device's time went to."""
        num = max(len(step.ranks) for step in self._steps) if self._steps else 1
        replicas = {step.dp_rank for step in self._steps}
        lines_of_time = max(num * len(replicas), 1)
        covers: dict[str, list[_Cover]] = {name: [] for name in ("prefill", "decode", "other")}
        gaps: list[_Cover] = []
        for step in self._steps:
            for rank in step.ranks:
                measured_ns = max(rank.measured_ns, 1) * lines_of_time
                rest_ns = rank.padding_ns + rank.unattributed_ns
                for name, part_ns in (
                    ("prefill", rank.prefill_ns), ("decode", rank.decode_ns), ("other", rest_ns),
                ):  # fmt: skip
                    if part_ns:
                        covers[name].append((rank.start_ns, rank.end_ns, part_ns / measured_ns))
            if step.host_gap_ns:
                gaps.append((step.start_ns - step.host_gap_ns, step.start_ns, 1.0))
        following = bisect_left(
            self._view.steps, self._sight.until_ns, key=lambda step: step.start_ns
        )
        if following < len(self._view.steps):
            step = self._view.steps[following]
            gaps.append((step.start_ns - step.host_gap_ns, step.start_ns, 1.0))
        prefill, decode, other = (self._cover(covers[name]) for name in covers)
        gap = self._cover(gaps)
        busy = [sum(cells) for cells in zip(prefill, decode, other, strict=True)]
        gap = [min(part, max(1.0 - taken, 0.0)) for part, taken in zip(gap, busy, strict=True)]
        idle = [
            max(1.0 - taken - part, 0.0) if known else 0.0
            for taken, part, known in zip(busy, gap, self._known, strict=True)
        ]
        drawn: list[tuple[str, Role, list[float], int]] = [
            (f"{DIAMOND} prefill", "prefill", prefill, tall),
            (f"{DOT} decode", "decode", decode, tall),
            ("  other", "bar", other, 1),
            ("  host gap", "alarm" if sum(gap) > _MANY_GAPS * self._room else "bar", gap, 1),
            ("  no work", "dim", idle, 1),
        ]
        tenths = closed([sum(values) for _, _, values, _ in drawn], 1000)
        lines: list[Line] = []
        for (name, role, values, rows), tenth in zip(drawn, tenths, strict=True):
            value = share(tenth / 1000) if any(self._known) else UNKNOWN
            lines += self._lane(name, role, values, value, rows=rows, top=1.0)
        return lines

    # --- other lanes ----------------------------------------------------------------------------

    def _marks(self) -> Line:
        """Return a mark at each step's start; where they are too dense, how many start there."""
        starts = [self._sight.cell(step.start_ns, self._room) for step in self._steps]
        if len(starts) * 2 > self._room:
            counts = [0.0] * self._room
            for cell in starts:
                if 0 <= cell < self._room:
                    counts[cell] += 1
            text = columns(counts, self._room, 1)[0]
            return self._line("  steps", ((text, "bar"),), f"{len(self._steps)}")
        cells: list[tuple[str, Role]] = [(" ", "dim")] * self._room
        for cell, step in zip(starts, self._steps, strict=True):
            if 0 <= cell < self._room:
                cells[cell] = KIND_MARKS.get(step.kind, ("·", "dim"))
        return self._line("  steps", _runs(cells), f"{len(self._steps)}")

    def _selection(self, selected: StepView | None) -> Line:
        if selected is None:
            return BLANK
        first = self._sight.cell(selected.start_ns, self._room)
        last = max(self._sight.cell(selected.end_ns, self._room), first + 1)
        if last <= 0 or first >= self._room:
            return BLANK
        first, last = max(first, 0), min(last, self._room)
        label = f"step {selected.step}"
        bar = "━" * (last - first)
        if last + len(label) + 1 <= self._room:
            text = " " * first + f"{bar} {label}"
        elif first >= len(label) + 1:
            text = " " * (first - len(label) - 1) + f"{label} {bar}"
        else:
            text = " " * first + bar
        return self._line("", ((fit(text, self._room), "strong"),), "")

    def _ranks(self) -> list[Line]:
        """Return a lane of each rank with its mean lag behind the fastest, if there are several."""
        by_rank: dict[tuple[int, int], list[_Cover]] = {}
        lags: dict[tuple[int, int], list[int]] = {}
        for step in self._steps:
            first_ns = min(rank.end_ns for rank in step.ranks)
            for rank in step.ranks:
                key = (step.dp_rank, rank.rank)
                by_rank.setdefault(key, []).append((rank.start_ns, rank.end_ns, 1.0))
                lags.setdefault(key, []).append(rank.end_ns - first_ns)
        if len(by_rank) < 2:
            return []
        has_replicas = len({dp_rank for dp_rank, _ in by_rank}) > 1
        means = {key: sum(of) / len(of) for key, of in lags.items()}
        worst = max(means, key=lambda key: means[key])
        lines: list[Line] = []
        for key, covers in sorted(by_rank.items()):
            name = f"  rank {key[0]}.{key[1]}" if has_replicas else f"  rank {key[1]}"
            role: Role = "alarm" if key == worst and means[key] > 0 else "bar"
            lag = f"+{duration(means[key])}" if means[key] else "0"
            lines += self._lane(name, role, self._cover(covers), lag, top=1.0)
        return lines

    def _scheduler(self) -> Line:
        plans = [
            (step.plan_start_ns, step.plan_end_ns)
            for step in self._steps
            if step.plan_start_ns is not None and step.plan_end_ns is not None
        ]
        spent_ns = [end_ns - start_ns for start_ns, end_ns in plans]
        mean = duration(sum(spent_ns) / len(spent_ns)) if spent_ns else UNKNOWN
        cells = self._cover([(start_ns, end_ns, 1.0) for start_ns, end_ns in plans])
        return self._lane("  scheduler", "bar", cells, mean, top=1.0)[0]

    def _queue(self) -> Line:
        values = self._held([step.num_waiting for step in self._steps])
        last = next((v for v in reversed(values) if v is not None), None)
        return self._lane("  waiting", "bar", values, count(last))[0]

    def _kv(self) -> Line:
        shares = [
            step.blocks_used / step.blocks_total
            if step.blocks_used is not None and step.blocks_total
            else None
            for step in self._steps
        ]
        values = self._held(shares)
        last = next((v for v in reversed(values) if v is not None), None)
        return self._lane("  KV used", "bar", values, share(last), top=1.0)[0]

    def _axis(self) -> Line:
        now_ns = newest_ns(self._view)
        if self._view.folded_ns > now_ns + _RECENT_NS and not self._view.has_ended:
            now_ns = self._view.folded_ns
        behind_ns = now_ns - self._sight.until_ns
        right = "newest" if behind_ns <= 0 else f"-{duration(behind_ns)}"
        middle = f"-{duration(behind_ns + self._sight.span_ns // 2)}"
        left = f"-{duration(behind_ns + self._sight.span_ns)}"
        half = self._room // 2
        text = fit(left, max(half - len(middle) // 2, 0)) + middle
        text = fit(text, max(self._room - len(right), 0)) + right
        return self._line("", ((fit(text, self._room), "dim"),), "")

    # --- requests -------------------------------------------------------------------------------

    def requests(self, most: int, names: Mapping[str, str]) -> list[Line]:
        """Return lanes of the requests with the largest shares in sight, after a blank line."""
        totals: dict[str, int] = {}
        whole_ns = sum(step.device_ns for step in self._steps)
        spent_ns = [_over_ranks(step) for step in self._steps]
        """[steps][requests], over all ranks."""
        for step, shares_ns in zip(self._steps, spent_ns, strict=True):
            for request_id, share_ns in zip(step.request_ids, shares_ns, strict=True):
                totals[request_id] = totals.get(request_id, 0) + share_ns
        largest = sorted(totals, key=lambda name: (-totals[name], name))[: most - 1]
        if not largest or not whole_ns:
            return []
        chosen = set(largest)
        covers: dict[str, dict[bool, list[_Cover]]] = {
            name: {True: [], False: []} for name in largest
        }
        for step, shares_ns in zip(self._steps, spent_ns, strict=True):
            num = max(step.device_ns, 1)
            for at, request_id in enumerate(step.request_ids):
                if request_id in chosen:
                    is_prefill = step.phases[at] == "prefill"
                    covers[request_id][is_prefill].append(
                        (step.start_ns, step.end_ns, shares_ns[at] / num)
                    )
        more = f"{len(totals)} requests in sight, largest shares first"
        lines: list[Line] = [((fit(more, self._name + self._room), "dim"),)]
        cells_of = {
            name: (self._cover(covers[name][True]), self._cover(covers[name][False]))
            for name in largest
        }
        top = max(max(map(sum, zip(*both, strict=True))) for both in cells_of.values())
        for request_id, (prefill, decode) in cells_of.items():
            sums = [a + b for a, b in zip(prefill, decode, strict=True)]
            text = columns(sums, self._room, 1, top=top)[0]
            cells: list[tuple[str, Role]] = [
                (char, "prefill" if a > b else "decode")
                for char, a, b in zip(text, prefill, decode, strict=True)
            ]
            name = fit_name(f"  {names.get(request_id, request_id)}", self._name - 1) + " "
            lines.append(self._line(name, _runs(cells), share(totals[request_id] / whole_ns)))
        return lines

    # --- cells ----------------------------------------------------------------------------------

    def _known_cells(self) -> list[bool]:
        """Return whether each cell lies within the time of the kept steps."""
        steps = self._view.steps
        first = self._sight.cell(steps[0].start_ns, self._room) if steps else self._room
        last = self._sight.cell(newest_ns(self._view), self._room)
        return [first <= cell <= last for cell in range(self._room)]

    def _cover(self, covers: Iterable[_Cover]) -> list[float]:
        """Return which part of each cell some intervals fill."""
        cells = [0.0] * self._room
        since_ns, bin_ns, room = self._sight.since_ns, self._bin_ns, self._room
        for start_ns, end_ns, part in covers:
            left = max((start_ns - since_ns) / bin_ns, 0.0)
            right = min((end_ns - since_ns) / bin_ns, float(room))
            if right <= left:
                continue
            first, last = int(left), min(int(right), room - 1)
            if first == last:
                cells[first] += (right - left) * part
                continue
            cells[first] += (first + 1 - left) * part
            for cell in range(first + 1, last):
                cells[cell] += part
            cells[last] += (right - last) * part
        return cells

    def _held(self, values: Sequence[float | None]) -> list[float | None]:
        """Return a value of each step as cells: it holds until the next step starts."""
        cells: list[float | None] = [None] * self._room
        for step, value in zip(self._steps, values, strict=True):
            at = min(max(self._sight.cell(step.start_ns, self._room), 0), self._room - 1)
            cells[at] = value if cells[at] is None or value is None else max(cells[at] or 0, value)
        held: float | None = None
        last = self._sight.cell(newest_ns(self._view), self._room)
        for at, value in enumerate(cells[: max(last + 1, 0)]):
            held = value if value is not None else held
            cells[at] = held
        return cells

    def _lane(
        self,
        name: str,
        role: Role,
        values: Sequence[float | None],
        value: str,
        *,
        rows: int = 1,
        top: float | None = None,
    ) -> list[Line]:
        drawn = columns(values, self._room, rows, top=top)
        above = [self._line("", ((text, role),), "") for text in drawn[:-1]]
        return [*above, self._line(name, ((drawn[-1], role),), value)]

    def _line(self, name: str, cells: Sequence[Span], value: str) -> Line:
        role: Role = "prefill" if DIAMOND in name else "decode" if DOT in name else "body"
        return (
            (fit(name, self._name), role),
            *cells,
            (fit(value, self._value, align="right"), "strong"),
        )


def _over_ranks(step: StepView) -> Sequence[int]:
    """Return each request's share, summed over the ranks; zeros if no rank reported the step."""
    if len(step.shares_ns) == 1:
        return step.shares_ns[0]
    none = (0,) * len(step.request_ids)
    return tuple(map(sum, zip(none, *step.shares_ns, strict=True)))


def _runs(cells: Sequence[tuple[str, Role]]) -> list[Span]:
    """Join neighbouring cells of one role."""
    spans: list[Span] = []
    for text, role in cells:
        if spans and spans[-1][1] == role:
            spans[-1] = (spans[-1][0] + text, role)
        else:
            spans.append((text, role))
    return spans
