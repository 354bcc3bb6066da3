"""Dashboard 5: queued requests, the resources they wait for, and the KV cache."""

from __future__ import annotations

from grafana_foundation_sdk.builders import timeseries
from grafana_foundation_sdk.models import dashboard as model

from dashboards.generate.frame import PHASES, SCHEDULER, SLOW, DashboardRow, dashboard
from dashboards.generate.panels import PanelLink, PanelQuery, bad_above, graph
from dashboards.generate.queries import now, quantile, rate

_ENGINE = "engine_id"
_SLOW_OF = PanelLink("Slow requests of this engine", SLOW, {"engine": "engine_id"})
_PHASES_OF = PanelLink("Phases of this engine", PHASES, {"engine": "engine_id"})


def scheduler() -> model.Dashboard:
    """Return the dashboard."""
    return dashboard(
        SCHEDULER,
        "InferScope 5: Scheduler and KV",
        "Which requests wait, for which resource, and is there headroom?",
        [
            DashboardRow("Load", [*_load()]),
            DashboardRow("Waiting", [*_waiting()]),
            DashboardRow("KV cache", [*_cache()]),
            DashboardRow("Steps", [*_steps()]),
        ],
    )


def _load() -> list[timeseries.Panel]:
    return [
        graph(
            "Requests running",
            "Admitted and unfinished requests.",
            "short",
            PanelQuery(now("inferscope_requests_running", by=_ENGINE), "{{engine_id}}"),
            width=8,
            links=[_SLOW_OF, _PHASES_OF],
        ),
        graph(
            "Requests waiting",
            "In the queue, preempted ones included; and those of them that no "
            "scarce resource keeps from admission: if above 0 for long, the scheduler is stuck.",
            "short",
            PanelQuery(now("inferscope_requests_waiting", by=_ENGINE), "{{engine_id}}"),
            PanelQuery(
                now("inferscope_requests_admissible", by=_ENGINE), "{{engine_id}} admissible"
            ),
            width=8,
            links=[_SLOW_OF, _PHASES_OF],
        ),
        graph(
            "Headroom",
            "The lowest remaining share of slots, KV blocks and the steps' token budget: "
            "a signal to scale by. Below 0 there are more requests than slots.",
            "percentunit",
            PanelQuery(now("inferscope_headroom_ratio", by=_ENGINE, how="min"), "{{engine_id}}"),
            width=8,
            least=None,
        ),
    ]


def _waiting() -> list[timeseries.Panel]:
    queue, stall = "inferscope_request_queue_seconds", "inferscope_request_stall_seconds"
    causes = (
        'cause=~"queue|queue_idle|not_scheduled|preempted|recompute|paused|kv_load|kv_transfer"'
    )
    waited = rate("inferscope_latency_seconds_total", causes, by="cause")
    everything = rate("inferscope_latency_seconds_total")
    return [
        graph(
            "Time in the queue",
            "From arrival to admission. Dots are requests; each leads to its trace.",
            "s",
            PanelQuery(quantile(0.99, queue, by=_ENGINE), "{{engine_id}} p99", exemplars=True),
            PanelQuery(quantile(0.5, queue, by=_ENGINE), "{{engine_id}} p50"),
            width=8,
            links=[_SLOW_OF],
        ),
        graph(
            "Predicted wait",
            "Modelled wait of a request that arrives now.",
            "s",
            PanelQuery(
                now("inferscope_predicted_queue_seconds", by=_ENGINE, how="max"),
                "{{engine_id}} (modelled)",
            ),
            width=8,
        ),
        graph(
            "Prompt tokens in the queue",
            "Prompt tokens of requests not admitted yet.",
            "short",
            PanelQuery(now("inferscope_queued_prompt_tokens", by=_ENGINE), "{{engine_id}}"),
            width=8,
        ),
        graph(
            "Waiting by cause",
            "Share of all requests' time without computation, by cause.",
            "percentunit",
            PanelQuery(f"{waited} / on () group_left () {everything}", "{{cause}}"),
            stacked=True,
            links=[PanelLink("Slow requests", SLOW)],
        ),
        graph(
            "Stalls",
            "Time a request was admitted and not computed.",
            "s",
            PanelQuery(quantile(0.99, stall, by=_ENGINE), "{{engine_id}} p99", exemplars=True),
            PanelQuery(quantile(0.5, stall, by=_ENGINE), "{{engine_id}} p50"),
            links=[_SLOW_OF],
        ),
    ]


