"""Alerts on the health of engines and on the coverage of our observation.

Only time separates a stall from a long step: a hung step and a long prompt look alike until one
ends. So an engine counts as stalled after fifty seconds, ten times the longest step that the
histogram resolves. If ranks compute together, one hung rank is detected sooner.

A scheduler that admits nothing is a different fault: steps may continue, or there may be no work
for one. `inferscope_requests_admissible` separates it from a queue that has to wait.
"""

from __future__ import annotations

from collections.abc import Iterator

from inferscope.slo.rule_templates import (
    FIVE_MINUTES_S,
    HOUR_S,
    Annotations,
    Rule,
    TimeScale,
    of_model,
    query_template,
)

STALLED, NOT_ADMITTING, RANK_HUNG, BLIND, BEHIND, KV_FULL, PREEMPTIONS = (
    "InferScopeStalled",
    "InferScopeNotAdmitting",
    "InferScopeRankHung",
    "InferScopeBlind",
    "InferScopeBehind",
    "InferScopeKvSaturated",
    "InferScopePreemptionStorm",
)
_ENGINE = "model_name, instance, engine_id"
_SCRAPES = 4
"""Scrapes in a stall's window: one may be missed."""
_STALL_S, _FIRST_STEP_S = 50.0, FIVE_MINUTES_S
"""Seconds without a step that are a stall.

The first holds for an engine with steps in the last hour, the second for one without: it may be
compiling its first.
"""
_OVERDUE_S = 13.0
"""Seconds after which a rank is overdue: an idle rank is silent for ten, and longer on a busy host.
"""
_UNSEEN_SHARE = 0.05
_LATE_S = 60.0
_RECENT_S = 15.0
"""Maximum lag in seconds of a current view; beyond it the engine's state is unknown."""
_KV_SHARE = 0.95
_PREEMPTED_SHARE = 0.1

_P99 = "engine:inferscope_step_duration_seconds:p99_1h"
_UNSEEN = "model_reason:inferscope_unseen:share"


def health_recordings(time: TimeScale) -> Iterator[Rule]:
    """Return the recording rules on engines and on our observation of them."""
    buckets = "inferscope_step_duration_seconds_bucket[1h]"
    yield {
        "record": _P99,
        "expr": f"histogram_quantile(0.99, sum by (le, {_ENGINE}) (rate({buckets}))) > 0",
    }
    hour = time.span(HOUR_S)
    known = (
        f"group by (job, {_ENGINE}) "
        f'(last_over_time(inferscope_source_up{{source="probe"}}[{hour}]))'
    )
    alive = f"group by ({_ENGINE}) (inferscope_requests_running)"
    probe = f'max by ({_ENGINE}) (inferscope_source_up{{source="probe"}})'
    late = f"time() - max by ({_ENGINE}) (inferscope_folded_timestamp_seconds)"
    # A target that left service discovery has no `up`: it was removed.
    for reason, part in (
        ("not_scraped", f"({known}) * on (job, instance) group_left () (up == bool 0)"),
        ("probe_off", f"({alive}) * on ({_ENGINE}) ({probe} == bool 0)"),
        ("collector_behind", f"({alive}) * on ({_ENGINE}) (({late}) > bool {_LATE_S:g})"),
        ("not_counted", "1 - inferscope_attribution_coverage_ratio"),
    ):
        yield {
            "record": _UNSEEN,
            "labels": {"reason": reason},
            "expr": f"avg by (model) (\n  {of_model(part)}\n)",
        }


def stall_alerts(annotations: Annotations) -> Iterator[Rule]:
    """Return the alerts on stalled engines."""
    yield _stalled(annotations)
    yield _not_admitting(annotations)
    yield _rank_hung(annotations)


def health_alerts(annotations: Annotations, *, floor: int) -> Iterator[Rule]:
    """Return the other health alerts.

    Args:
        annotations: builder of their annotations.
        floor: minimum number of ended requests for a share of their time.
    """
    yield _blind(annotations)
    yield _behind(annotations)
    yield _kv_full(annotations)
    yield _preemptions(annotations, floor)


