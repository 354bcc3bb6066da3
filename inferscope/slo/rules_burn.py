"""Burn-rate rules: a long window shows how much budget burned, a short one that it still burns.

The pairs of windows and factors are those of the SRE Workbook (chapter 5, "Multiwindow,
Multi-Burn-Rate Alerts"). A share alone cannot tell one bad request of three at night from an
outage, so each rule also needs a number of bad requests. If requests are so rare that the short
window is mostly empty, the long one decides alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from inferscope.errors import BadInput
from inferscope.slo.objectives import Objective, Objectives
from inferscope.slo.rule_templates import (
    DAY_S,
    FIVE_MINUTES_S,
    HOUR_S,
    Annotations,
    Rule,
    TimeScale,
    of_model,
    query_template,
)

Severity = Literal["page", "ticket"]
FAST, SLOW, TRICKLE, INSTANCE = (
    "InferScopeBudgetBurnsFast",
    "InferScopeBudgetBurnsSlowly",
    "InferScopeBudgetTrickles",
    "InferScopeInstanceBurns",
)
PAIRS: tuple[tuple[Severity, float, float, float], ...] = (
    ("page", 14.4, HOUR_S, FIVE_MINUTES_S),
    ("page", 6.0, 6 * HOUR_S, HOUR_S / 2),
    ("ticket", 3.0, DAY_S, 2 * HOUR_S),
    ("ticket", 1.0, 3 * DAY_S, 6 * HOUR_S),
)
"""Severity, burn rate, long and short window in seconds."""
_LONG_S = (2 * HOUR_S, DAY_S, 3 * DAY_S)
"""Windows in seconds that are evaluated less often."""
_TRICKLE_S = 6 * HOUR_S
"""Window in seconds that must hold fewer requests than a rule's floor for a trickle."""
_TRICKLE_FOR_S = HOUR_S
"""Seconds for which a trickle must last.

The end of an outage leaves the window above within minutes, with few and bad requests meanwhile.
"""
_LEAST_BAD = 0.5
"""Minimum sum that counts as a bad request: rates over five minutes extrapolate."""
EXPLAINED_S = 10.0
"""Maximum seconds after a deadline until a bad request has a cause (`inferscope.slo.judge`)."""
_SCRAPES = 3
"""Scrapes until Prometheus has seen it grow: an alert that fires at once has no cause yet."""

_REQUESTS = "inferscope_slo_requests"
_BREACHES = "inferscope_slo_breaches"
_ENGINE = ("model", "slo", "instance", "engine_id")


@dataclass(frozen=True)
class Burn:
    """One rule of one objective.

    Attributes:
        objective: objective of the budget.
        except_models: models with their own objective of this name.
        severity: page or ticket.
        factor: burn rate, as a multiple of the allowed one.
        long_s: window that shows how much burned.
        short_s: window that shows that it still burns; None for a trickle.
        floor: minimum number of bad requests in the long window.
        least_rate_s: minimum requests per second in the short window.
    """

    objective: Objective
    except_models: tuple[str, ...]
    severity: Severity
    factor: float
    long_s: float
    short_s: float | None
    floor: int
    least_rate_s: float = 0.0

    @property
    def bad_share(self) -> float:
        """Return the share of bad requests above which the rule fires."""
        return self.factor * self.objective.budget


def burns(objectives: Objectives, *, floor: int, page_rate_s: float) -> tuple[Burn, ...]:
    """Return the rules of all objectives.

    Raises:
        BadInput: an objective is so loose that a rule could never fire, or shorter than an hour.
    """
    found: list[Burn] = []
    for objective in objectives.all:
        excepted = objectives.excepted(objective)
        # An objective does not apply beyond its window.
        window_s = objective.window_ns / 1e9
        pairs = [pair for pair in PAIRS if pair[2] <= window_s]
        if not pairs:
            raise BadInput(
                f"{_of(objective)} has a window of {TimeScale(1).span(window_s)}, and the "
                f"shortest rule looks back for {TimeScale(1).span(PAIRS[0][2])}. Give a longer one."
            )
        for severity, factor, long_s, short_s in pairs:
            _check_possible(objective, factor)
            rate_s = page_rate_s if severity == "page" else 0.0
            of = (objective, excepted, severity, factor, long_s, short_s, floor, rate_s)
            found.append(Burn(*of))
        found.append(Burn(objective, excepted, "ticket", 1.0, pairs[-1][2], None, floor))
    return tuple(found)


