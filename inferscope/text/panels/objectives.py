"""Objectives: good ratio and burn rate by window, the budget left, and a trial of other ones."""

from __future__ import annotations

from inferscope.fold import EngineView, LevelTrial, LevelWindow, ObjectiveLevels, ServiceLevels
from inferscope.slo import UNKNOWN as UNKNOWN_CAUSE
from inferscope.slo import Objective, good_line
from inferscope.text.labels import format_window
from inferscope.text.lines import TRIANGLE, Line, Role, Span, frame, width_of
from inferscope.text.plots import UNKNOWN, bar, count, duration, fit, per_second, plain, share

_WIDE = 100
_NO_LEVELS = "no objectives are judged here: attach to the engine or replay its recording"


def objectives(view: EngineView, width: int, height: int) -> list[Line]:
    """Return the table of objectives; on trial, what the trial would have made of the requests."""
    levels = view.levels
    title = "Objectives"
    if levels is None:
        return frame(title, [((_NO_LEVELS, "dim"),)], width, height)
    inner = width - 4
    if levels.trial:
        lines = [_trial_head(inner), *[_trial_row(each, inner) for each in levels.trial]]
        note = "trial over the kept requests: Enter keeps it, Esc drops it"
        return frame("Objectives on trial", lines, width, height, note=note)
    is_wide = inner >= _WIDE - 4
    lines = [_head(is_wide=is_wide), *[_row(each, inner, is_wide) for each in levels.objectives]]
    lines += [(), _goodput(view, levels)]
    note = f"{plain(levels.origin)}, observed {duration(levels.observed_ns)}"
    return frame(title, lines, width, height, note=note, foot=_foot(levels))


def ratio(good: int, bad: int) -> float | None:
    """Return the share of good requests; None without requests."""
    return good / (good + bad) if good + bad else None


def burn_rate(one: Objective, good: int, bad: int) -> float | None:
    """Return the bad share over the allowed share; None without requests."""
    good_ratio = ratio(good, bad)
    return None if good_ratio is None else (1.0 - good_ratio) / one.budget


def budget_left(one: ObjectiveLevels) -> float | None:
    """Return the unspent share of the budget over all counted requests; None without any."""
    burn = burn_rate(one.objective, one.num_good, one.num_bad)
    return None if burn is None else 1.0 - burn


def burn_sentence(levels: ServiceLevels | None) -> str:
    """Return which objective's budget burns fastest, with its main cause; empty if none does."""
    rated = [
        (burn, one)
        for one in (levels.objectives if levels is not None else ())
        if (burn := burn_rate(one.objective, one.windows[0].num_good, one.windows[0].num_bad))
    ]
    burn, one = max(rated, key=lambda each: each[0], default=(0.0, None))
    if one is None or burn <= 1:
        return ""
    text = f"{objective_label(one.objective)} burns its budget {burn:.1f}x as fast as allowed"
    for cause, num in one.causes.items():
        named = "an unknown cause" if cause == UNKNOWN_CAUSE else cause
        text += f": {share(num / one.num_bad)} of its bad requests for {named}"
        break
    return f"{text}."


def objective_label(one: Objective) -> str:
    """Return the name of an objective with its limit: `ttft ≤ 500 ms`."""
    limit = "" if one.threshold_ns is None else f" ≤ {_limit(one.threshold_ns)}"
    return f"{plain(one.name)}{limit}"


def format_good(value: float | None) -> str:
    """Return a good ratio in per cent, with as many digits as a target has."""
    if value is None:
        return UNKNOWN
    return "100 %" if value == 1.0 else f"{100 * value:.2f} %"


def _limit(value_ns: int) -> str:
    value_ms = value_ns / 1e6
    return f"{value_ms:g} ms" if value_ms < 1000 else f"{value_ms / 1000:g} s"


def _head(*, is_wide: bool) -> Line:
    text = f"{'OBJECTIVE':<24}{'TARGET':>9}{'GOOD 5 min':>12}"
    if is_wide:
        text += f"{'GOOD 1 h':>11}"
    text += f"{'BURN 5 min':>12}"
    if is_wide:
        text += f"{'BURN 1 h':>10}"
    return ((text + "  BUDGET LEFT", "dim"),)


