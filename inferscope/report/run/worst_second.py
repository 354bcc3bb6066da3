"""The worst second of the run, step by step: what the device computed, and for which requests."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

from inferscope.fold import SECOND_NS, FinalStep
from inferscope.insight.run import EngineFacts, WorstSecond
from inferscope.records import PREFILL
from inferscope.report.blocks import (
    Block,
    Cell,
    Column,
    Details,
    Figure,
    Marked,
    Number,
    Role,
    Section,
    Table,
    prose,
)
from inferscope.report.plots import ALARM, DECODE, DIM, PAPER, TRACK, bare, draw
from inferscope.report.plots import PREFILL as PREFILL_HUE
from inferscope.text import more_or_less
from inferscope.text.plots import UNKNOWN, duration, fit_name

_MOST_REQUESTS = 16
_MOST_LISTED = 12
_MOST_TOOLTIPS = 400
"""Largest number of steps with an edge and a tooltip each; more are too narrow to be told apart."""
_NAME = 20
_PIXELS = 500
"""Slices of a request that are closer than this fraction of the second are drawn as one."""


def worst_second(engine: EngineFacts) -> Section | None:
    """Return the steps of the second in which tokens came slowest."""
    second = engine.worst_second
    if second is None or not engine.worst_steps:
        return None
    summary = prose(
        "Tokens came slowest {}: a random moment of this second found a request in a gap of {}"
        " between two tokens, against a median gap of {} over the run. The longest of its {} gaps"
        " took {}.",
        Number("start_ns", second.start_ns, _when(engine, second)),
        Number.duration("mean_wait_ns", second.mean_wait_ns),
        Number.duration("median_ns", engine.tbt.percentiles_ns()[0]),
        Number.count("num_gaps", second.num_gaps),
        Number.duration("longest_gap_ns", second.longest_gap_ns),
    )
    blocks: list[Block] = [summary, _figure(engine, second)]
    if engine.num_worst_left_out:
        left_out = Number.count("left_out", engine.num_worst_left_out)
        blocks.append(prose("Its last {} steps are not drawn.", left_out, role="alarm"))
    table = _table(engine.worst_steps, second)
    blocks.append(Details((f"The {len(table.rows)} longest steps of the second",), (table,)))
    return Section("worst-second", "The worst second", tuple(blocks))


def _when(engine: EngineFacts, second: WorstSecond) -> str:
    since = engine.first_arrival_ns
    if since is None:
        return "then"
    after_s = (second.start_ns - since) / 1e9
    return f"{after_s:.1f} s after the first arrival"


def _figure(engine: EngineFacts, second: WorstSecond) -> Figure:
    ranks = sorted({(step.dp_rank, step.rank) for step in engine.worst_steps})
    lanes = {rank: [s for s in engine.worst_steps if (s.dp_rank, s.rank) == rank] for rank in ranks}
    drawn = dict(list(lanes.items())[:8])
    rows, tokens = _requests(lanes[ranks[0]] if len(ranks) == 1 else engine.worst_steps)
    shown = [request for request, _ in tokens.most_common(_MOST_REQUESTS)]
    shown.sort(key=lambda request: (rows[request][0][0], request))
    names = {
        f"@{at}@".ljust(_NAME, "x"): fit_name(engine.worst_names.get(each, each), _NAME).strip()
        for at, each in enumerate(shown)
    }
    tooltips: dict[str, str] = {}

    def plot(canvas: Canvas) -> None:
        heights = [*(0.9 for _ in drawn), max(0.8, 0.24 * len(shown))]
        axes = canvas.subplots(len(heights), 1, sharex=True, height_ratios=heights, squeeze=False)
        for (rank, steps), lane in zip(drawn.items(), axes[:, 0], strict=False):
            tooltips.update(_lane(lane, rank, steps, second, num_ranks=len(ranks)))
        below = axes[-1, 0]
        _requests_lane(below, [rows[request] for request in shown], second, list(names))
        below.set_xlim(0, SECOND_NS / 1e6)
        below.set_xlabel(f"ms from {_when(engine, second)}")

    rest = len(tokens) - len(shown)
    picture = draw(
        (11.5, 0.9 + 0.95 * len(drawn) + max(0.9, 0.24 * len(shown))),
        plot,
        label="Steps of the worst second, and the requests that they computed",
        tooltips=tooltips,
        names=names,
    )
    more = f" Not drawn: {rest} more, with fewer prompt tokens there." if rest else ""
    return Figure(
        picture,
        "Above: each step from its start to its end; its height is divided as its time is, ● blue"
        " decode below and ◆ orange prefill, hatched, above; gaps are idle. ▲: a first use of a"
        " shape, or a step that took twice the modelled time. Below: the steps in which each"
        f" request was computed.{more}",
        method="Measured: starts and ends. Apportioned: the division of a step.",
    )


def _prefill_share(step: FinalStep) -> float:
    """Return prefill's part of a step's apportioned time."""
    of = step.unnamed
    if of is not None:
        whole_ns = of.prefill_ns + of.decode_ns
        return of.prefill_ns / whole_ns if whole_ns else 0.0
    whole_ns = int(step.shares_ns.sum())
    if not whole_ns:
        return 0.0
    return int(step.shares_ns[step.phases == PREFILL].sum()) / whole_ns


def _lane(
    axes: Axes,
    rank: tuple[int, int],
    steps: list[FinalStep],
    second: WorstSecond,
    *,
    num_ranks: int,
) -> dict[str, str]:
    """Draw the steps of one rank; return their tooltips."""
    bare(axes, left=False)
    axes.set_ylim(0, 1.12)
    axes.set_yticks([0.5], ["steps" if num_ranks == 1 else f"rank {rank[0]}.{rank[1]}"])
    starts, ends = (
        np.clip([(at_ns - second.start_ns) / 1e6 for at_ns in times], 0, SECOND_NS / 1e6)
        for times in ([step.start_ns for step in steps], [step.end_ns for step in steps])
    )
    shares = np.array([_prefill_share(step) for step in steps])
    times = np.repeat(np.stack([starts, ends], axis=1).reshape(-1), 2)
    nothing = np.zeros(len(steps))

    def tops(values: np.ndarray) -> np.ndarray:
        return np.stack([nothing, values, values, nothing], axis=1).reshape(-1)

    decode = tops(1 - shares)
    axes.fill_between(times, 0, decode, color=DECODE, linewidth=0)
    whole = tops(np.ones(len(steps)))
    axes.fill_between(
        times, decode, whole, where=list(whole > decode), facecolor=PREFILL_HUE, hatch="////",
        edgecolor=PAPER, linewidth=0,
    )  # fmt: skip
    if len(steps) <= _MOST_TOOLTIPS:
        axes.vlines(starts, 0, 1, color=PAPER, linewidth=0.5)
    odd = [at for at, step in enumerate(steps) if step.is_cold or step.model_residual > 1]
    if odd:  # an empty line without clipping has no extent, which a layout cannot place
        middles = [(starts[at] + ends[at]) / 2 for at in odd]
        axes.plot(middles, [1.07] * len(odd), "^", color=ALARM, markersize=4.5, clip_on=False)
    if len(steps) > _MOST_TOOLTIPS:
        return {}
    tooltips = {}
    for at, step in enumerate(steps):
        gid = f"step-{rank[0]}-{rank[1]}-{at}"
        axes.axvspan(starts[at], max(ends[at], starts[at] + 0.5), color=DIM, alpha=0.0, gid=gid)
        tooltips[gid] = _described(step)
    return tooltips


def _described(step: FinalStep) -> str:
    prefill, decode = _tokens(step)
    cold = ", first use of its shape" if step.is_cold else ""
    return (
        f"step {step.step}: {duration(step.end_ns - step.start_ns)}, {len(set(step.request_ids))}"
        f" requests, {prefill:,} prefill and {decode:,} decode tokens,"
        f" {more_or_less(step.model_residual)} than modelled{cold}"
    )


def _tokens(step: FinalStep) -> tuple[int, int]:
    """Return the tokens computed in a step: prefill's, and all others."""
    of = step.unnamed
    if of is not None:
        return of.prefill_tokens, of.decode_tokens
    whole, prefill = int(step.tokens.sum()), int(step.tokens[step.phases == PREFILL].sum())
    return prefill, whole - prefill


