"""Metrics of the page, one row each: what dashboards and alerts rely on.

Families take name, type, labels and help from here, and the reference in the docs its tables. A
name ends in the unit of its number, or the number is a count.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

LABELS = ("model_name", "engine", "engine_id", "dp_rank", "role")
"""Labels of every family; request and user IDs are never labels."""
OF_ALL = ("all",) * len(LABELS)
"""Their values for a metric without an engine: the collector's or another exporter's."""

BOUNDS_A = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75),
    *(1.0, 1.5, 2.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0),
)
"""Bounds in seconds for requests and their parts; responses of reasoning models take minutes."""
BOUNDS_B = (
    *(0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.0125, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05),
    *(0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0),
)
"""Bounds in seconds for token gaps and steps."""
BOUNDS_S = {"histogram A": BOUNDS_A, "histogram B": BOUNDS_B}
"""Bounds by type. They are constants: quantiles over replicas with different bounds are wrong."""


class MetricRow(NamedTuple):
    """One metric."""

    name: str
    """Name without the prefix `inferscope_`."""
    kind: Literal["counter", "gauge", "histogram A", "histogram B"]
    own_labels: str
    """Labels besides LABELS, separated by spaces."""
    help: str
    """Definition, on the page and in the docs."""
    note: str = ""
    """What the docs add to the definition, in Markdown."""
    method: Literal["measured", "apportioned", "modelled", "configured"] = "measured"

    @property
    def full_name(self) -> str:
        """Return the name as exposed."""
        return f"inferscope_{self.name}"

    @property
    def labels(self) -> tuple[str, ...]:
        """Return the names of all labels."""
        return (*LABELS, *self.own_labels.split())


_REQUESTS = (
    MetricRow("time_to_first_token_seconds", "histogram A", "",
              "From a request's arrival to its first token.", "TTFT at the delivery edge."),
    MetricRow("time_between_tokens_seconds", "histogram B", "",
              "Gaps between two deliveries of one request.", "TBT, counted when the request ends."),
    MetricRow("time_per_output_token_seconds", "histogram B", "",
              "Mean time per token of a request after its first.", "TPOT."),
    MetricRow("request_duration_seconds", "histogram A", "",
              "From a request's arrival to the end of its delivery.", "For every finish reason."),
    MetricRow("request_queue_seconds", "histogram A", "",
              "Time a request waited to be admitted.", "Causes `queue` + `queue_idle`."),
    MetricRow("request_prefill_seconds", "histogram A", "",
              "From a request's admission to its first token."),
    MetricRow("request_decode_seconds", "histogram A", "",
              "From a request's first token to its last."),
    MetricRow("request_stall_seconds", "histogram A", "",
              "Time a request was admitted and not worked on.",
              "Causes `not_scheduled` + `preempted` + `recompute` + `paused`."),
    MetricRow("request_gpu_seconds", "histogram A", "phase",
              "Device time attributed to a request: its share of its steps.", "", "apportioned"),
    MetricRow("requests_total", "counter", "finish_reason", "Ended requests, by finish reason.",
              "`rejected` is 400, 404, 413, [`shed`](slo.md#load-that-is-shed) is 429, 503."),
    MetricRow("latency_seconds_total", "counter", "cause",
              "Time of ended requests by cause; sums to their durations.",
              "The sum of the [ledgers](numbers.md).", "apportioned"),
    MetricRow("tokens_total", "counter", "phase source",
              "Tokens computed, and prompt tokens found in the prefix cache.",
              "`computed` by steps; `cached` of ended requests."),
    MetricRow("prompt_tokens_total", "counter", "cache",
              "Prompt tokens of ended requests by what the prefix cache did with them.",
              "[Classes](cache.md#classes); absent if the engine does not report them."),
    MetricRow("spec_tokens_total", "counter", "result",
              "Draft tokens of ended requests that the model verified.",
              "`accepted` and `rejected`."),
    MetricRow("requests_running", "gauge", "", "Requests admitted."),
    MetricRow("requests_waiting", "gauge", "", "Requests in the queue, preempted ones included."),
    MetricRow("requests_admissible", "gauge", "",
              "Queued requests that no scarce resource keeps from admission.",
              "[Not admitting](runbooks/not-admitting.md) ¹"),
    MetricRow("admissions_total", "counter", "",
              "Requests admitted from the queue, again after each preemption.",
              "Absent without an observed scheduler."),
    MetricRow("queued_prompt_tokens", "gauge", "",
              "Prompt tokens of queued requests, as far as they are known.", "²"),
    MetricRow("predicted_queue_seconds", "gauge", "",
              "Modelled wait of a request that arrives now.",
              "Queued prompt tokens / the prefill rate of the last 10 s with work ²", "modelled"),
    MetricRow("headroom_ratio", "gauge", "",
              "Lowest remaining share of: slots, KV blocks, the steps' token budget.",
              "< 0 with more requests than slots ²"),
)  # fmt: skip

_COST = (
    MetricRow("wasted_gpu_seconds_total", "counter", "reason",
              "Device time whose result was not used.",
              "Disjoint: `cancel` (client gone), `retry` (failed by the server), `recompute`, "
              "`rejected_draft`, `padding`.", "apportioned"),
    MetricRow("cache_miss_gpu_seconds_total", "counter", "cause",
              "Device time spent on prompt tokens that the prefix cache did not hold.",
              "By [class](cache.md#classes); without recomputation after preemptions.",
              "apportioned"),
    MetricRow("tenant_gpu_seconds_total", "counter", "tenant phase",
              "Useful device time of ended requests, by tenant.",
              "[Without waste](collect.md#tenants-and-cost).", "apportioned"),
    MetricRow("tenant_tokens_total", "counter", "tenant kind",
              "Tokens of ended requests, by tenant.", "`input`, `cached`, `output`."),
    MetricRow("adapter_gpu_seconds_total", "counter", "adapter phase",
              "Useful device time of ended requests, by LoRA adapter.",
              "Absent until one is used.", "apportioned"),
    MetricRow("adapter_tokens_total", "counter", "adapter kind",
              "Tokens of ended requests, by LoRA adapter.", "Absent until one is used."),
    MetricRow("cost_dollars_total", "counter", "tenant phase",
              "Cost of device time by tenant, waste and idle, at the configured price.",
              "Absent without a price.", "apportioned"),
)  # fmt: skip

_DEVICES = (
    MetricRow("step_duration_seconds", "histogram B", "phase",
              "Engine steps, by the phases in them.", "Prefill, decode or mixed; first rank."),
    MetricRow("rank_step_seconds_total", "counter", "rank",
              "Time in steps as each rank measured it: the others wait for the slowest.",
              "Absent with one rank ([slow rank](findings.md#the-rules))."),
    MetricRow("rank_overdue_seconds", "gauge", "rank",
              "Time for which its peers have waited for a rank; 0 if they do not wait.",
              "[Silent or hung rank](alerts.md)."),
    MetricRow("expert_load_tokens_total", "counter", "load",
              "Tokens routed to one expert of each layer: to the mean one, or to the busiest.",
              "`busiest` over `mean` is the [imbalance](findings.md#the-rules); absent for dense "
              "models."),
    MetricRow("gpu_phase_seconds_total", "counter", "gpu phase",
              "Device wall time by use; sums to the wall time.", "", "apportioned"),
    MetricRow("flops_total", "counter", "gpu phase",
              "Floating-point operations of ended requests, from the model's shape.",
              "For [supported models](numbers.md#flops-and-bytes).", "modelled"),
    MetricRow("kv_cache_usage_ratio", "gauge", "", "KV blocks in use.", "At the last step."),
    MetricRow("cache_hit_ratio_at_size", "gauge", "size",
              "Share of prompt tokens that a KV cache of another size would have held.",
              "`size` in multiples of the pool: `0.5`, `1`, `2`, `4`; absent where "
              "[withheld](cache.md#the-curve).", "modelled"),
    MetricRow("engine_paused", "gauge", "",
              "Whether the engine is paused: requests wait, and no step is due.",
              "[Pauses](numbers.md#pauses)."),
    MetricRow("attribution_residual_ratio", "gauge", "gpu",
              "Measured over modelled step time, less one.", "Over 10 s.", "modelled"),
    MetricRow("cost_model_residual_ratio", "gauge", "mode source",
              "Median of measured over modelled time of a mode's recent steps, less one.",
              "`source` is `fit`, [`calibration`](calibrate.md) or `roofline`.", "modelled"),
    MetricRow("engine_info", "gauge",
              "engine_version model_revision quantization tp pp dp ep gpu config_hash synthetic",
              "Start-up configuration of an engine.",
              "1; `synthetic=\"true\"` for synthetic records.", "configured"),
    MetricRow("gpu_sm_active_seconds_total", "counter", "gpu phase",
              "Time with SMs active, mean over SMs.",
              "Measured if [sampled finely enough](numbers.md#counters).", "apportioned"),
    MetricRow("gpu_busy_seconds_total", "counter", "gpu phase",
              "Time of steps with any kernel running.", "As above.", "apportioned"),
    MetricRow("gpu_hbm_bytes_total", "counter", "gpu phase direction",
              "Bytes moved between memory and device, as counted.", "As above.", "apportioned"),
    MetricRow("energy_joules_total", "counter", "gpu phase",
              "Energy; apportioned by regression, idle time aside.",
              "`phase` may be `idle`.", "apportioned"),
    MetricRow("apportioned_error_ratio", "gauge", "counted",
              "Relative error of the regression that apportions a counter to phases.",
              "`energy_joules` or `gpu_sm_active_seconds`.", "modelled"),
    MetricRow("gpu_sm_active_ratio", "gauge", "gpu",
              "Share of SMs with a resident warp, latest sample."),
    MetricRow("gpu_dram_active_ratio", "gauge", "gpu",
              "Device memory rate over its peak, latest sample."),
    MetricRow("gpu_memory_used_bytes", "gauge", "gpu", "Device memory in use, by all processes."),
    MetricRow("gpu_hbm_peak_bytes_per_second", "gauge", "gpu", "Device memory's peak rate.", "",
              "configured"),
    MetricRow("gpu_peak_flops_per_second", "gauge", "gpu source",
              "Peak compute rate of a device in the model's dtype: by vendor, by calibration.",
              "`spec` or `measured` ([calibrate](calibrate.md)).", "configured"),
    MetricRow("throttle_seconds_total", "counter", "gpu reason",
              "Time that a device's clocks were held down for a reason; reasons overlap.",
              "[Reasons](counters.md#what-holds-a-device-back)."),
    MetricRow("xid_errors_total", "counter", "gpu reason", "Device errors reported by the driver.",
              "The usual ones are exposed at 0."),
)  # fmt: skip

_OBJECTIVES = (
    MetricRow("slo_requests_total", "counter", "slo result",
              "Judged requests, good or bad; an unfinished one is bad once it is late."),
    MetricRow("slo_breaches_total", "counter", "slo cause",
              "Bad requests by main cause; counted when they finish, or ten seconds late.",
              "Sums to the bad requests."),
    MetricRow("slo_warmup_requests_total", "counter", "slo",
              "Warm-up requests, before an engine's first response: neither good nor bad."),
    MetricRow("slo_threshold_seconds", "gauge", "slo",
              "Latency limit of a good request.", "", "configured"),
    MetricRow("slo_objective_ratio", "gauge", "slo",
              "Target share of good requests.", "", "configured"),
    MetricRow("slo_window_requests", "gauge", "slo result",
              "Requests judged on this host within the objective's window, earlier collectors "
              "included."),
    MetricRow("slo_budget_remaining_ratio", "gauge", "slo",
              "Remaining share of this host's error budget; below 0 it is overspent."),
    MetricRow("slo_uncounted_seconds", "gauge", "",
              "Time before this collector's start in which no collector judged."),
)  # fmt: skip

_COLLECTOR = (
    MetricRow("collector_info", "gauge", "version config_hash shard",
              "Version and configuration of the collector.",
              "1; engine labels are `all`.", "configured"),
    MetricRow("collector_reloads_total", "counter", "result",
              "Configuration reloads, by result: applied or rejected.",
              "`good`, `bad` ([reloads](collect.md#reloading))."),
    MetricRow("source_up", "gauge", "source", "Whether a data source is available.",
              "`probe`, `device_clock`; samplers `nvml`, `gpm`, `pm`, `dcgm`."),
    MetricRow("attribution_coverage_ratio", "gauge", "gpu",
              "Observed finished requests over those that the engine reports.",
              "With `engine_metrics`, over 5 min and ≥ 50 requests."),
    MetricRow("overhead_ratio", "gauge", "", "Time inside the probe over wall time."),
    MetricRow("folded_timestamp_seconds", "gauge", "",
              "Wall time through which the engine's records are folded.",
              "[Blind](alerts.md) if it stands still."),
    MetricRow("records_dropped_total", "counter", "stage reason",
              "Data missing from these metrics, and items dropped by other exporters.",
              "The exporter is the stage: `otlp`."),
    MetricRow("rings_refused_total", "counter", "reason",
              "Rings not followed: engine of another user, or limit reached.",
              "[`owner`, `engines`, `rings`](security.md#limits-of-collect)."),
    MetricRow("series_left_out", "gauge", "",
              "Time series left out of this page because it would exceed max_series."),
)  # fmt: skip

SECTIONS = {
    "Requests and tokens": _REQUESTS,
    "Cost": _COST,
    "Steps and devices": _DEVICES,
    "Objectives": _OBJECTIVES,
    "The collector": _COLLECTOR,
}
"""Metrics by their section of docs/metrics.md."""
METRICS = {row.name: row for rows in SECTIONS.values() for row in rows}
"""Metrics by name without prefix."""
REQUEST_HISTOGRAMS = tuple(
    row.name for row in METRICS.values() if row.kind in BOUNDS_S and not row.own_labels
)
"""Histograms of a request's latencies."""