def _stalled(annotations: Annotations) -> Rule:
    stall, first = _stall_spans(annotations)
    running = "inferscope_requests_running{model_name=%q}"
    stalled = _makes_no_progress(
        annotations, "inferscope_requests_running", "inferscope_step_duration_seconds_count"
    )
    return _alert(
        STALLED,
        f"count by (model) ({of_model(_observed(stalled))})",
        "page",
        {
            "summary": "{{ $labels.model }}: {{ $value }} engines have requests and run no step",
            "description": f"Requests are running and no step has ended for {stall}, or for "
            f"{first} if none had ended in the hour before.",
            "worst_instance": query_template(
                f"topk(1, sum by (instance, engine_id) ({running}) and on (instance, engine_id) "
                f"(sum by (instance, engine_id) (increase("
                f"inferscope_step_duration_seconds_count[{stall}])) == 0))",
                "model",
                shows="{{ . | label `engine_id` }} at {{ . | label `instance` }}, "
                "{{ . | value }} requests running",
                otherwise="unknown",
            ),
            **annotations.links("stalled", "inferscope-scheduler"),
        },
    )


def _not_admitting(annotations: Annotations) -> Rule:
    stall, first = _stall_spans(annotations)
    admissible, admissions = "inferscope_requests_admissible", "inferscope_admissions_total"
    stuck = _makes_no_progress(annotations, admissible, admissions)
    return _alert(
        NOT_ADMITTING,
        f"count by (model) ({of_model(_observed(stuck))})",
        "page",
        {
            "summary": "{{ $labels.model }}: {{ $value }} engines admit none of the requests "
            "that wait",
            "description": "Requests wait, slots and KV blocks are free, and none was admitted "
            f"for {stall}, or for {first} if no step had ended in the hour before.",
            "worst_instance": query_template(
                f"topk(1, sum by (instance, engine_id) ({admissible}{{model_name=%q}}) "
                f"and on (instance, engine_id) "
                f"(sum by (instance, engine_id) (increase({admissions}[{stall}])) == 0))",
                "model",
                shows="{{ . | label `engine_id` }} at {{ . | label `instance` }}, "
                "{{ . | value }} requests waiting",
                otherwise="unknown",
            ),
            **annotations.links("not-admitting", "inferscope-scheduler"),
        },
    )


def _rank_hung(annotations: Annotations) -> Rule:
    overdue = "inferscope_rank_overdue_seconds"
    hung = f"max by ({_ENGINE}) ({overdue}) > {_OVERDUE_S:g}"
    return _alert(
        RANK_HUNG,
        f"count by (model) ({of_model(_observed(hung))})",
        "page",
        {
            "summary": "{{ $labels.model }}: a rank hangs on {{ $value }} engines",
            "description": "Its peers have finished the step or wait in it for a rank "
            f"that has not begun it, or a rank has been silent, for more than {_OVERDUE_S:g} s.",
            "worst_rank": query_template(
                "topk(1, max by (instance, engine_id, dp_rank, rank) "
                f"({overdue}{{model_name=%q}}))",
                "model",
                shows="rank {{ . | label `rank` }} of {{ . | label `engine_id` }} at "
                "{{ . | label `instance` }}, for {{ . | value | humanizeDuration }}",
                otherwise="unknown",
            ),
            **annotations.links("rank-hung", "inferscope-scheduler"),
        },
    )


def _observed(expression: str) -> str:
    """Return an expression without engines whose probe is off or whose view is stale.

    The state of those engines is unknown; another alert covers them.
    """
    folded = "inferscope_folded_timestamp_seconds"
    return (
        f"(\n{expression}\n)\n"
        f'and\nmax by ({_ENGINE}) (inferscope_source_up{{source="probe"}}) == 1\n'
        f"and\nmin by ({_ENGINE}) (timestamp({folded}) - {folded}) < {_RECENT_S:g}"
    )


def _stall_spans(annotations: Annotations) -> tuple[str, str]:
    """Return how long an engine may make no progress: with steps in the last hour, and without."""
    least_s = _SCRAPES * annotations.scrape_s
    stall_s, first_s = (max(span_s, least_s) for span_s in (_STALL_S, _FIRST_STEP_S))
    return TimeScale(1).span(stall_s), TimeScale(1).span(first_s)


def _makes_no_progress(annotations: Annotations, due: str, done: str) -> str:
    """Return an expression for engines where a gauge stays above 0 and a counter does not grow.

    Args:
        annotations: builder of annotations, for the scrape interval.
        due: gauge of requests that should be processed.
        done: counter of what should happen.
    """
    parts = []
    for window, condition in zip(_stall_spans(annotations), ("and", "unless"), strict=True):
        # Above 0 throughout and already at the start: a new request or engine has not waited for
        # the whole window. The end of a pause starts a new window.
        parts.append(
            f"(\nsum by ({_ENGINE}) (min_over_time({due}[{window}])) > 0\n"
            f"and sum by ({_ENGINE}) ({due} offset {window}) > 0\n"
            f"and sum by ({_ENGINE}) (increase({done}[{window}])) == 0\n"
            f"unless max by ({_ENGINE}) (max_over_time(inferscope_engine_paused[{window}])) > 0\n"
            f"{condition}\n{_P99}\n)"
        )
    return "\nor\n".join(parts)