def _cache() -> list[timeseries.Panel]:
    tokens = "inferscope_tokens_total"
    cached = rate(tokens, 'phase="prefill"', 'source="cached"', by=_ENGINE)
    prompts = rate(tokens, 'phase="prefill"', by=_ENGINE)
    again = rate("inferscope_wasted_gpu_seconds_total", 'reason="recompute"', by=_ENGINE)
    seconds = rate("inferscope_gpu_phase_seconds_total", by=_ENGINE)
    classes = rate("inferscope_prompt_tokens_total")
    by_class = rate("inferscope_prompt_tokens_total", by="cache")
    missed = rate("inferscope_cache_miss_gpu_seconds_total", by="cause")
    whole = rate("inferscope_gpu_phase_seconds_total")
    return [
        graph(
            "KV blocks in use",
            "As of the last step; at 100 % requests wait or are preempted.",
            "percentunit",
            PanelQuery(
                now("inferscope_kv_cache_usage_ratio", by=_ENGINE, how="max"), "{{engine_id}}"
            ),
            width=8,
            most=1,
            limits=bad_above(0.9, 0.97),
        ),
        graph(
            "Prompt tokens from the prefix cache",
            "Share of the prompts' tokens that are not computed.",
            "percentunit",
            PanelQuery(f"{cached} / {prompts}", "{{engine_id}}"),
            width=8,
            most=1,
        ),
        graph(
            "Prompt tokens by use of the cache",
            "From hit to new; evicted, pending, namespace and changed ones were seen before. "
            "Absent for engines that do not report the use of their cache.",
            "percentunit",
            PanelQuery(f"{by_class} / on () group_left () {classes}", "{{cache}}"),
            width=8,
            stacked=True,
            most=1,
        ),
        graph(
            "Cost of misses",
            "Share of device time spent on prompt tokens that the cache did not hold, by cause.",
            "percentunit",
            PanelQuery(f"{missed} / on () group_left () {whole}", "{{cause}}"),
            width=8,
            stacked=True,
        ),
        graph(
            "Hit ratio by size of the KV cache",
            "Of the same requests, modelled from a sample: what half, twice and four times the "
            "cache would hold. Absent for sizes below the peak of requests in flight.",
            "percentunit",
            PanelQuery(
                now("inferscope_cache_hit_ratio_at_size", by="engine_id, size", how="max"),
                "{{engine_id}} {{size}}x (modelled)",
            ),
            width=8,
            most=1,
        ),
        graph(
            "Recomputed after preemptions",
            "Share of device time: a preemption storm shows here first.",
            "percentunit",
            PanelQuery(f"{again} / {seconds}", "{{engine_id}}"),
            width=8,
            limits=bad_above(0.02, 0.1),
            links=[_SLOW_OF],
        ),
    ]


def _steps() -> list[timeseries.Panel]:
    tokens = rate("inferscope_tokens_total", 'source="computed"', by=_ENGINE)
    count = "inferscope_step_duration_seconds_count"
    spec = "inferscope_spec_tokens_total"
    accepted = rate(spec, 'result="accepted"', by=_ENGINE)
    return [
        graph(
            "Steps a second",
            "By the phases in them.",
            "ops",
            PanelQuery(rate(count, by="phase"), "{{phase}}"),
            width=8,
            stacked=True,
            links=[PanelLink("Phases", PHASES)],
        ),
        graph(
            "Tokens per step",
            "Mean number of tokens in a step.",
            "short",
            PanelQuery(f"{tokens} / {rate(count, by=_ENGINE)}", "{{engine_id}}"),
            width=8,
            links=[_PHASES_OF],
        ),
        graph(
            "Accepted draft tokens",
            "Share of drafted tokens; absent without speculative decoding.",
            "percentunit",
            PanelQuery(f"{accepted} / {rate(spec, by=_ENGINE)}", "{{engine_id}}"),
            width=8,
            most=1,
        ),
    ]