def _check_possible(objective: Objective, factor: float) -> None:
    bad_share = factor * objective.budget
    if bad_share >= 1.0 - 1e-9:
        raise BadInput(
            f"{_of(objective)} has the target {objective.objective:.6g}, so {objective.budget:.4g} "
            f"may be bad; the rule for {factor:g} times that would need {bad_share:.4g} of "
            "the requests to be bad, more than 1: it could never fire. Give an "
            f"objective above {1 - 1 / factor:.4f} and a threshold to match."
        )


def _of(objective: Objective) -> str:
    return objective.name if objective.model is None else f"{objective.name} of {objective.model}"


# --- recording rules ---------------------------------------------------------------------------


def rate_name(level: str, time: TimeScale) -> str:
    """Return the name of the recorded request rates."""
    return f"{level}:{_REQUESTS}:rate{time.span(FIVE_MINUTES_S)}"


def _num_name(level: str, window: str) -> str:
    return f"{level}:{_REQUESTS}:num{window}"


def _share_name(level: str, window: str) -> str:
    return f"{level}:{_REQUESTS}_bad:share{window}"


def _cause_name(window: str) -> str:
    return f"model_slo_cause:{_BREACHES}:num{window}"


def recordings(time: TimeScale, *, interval_s: float, is_long: bool) -> Iterator[Rule]:
    """Return the recording rules common to all objectives.

    Args:
        time: scale of the windows.
        interval_s: evaluation interval of the rates.
        is_long: whether to return the long windows, or the others and the rates below them.
    """
    if not is_long:
        yield from _rates(time)
    each_s = f"{time.seconds(interval_s):g}"
    spans_s = {span_s for pair in PAIRS for span_s in pair[2:]}
    for span_s in sorted(spans_s):
        if (span_s in _LONG_S) is not is_long:
            continue
        window = time.span(span_s)
        levels = ["model_slo"]
        if span_s in PAIRS[0][2:]:
            levels.append("engine_slo")
        for level in levels:
            num, rate = _num_name(level, window), rate_name(level, time)
            # Rates over five minutes, one per interval: their sum counts only those present, where
            # an average would stand for the whole window.
            summed = f"sum_over_time({rate}[{window}]) * {each_s}"
            if span_s == FIVE_MINUTES_S:
                summed = f"{rate} * {time.seconds(span_s):g}"
            yield {"record": num, "expr": summed}
            by = "model, slo" if level == "model_slo" else ", ".join(_ENGINE)
            bad = f'sum by ({by}) ({num}{{result="bad"}})'
            yield {
                "record": _share_name(level, window),
                "expr": f"{bad}\n/\nsum by ({by}) ({num})",
            }
        if any(span_s == pair[2] for pair in PAIRS):
            rate = f"model_slo_cause:{_BREACHES}:rate{time.span(FIVE_MINUTES_S)}"
            yield {
                "record": _cause_name(window),
                "expr": f"sum_over_time({rate}[{window}]) * {each_s}",
            }


def _rates(time: TimeScale) -> Iterator[Rule]:
    window = time.span(FIVE_MINUTES_S)
    engine, model = rate_name("engine_slo", time), rate_name("model_slo", time)
    yield {"record": engine, "expr": _summed(_REQUESTS, window, (*_ENGINE, "result"))}
    yield {"record": model, "expr": f"sum by (model, slo, result) ({engine})"}
    yield {
        "record": f"model_slo_cause:{_BREACHES}:rate{window}",
        "expr": _summed(_BREACHES, window, ("model", "slo", "cause")),
    }