_Slices = list[tuple[int, int, bool]]
"""Start, end and whether it is prefill, of each step that computed a request."""


def _requests(steps: Iterable[FinalStep]) -> tuple[dict[str, _Slices], Counter[str]]:
    """Return each request's slices, and the prompt tokens by which it is chosen for the picture."""
    rows: defaultdict[str, _Slices] = defaultdict(list)
    tokens = Counter[str]()
    for step in steps:
        is_prefill = (step.phases == PREFILL).tolist()
        for request_id, prefills, num in zip(
            step.request_ids, is_prefill, step.tokens.tolist(), strict=True
        ):
            rows[request_id].append((step.start_ns, step.end_ns, prefills))
            tokens[request_id] += num if prefills else 0
    return rows, tokens


def _requests_lane(axes: Axes, rows: list[_Slices], second: WorstSecond, labels: list[str]) -> None:
    bare(axes, left=False)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_yticks(range(len(rows)), labels)
    axes.hlines(range(len(rows)), 0, SECOND_NS / 1e6, color=TRACK, linewidth=0.6, zorder=0)
    for at, slices in enumerate(rows):
        for is_prefill, colour, height in ((False, DECODE, 0.34), (True, PREFILL_HUE, 0.66)):
            spans = _merged([each[:2] for each in slices if each[2] is is_prefill], second)
            axes.broken_barh(spans, (at - height / 2, height), facecolors=colour, linewidth=0)


