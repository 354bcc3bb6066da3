"""Rules of the engines' health and of our own sight of them.

A stall is told from a long step by time alone: a step that hangs and one that computes a long
prompt look alike until one of them ends. So no engine is taken for stalled before fifty seconds,
ten times the longest step that the histogram's buckets tell. Where ranks work together, one that
hangs while the others do not is told apart sooner.

A scheduler that admits nothing is another fault: steps may go on, or there may be nothing to make
one for. `inferscope_requests_admissible` separates it from a queue that has to wait.
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
"""In the window of a stall: one may be missed."""
_STALL_S, _FIRST_STEP_S = 50.0, FIVE_MINUTES_S
"""Without a step: of an engine that has made some in the last hour; of one that has not, and may be
compiling its first."""
_OVERDUE_S = 13.0
"""A rank that has nothing to do is silent for ten seconds, and a little longer on a busy host."""
_UNSEEN_SHARE = 0.05
_LATE_S = 60.0
_RECENT_S = 15.0
"""What is folded is of just now; of a collector that is further behind nobody knows what the engine
did since."""
_KV_SHARE = 0.95
_PREEMPTED_SHARE = 0.1

_P99 = "engine:inferscope_step_duration_seconds:p99_1h"
_UNSEEN = "model_reason:inferscope_unseen:share"


def health_recordings(time: TimeScale) -> Iterator[Rule]:
    """Return what is recorded of engines and of our sight of them."""
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
    # Of a target that is gone from service discovery there is no `up`: it was taken down.
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


def stall_alerts(words: Annotations) -> Iterator[Rule]:
    """Return those of engines that do not go on, with texts of these words."""
    yield _stalled(words)
    yield _not_admitting(words)
    yield _rank_hung(words)


def health_alerts(words: Annotations, *, floor: int) -> Iterator[Rule]:
    """Return the other alerts.

    Args:
        words: of their annotations.
        floor: requests that have to end for a share of their time to mean something.
    """
    yield _blind(words)
    yield _behind(words)
    yield _kv_full(words)
    yield _preemptions(words, floor)


def _stalled(words: Annotations) -> Rule:
    stall, first = _stall_spans(words)
    running = "inferscope_requests_running{model_name=%q}"
    stalled = _stands_still(
        words, "inferscope_requests_running", "inferscope_step_duration_seconds_count"
    )
    return _alert(
        STALLED,
        f"count by (model) ({of_model(_seen(stalled))})",
        "page",
        {
            "summary": "{{ $labels.model }}: {{ $value }} engines have requests and make no step",
            "description": f"Requests run and no step has ended for {stall}; for "
            f"{first} where none had ended in the hour before.",
            "worst_instance": query_template(
                f"topk(1, sum by (instance, engine_id) ({running}) and on (instance, engine_id) "
                f"(sum by (instance, engine_id) (increase("
                f"inferscope_step_duration_seconds_count[{stall}])) == 0))",
                "model",
                shows="{{ . | label `engine_id` }} at {{ . | label `instance` }}, "
                "{{ . | value }} requests running",
                otherwise="unknown",
            ),
            **words.links("stalled", "inferscope-scheduler"),
        },
    )


def _not_admitting(words: Annotations) -> Rule:
    stall, first = _stall_spans(words)
    admissible, admissions = "inferscope_requests_admissible", "inferscope_admissions_total"
    stuck = _stands_still(words, admissible, admissions)
    return _alert(
        NOT_ADMITTING,
        f"count by (model) ({of_model(_seen(stuck))})",
        "page",
        {
            "summary": "{{ $labels.model }}: {{ $value }} engines admit none of the requests "
            "that wait",
            "description": "Requests wait, slots and KV blocks are free, and none was admitted "
            f"for {stall}; for {first} where no step had ended in the hour before.",
            "worst_instance": query_template(
                f"topk(1, sum by (instance, engine_id) ({admissible}{{model_name=%q}}) "
                f"and on (instance, engine_id) "
                f"(sum by (instance, engine_id) (increase({admissions}[{stall}])) == 0))",
                "model",
                shows="{{ . | label `engine_id` }} at {{ . | label `instance` }}, "
                "{{ . | value }} requests waiting",
                otherwise="unknown",
            ),
            **words.links("not-admitting", "inferscope-scheduler"),
        },
    )


def _rank_hung(words: Annotations) -> Rule:
    overdue = "inferscope_rank_overdue_seconds"
    hung = f"max by ({_ENGINE}) ({overdue}) > {_OVERDUE_S:g}"
    return _alert(
        RANK_HUNG,
        f"count by (model) ({of_model(_seen(hung))})",
        "page",
        {
            "summary": "{{ $labels.model }}: a rank hangs on {{ $value }} engines",
            "description": "The ranks beside it are through with their step, or wait in it for one "
            f"that has not begun it, or one is silent, for more than {_OVERDUE_S:g} s.",
            "worst_rank": query_template(
                "topk(1, max by (instance, engine_id, dp_rank, rank) "
                f"({overdue}{{model_name=%q}}))",
                "model",
                shows="rank {{ . | label `rank` }} of {{ . | label `engine_id` }} at "
                "{{ . | label `instance` }}, for {{ . | value | humanizeDuration }}",
                otherwise="unknown",
            ),
            **words.links("rank-hung", "inferscope-scheduler"),
        },
    )


def _seen(expression: str) -> str:
    """Leave out engines whose probe is off, and those that are not folded up to now.

    What they do nobody knows: that is blindness.
    """
    folded = "inferscope_folded_timestamp_seconds"
    return (
        f"(\n{expression}\n)\n"
        f'and\nmax by ({_ENGINE}) (inferscope_source_up{{source="probe"}}) == 1\n'
        f"and\nmin by ({_ENGINE}) (timestamp({folded}) - {folded}) < {_RECENT_S:g}"
    )


def _stall_spans(words: Annotations) -> tuple[str, str]:
    """Return how long an engine may stand still: one with steps in the last hour, one without."""
    least_s = _SCRAPES * words.scrape_s
    stall_s, first_s = (max(span_s, least_s) for span_s in (_STALL_S, _FIRST_STEP_S))
    return TimeScale(1).span(stall_s), TimeScale(1).span(first_s)


def _stands_still(words: Annotations, due: str, done: str) -> str:
    """Select engines where a gauge stays above 0 and a counter does not grow.

    Args:
        words: give the time between scrapes.
        due: gauge of requests that something should happen to.
        done: counter of what should happen.
    """
    parts = []
    for window, condition in zip(_stall_spans(words), ("and", "unless"), strict=True):
        # Above 0 throughout, and already at the start: a new request, or a new engine, has not
        # waited for the whole window. The end of a pause starts another window.
        parts.append(
            f"(\nsum by ({_ENGINE}) (min_over_time({due}[{window}])) > 0\n"
            f"and sum by ({_ENGINE}) ({due} offset {window}) > 0\n"
            f"and sum by ({_ENGINE}) (increase({done}[{window}])) == 0\n"
            f"unless max by ({_ENGINE}) (max_over_time(inferscope_engine_paused[{window}])) > 0\n"
            f"{condition}\n{_P99}\n)"
        )
    return "\nor\n".join(parts)


def _blind(words: Annotations) -> Rule:
    return _alert(
        BLIND,
        f"max by (model) ({_UNSEEN}) > {_UNSEEN_SHARE:g}",
        "page",
        {
            "summary": "{{ $labels.model }}: InferScope does not see "
            "{{ $value | humanizePercentage }} of it",
            "description": "What is said of its objectives is not to be trusted, so their alerts "
            "are held back until it is seen again.",
            "cause": query_template(
                f"topk(1, {_UNSEEN}{{model=%q}})",
                "model",
                shows="{{ . | label `reason` }}",
                otherwise="unknown",
            ),
            **words.links("blind", "inferscope-health"),
        },
        lasts=words.time.span(120.0),
    )


def _behind(words: Annotations) -> Rule:
    folded = "inferscope_folded_timestamp_seconds"
    late = f"max by ({_ENGINE}) (timestamp({folded}) - {folded}) >= {_RECENT_S:g}"
    return _alert(
        BEHIND,
        f"count by (model) ({of_model(late)})",
        "ticket",
        {
            "summary": "{{ $labels.model }}: the collector is behind on {{ $value }} engines",
            "description": f"By {_RECENT_S:g} s or more, for {words.time.span(300.0)}: no stall "
            "and no rank that hangs is told of meanwhile.",
            **words.links("blind", "inferscope-health"),
        },
        lasts=words.time.span(300.0),
    )


def _kv_full(words: Annotations) -> Rule:
    span = words.time.span(600.0)
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
            "summary": "{{ $labels.model }}: {{ $value }} engines are out of KV blocks and "
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
            **words.links("kv-saturated", "inferscope-scheduler"),
        },
    )


def _preemptions(words: Annotations, floor: int) -> Rule:
    span = words.time.span(600.0)
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
            "description": "Evicted, or computing again what was lost: more than "
            f"{_PREEMPTED_SHARE:.0%} of the time of the requests that ended in {span}.",
            "worst_instance": query_template(
                "topk(1, sum by (instance, engine_id) (rate(inferscope_latency_seconds_total"
                f'{{cause=~"preempted|recompute", model_name=%q}}[{span}])) > 0)',
                "model",
                shows="{{ . | label `engine_id` }} at {{ . | label `instance` }}",
                otherwise="unknown",
            ),
            **words.links("preemption-storm", "inferscope-scheduler"),
        },
        lasts=words.time.span(300.0),
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