def _summed(counter: str, window: str, by: tuple[str, ...]) -> str:
    """Return the rate of a counter by labels, with `model_name` as `model`."""
    return f"sum by ({', '.join(by)}) (\n  {of_model(f'rate({counter}_total[{window}])')}\n)"


# --- alerts ---------------------------------------------------------------------------------------


def alerts(found: Iterable[Burn], annotations: Annotations) -> Iterator[Rule]:
    """Return the alerts of all objectives."""
    by_objective: dict[Objective, list[Burn]] = {}
    for burn in found:
        by_objective.setdefault(burn.objective, []).append(burn)
    for of_one in by_objective.values():
        for severity, name, page in (
            ("page", FAST, "budget-burns-fast"),
            ("ticket", SLOW, "budget-burns-slowly"),
        ):
            both = [b for b in of_one if b.severity == severity and b.short_s is not None]
            if both:
                # One alert: the same budget burning by the other pair is not a new event.
                yield _alert(name, both, _either(both, annotations.time), annotations, runbook=page)
        (trickle,) = (burn for burn in of_one if burn.short_s is None)
        expression = _trickling(trickle, annotations.time)
        yield _alert(TRICKLE, [trickle], expression, annotations, runbook="budget-trickles")
        first = of_one[0]
        single = Burn(
            first.objective, first.except_models, "ticket", first.factor, first.long_s,
            first.short_s, first.floor,
        )  # fmt: skip
        expression = _on_one_engine(single, annotations.time)
        yield _alert(INSTANCE, [single], expression, annotations, runbook="instance-burns")


def _alert(
    name: str, of: list[Burn], expression: str, annotations: Annotations, *, runbook: str
) -> Rule:
    first = of[0]
    # The labels of the series, stated again: promtool rejects rules with equal labels as
    # duplicates.
    labels = {"severity": first.severity, "slo": first.objective.name}
    if first.objective.model is not None:
        labels["model"] = first.objective.model
    patience = TimeScale(1.0).span(EXPLAINED_S + _SCRAPES * annotations.scrape_s)
    return {
        "alert": name,
        "expr": expression,
        "for": annotations.time.span(_TRICKLE_FOR_S) if name == TRICKLE else patience,
        "keep_firing_for": annotations.time.span(FIVE_MINUTES_S),
        "labels": labels,
        "annotations": _annotations(name, of, annotations, runbook),
    }


def _either(both: list[Burn], time: TimeScale) -> str:
    return "\nor\n".join(f"(\n{_indented(_burning(burn, time, 'model_slo'))}\n)" for burn in both)


def _burning(burn: Burn, time: TimeScale, level: str) -> str:
    assert burn.short_s is not None
    long, short = time.span(burn.long_s), time.span(burn.short_s)
    of = _selector(burn)
    bad = _selector(burn, 'result="bad"')
    by = "model, slo" if level == "model_slo" else ", ".join(_ENGINE)
    parts = [
        f"{_share_name(level, long)}{of} > {burn.bad_share:.6g}",
        f"{_share_name(level, short)}{of} > {burn.bad_share:.6g}",
        f"sum by ({by}) ({_num_name(level, long)}{bad}) >= {burn.floor}",
    ]
    if burn.least_rate_s:
        least = burn.least_rate_s * time.seconds(burn.short_s)
        parts.append(f"sum by ({by}) ({_num_name(level, short)}{of}) >= {least:.6g}")
    return "\nand\n".join(parts)


def _trickling(burn: Burn, time: TimeScale) -> str:
    long, few = time.span(burn.long_s), time.span(min(_TRICKLE_S, burn.long_s))
    of, bad = _selector(burn), _selector(burn, 'result="bad"')
    return "\nand\n".join(
        (
            f"{_share_name('model_slo', long)}{of} > {burn.bad_share:.6g}",
            f"sum by (model, slo) ({_num_name('model_slo', long)}{bad}) >= {burn.floor}",
            f"sum by (model, slo) ({_num_name('model_slo', few)}{of}) < {burn.floor}",
            # Without it, the rest of a finished outage fires for days once traffic stops.
            f"sum by (model, slo) ({_num_name('model_slo', few)}{bad}) >= {_LEAST_BAD}",
        )
    )