def _merged(spans: list[tuple[int, int]], second: WorstSecond) -> list[tuple[float, float]]:
    """Return start and length in ms, in the second, of spans that are apart in the picture."""
    near_ns = SECOND_NS // _PIXELS
    found: list[list[int]] = []
    for start_ns, end_ns in sorted(spans):
        start_ns, end_ns = max(start_ns, second.start_ns), min(end_ns, second.end_ns)
        if found and start_ns - found[-1][1] <= near_ns:
            found[-1][1] = max(found[-1][1], end_ns)
        else:
            found.append([start_ns, end_ns])
    return [((start - second.start_ns) / 1e6, max(end - start, 1) / 1e6) for start, end in found]


def _table(steps: tuple[FinalStep, ...], second: WorstSecond) -> Table:
    longest = sorted(steps, key=lambda step: (step.start_ns - step.end_ns, step.start_ns))
    rows = [_row(number, step, second) for number, step in enumerate(longest[:_MOST_LISTED], 1)]
    return Table(
        (
            Column("step", "number"),
            Column("rank"),
            Column("kind"),
            Column("at ms", "number", "start, after the second's"),
            Column("ms", "number"),
            Column("requests", "number"),
            Column("prefill tokens", "number"),
            Column("decode tokens", "number"),
            Column("prefill share", "number", "of its apportioned time"),
            Column("than modelled"),
        ),
        tuple(rows),
        method="Measured: times. Counted: tokens. Apportioned: prefill's share of a step.",
    )


def _row(key: int, step: FinalStep, second: WorstSecond) -> tuple[Cell, ...]:
    prefill, decode = _tokens(step)
    kind, role = _kind(prefill, decode)
    return (
        Number.count(f"{key}.step", step.step),
        f"{step.dp_rank}.{step.rank}",
        Marked(kind + (", first of its shape" if step.is_cold else ""), role),
        Number.ms(f"{key}.at_ns", step.start_ns - second.start_ns),
        Number.ms(f"{key}.took_ns", step.end_ns - step.start_ns),
        Number.count(f"{key}.requests", len(set(step.request_ids))),
        Number.count(f"{key}.prefill_tokens", prefill),
        Number.count(f"{key}.decode_tokens", decode),
        Number.share(f"{key}.prefill_share", _prefill_share(step)),
        UNKNOWN if step.is_dummy else more_or_less(step.model_residual),
    )


def _kind(prefill: int, decode: int) -> tuple[str, Role]:
    if prefill and decode:
        return "mixed", "strong"
    if prefill:
        return "prefill", "prefill"
    return ("decode", "decode") if decode else ("no request", "")