def _row(one: ObjectiveLevels, width: int, is_wide: bool) -> Line:
    target = f"{one.objective.objective * 100:g} %"
    shown = one.windows if is_wide else one.windows[:1]
    spans: list[Span] = [
        (fit(objective_label(one.objective), 24), "strong"),
        (f"{target:>9}", "body"),
    ]
    for window, cells in zip(shown, (12, 11), strict=False):
        good = format_good(ratio(window.num_good, window.num_bad))
        spans.append((f"{good:>{cells}}", "body"))
    for window, cells in zip(shown, (12, 10), strict=False):
        spans.append(_burn(one.objective, window, cells))
    left = budget_left(one)
    text = UNKNOWN if left is None else f"{100 * left:.0f} %"
    if left is not None and left <= 0:
        text = f"spent {1 - left:.3g}x"
    role: Role = "alarm" if left is not None and left <= 0 else "body"
    spans.append((f"  {text:<11}", role))
    room = width - width_of(tuple(spans)) - 2
    if room >= 8 and left is not None:
        spans += [("  ", "body"), (bar(max(left, 0.0), room), "gauge")]
    return tuple(spans)


def _burn(one: Objective, window: LevelWindow, cells: int) -> Span:
    burn = burn_rate(one, window.num_good, window.num_bad)
    if burn is None:
        return (f"{UNKNOWN:>{cells}}", "dim")
    text = f"{burn:.1f}x" if burn < 100 else f"{burn:.0f}x"
    if burn > 1:
        return (f"{TRIANGLE + ' ' + text:>{cells}}", "alarm")
    return (f"{text:>{cells}}", "body")


def _foot(levels: ServiceLevels) -> str:
    """Return what the table leaves out, which the requests below it hold."""
    warm_up = max((one.num_warm_up for one in levels.objectives), default=0)
    requests = "request" if warm_up == 1 else "requests"
    left_out = f"without {count(warm_up)} warm-up {requests}; " if warm_up else ""
    return f"{left_out}budget left: of what was observed"


def _goodput(view: EngineView, levels: ServiceLevels) -> Line:
    span_s = view.window_ns / 1e9
    if not levels.num_requests or span_s <= 0:
        return (("no request finished in this window", "dim"),)
    return (
        (f"last {format_window(view.window_ns)}: ", "dim"),
        (f"{levels.num_good} of {levels.num_requests}", "strong"),
        (" finished requests missed nothing", "body"),
        (f"   {per_second(levels.num_good / span_s)} of "
         f"{per_second(levels.num_requests / span_s)} requests/s", "body"),
        (f"   {per_second(levels.num_good_tokens / span_s)} of "
         f"{per_second(levels.num_tokens / span_s)} output tokens/s", "body"),
    )  # fmt: skip


def _trial_head(width: int) -> Line:
    return ((f"{'TRIED':<24}{'TARGET':>9}{'GOOD NOW':>12}{'WOULD BE':>12}{'BURN':>9}", "dim"),)


def _trial_row(one: LevelTrial, width: int) -> Line:
    would = ratio(one.num_good, one.num_bad)
    present = None
    if one.present_good is not None and one.present_bad is not None:
        present = ratio(one.present_good, one.present_bad)
    window = LevelWindow(0, one.num_good, one.num_bad)
    change: Span = ("", "body")
    if would is not None and present is not None and would != present:
        more = one.num_bad - (one.present_bad or 0)
        text = (
            f"   {abs(more)} {'more' if more > 0 else 'fewer'} bad of {one.num_good + one.num_bad}"
        )
        change = (text, "alarm" if more > 0 else "body")
    target = f"{one.objective.objective * 100:g} %"
    return (
        (fit(objective_label(one.objective), 24), "strong"),
        (f"{target:>9}", "body"),
        (f"{format_good(present):>12}", "body"),
        (f"{format_good(would):>12}", "strong"),
        _burn(one.objective, window, 9),
        change,
    )


def meaning(one: Objective) -> str:
    """Return what an objective counts as good."""
    return good_line(one)