def _blind(annotations: Annotations) -> Rule:
    return _alert(
        BLIND,
        f"max by (model) ({_UNSEEN}) > {_UNSEEN_SHARE:g}",
        "page",
        {
            "summary": "{{ $labels.model }}: InferScope does not observe "
            "{{ $value | humanizePercentage }} of it",
            "description": "Its SLO figures are unreliable, so its SLO alerts "
            "are inhibited until it is observed again.",
            "cause": query_template(
                f"topk(1, {_UNSEEN}{{model=%q}})",
                "model",
                shows="{{ . | label `reason` }}",
                otherwise="unknown",
            ),
            **annotations.links("blind", "inferscope-health"),
        },
        lasts=annotations.time.span(120.0),
    )


def _behind(annotations: Annotations) -> Rule:
    folded = "inferscope_folded_timestamp_seconds"
    late = f"max by ({_ENGINE}) (timestamp({folded}) - {folded}) >= {_RECENT_S:g}"
    return _alert(
        BEHIND,
        f"count by (model) ({of_model(late)})",
        "ticket",
        {
            "summary": "{{ $labels.model }}: the collector is behind on {{ $value }} engines",
            "description": f"By {_RECENT_S:g} s or more, for {annotations.time.span(300.0)}: "
            "stalls and hung ranks are not detected meanwhile.",
            **annotations.links("blind", "inferscope-health"),
        },
        lasts=annotations.time.span(300.0),
    )


def _kv_full(annotations: Annotations) -> Rule:
    span = annotations.time.span(600.0)
    full = (
        f"sum by ({_ENGINE}) (min_over_time(inferscope_kv_cache_usage_ratio[{span}]))"
        f" > {_KV_SHARE:g}\n"
        f"and sum by ({_ENGINE}) (min_over_time(inferscope_requests_waiting[{span}])) > 0\n"
        f"and sum by ({_ENGINE}) (inferscope_requests_waiting offset {span}) > 0"
    )
    return _alert(
        KV_FULL,
        f"count by (model) ({of_model(full)})",
        "ticket",
        {
            "summary": "{{ $labels.model }}: {{ $value }} engines are out of KV blocks while "
            "requests wait",
            "description": f"More than {_KV_SHARE:.0%} of the KV blocks in use, and requests "
            f"waiting, for {span}.",
            "worst_instance": query_template(
                "topk(1, sum by (instance, engine_id) "
                "(inferscope_requests_waiting{model_name=%q}))",
                "model",
                shows="{{ . | label `engine_id` }} at {{ . | label `instance` }}, "
                "{{ . | value }} requests waiting",
                otherwise="unknown",
            ),
            **annotations.links("kv-saturated", "inferscope-scheduler"),
        },
    )


def _preemptions(annotations: Annotations, floor: int) -> Rule:
    span = annotations.time.span(600.0)
    lost = f'inferscope_latency_seconds_total{{cause=~"preempted|recompute"}}[{span}]'
    share = (
        f"sum by (model_name) (rate({lost}))\n/\n"
        f"sum by (model_name) (rate(inferscope_latency_seconds_total[{span}])) > "
        f"{_PREEMPTED_SHARE:g}\n"
        f"and sum by (model_name) (increase(inferscope_requests_total[{span}])) >= {floor}"
    )
    return _alert(
        PREEMPTIONS,
        f"sum by (model) ({of_model(share)})",
        "ticket",
        {
            "summary": "{{ $labels.model }}: {{ $value | humanizePercentage }} of its requests' "
            "time is lost to preemptions",
            "description": "Preempted or recomputing lost tokens: more than "
            f"{_PREEMPTED_SHARE:.0%} of the time of the requests that ended in {span}.",
            "worst_instance": query_template(
                "topk(1, sum by (instance, engine_id) (rate(inferscope_latency_seconds_total"
                f'{{cause=~"preempted|recompute", model_name=%q}}[{span}])) > 0)',
                "model",
                shows="{{ . | label `engine_id` }} at {{ . | label `instance` }}",
                otherwise="unknown",
            ),
            **annotations.links("preemption-storm", "inferscope-scheduler"),
        },
        lasts=annotations.time.span(300.0),
    )


def _alert(
    name: str, expression: str, severity: str, annotations: dict[str, str], *, lasts: str = "0s"
) -> Rule:
    return {
        "alert": name,
        "expr": expression,
        "for": lasts,
        "labels": {"severity": severity},
        "annotations": annotations,
    }