def _on_one_engine(burn: Burn, time: TimeScale) -> str:
    inner = _indented(_burning(burn, time, "engine_slo"))
    # Counted, so that the engine's name is not a label of the alert.
    return f"count by (model, slo) (\n{inner}\n)"


def _selector(burn: Burn, *more: str) -> str:
    matchers = [f"slo={_quoted(burn.objective.name)}"]
    if burn.objective.model is not None:
        matchers.append(f"model={_quoted(burn.objective.model)}")
    matchers += [f"model!={_quoted(model)}" for model in burn.except_models]
    return f"{{{', '.join((*matchers, *more))}}}"


def _quoted(text: str) -> str:
    """Return a PromQL string."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())


# --- annotations ----------------------------------------------------------------------------------


def _annotations(
    name: str, of: list[Burn], annotations: Annotations, runbook: str
) -> dict[str, str]:
    first, time = of[0], annotations.time
    objective, long = first.objective, time.span(first.long_s)
    where = "{model=%q, slo=%q}"
    labels = ("model", "slo")
    target = f"{objective.objective:.6g} of its requests"
    if objective.threshold_ns is not None:
        target += f" with a {objective.metric} of at most {objective.threshold_ns / 1e9:g} s"
    what = {
        FAST: "is burning its error budget at a paging rate",
        SLOW: "is burning its error budget faster than allowed",
        TRICKLE: "has few requests, too many of them bad",
        INSTANCE: "has an engine burning its error budget fast",
    }[name]
    share = query_template(
        f"{_share_name('model_slo', long)}{where}",
        *labels,
        shows="{{ . | value | humanizePercentage }}",
        otherwise="an unknown part",
    )
    # Over the long window of the first pair, which does not flap from minute to minute.
    cause = query_template(
        f"topk(1, {_cause_name(long)}{where} > 0)",
        *labels,
        shows="{{ . | label `cause` }}",
        otherwise="unknown",
    )
    used = 'inferscope_tenant_gpu_seconds_total{tenant!="none", model_name=%q}'
    tenant = query_template(
        f"topk(1, sum by (tenant) (rate({used}[{time.span(FIVE_MINUTES_S)}])) > 0)",
        "model",
        shows="{{ . | label `tenant` }}",
        otherwise="unknown: tenants are not counted",
    )
    worst_by = f"topk(1, {_share_name('engine_slo', time.span(HOUR_S))}{where} > 0)"
    worst = query_template(
        worst_by,
        *labels,
        shows="{{ . | label `engine_id` }} at {{ . | label `instance` }}, "
        "{{ . | value | humanizePercentage }} bad",
        otherwise="unknown",
    )
    command = query_template(
        worst_by,
        *labels,
        shows="inferscope findings {{ . | label `engine_id` }}",
        otherwise="inferscope attach",
    )
    return {
        "summary": f"{{{{ $labels.model }}}} {what}: {{{{ $labels.slo }}}}",
        "description": f"Objective: {target}. {share} were bad over the last {long}. Fires at "
        + " or ".join(_when(burn, time) for burn in of)
        + ".",
        "cause": cause,
        "culprit": tenant,
        "worst_instance": worst,
        "command": command,
        **annotations.links(runbook, "inferscope-slo"),
    }


def _when(burn: Burn, time: TimeScale) -> str:
    when = f"{100 * burn.bad_share:.4g}% bad ({burn.factor:g}x) over {time.span(burn.long_s)}"
    if burn.short_s is not None:
        when += f" and {time.span(burn.short_s)}"
    return f"{when}, at least {burn.floor} requests"
