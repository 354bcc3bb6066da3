"""Names of exported metrics: a contract with users' dashboards and alerts.

Bounds are constants, never configuration: quantiles over replicas with different bounds are wrong.
"""

from __future__ import annotations

from inferscope.records import CAUSES, FINISHES
from inferscope.records import XIDS as _XIDS

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

LABELS = ("model_name", "engine", "engine_id", "dp_rank", "role")
"""Labels of every family; request and user IDs are never labels."""

OF_ALL = ("all",) * len(LABELS)
"""Label values of a metric without an engine: the collector's or another exporter's."""

HISTOGRAMS = {
    "time_to_first_token": (BOUNDS_A, "From a request's arrival to its first token."),
    "time_between_tokens": (BOUNDS_B, "Gaps between two deliveries of one request."),
    "time_per_output_token": (BOUNDS_B, "Mean time per token of a request after its first."),
    "request_duration": (BOUNDS_A, "From a request's arrival to the end of its delivery."),
    "request_queue": (BOUNDS_A, "Time a request waited to be admitted."),
    "request_prefill": (BOUNDS_A, "From a request's admission to its first token."),
    "request_decode": (BOUNDS_A, "From a request's first token to its last."),
    "request_stall": (BOUNDS_A, "Time a request was admitted and not worked on."),
}
"""Bounds and help by name, without prefix and unit."""
STALLS = ("not_scheduled", "preempted", "recompute", "paused")
"""Causes of a stall; recompute follows from one."""
QUEUES = ("queue", "queue_idle")

OTHER_MODEL = "other"
"""Label of an engine without a model name, or one beyond MOST_MODELS."""
MOST_MODELS = 100
MOST_REPLICAS = 256

DEMAND = {
    "queued_prompt_tokens": "Prompt tokens of queued requests, as far as they are known.",
    "predicted_queue_seconds": "Modelled wait of a request that arrives now.",
    "headroom_ratio": "Lowest remaining share of: slots, KV blocks, the steps' token budget.",
    "requests_admissible": "Queued requests that no scarce resource keeps from admission.",
}

STEP_PHASES = ("prefill", "decode", "mixed")
PHASES = ("prefill", "decode")
WASTES = ("cancel", "recompute", "rejected_draft", "padding", "retry")
CANCELS = ("client_cancel", "timeout")
FAILURES = ("server_abort", "rejected", "error", "engine_lost", "shed")
"""Finish reasons after which a client has to retry."""
REFUSALS = ("rejected", "shed")
"""Finish reasons of requests that the engine never accepted."""
TENANT_TOKENS = ("input", "cached", "output")
SPEC_RESULTS = ("accepted", "rejected")
TOKENS = (("prefill", "computed"), ("prefill", "cached"), ("decode", "computed"))
DROPS = (
    ("ring", "lost"),
    ("ring", "unknown"),
    ("fold", "unjoined"),
    ("fold", "joined_late"),
    ("fold", "in_flight"),
)
"""Drop reasons by stage.

They are: frames overwritten or damaged before they were read, or of a kind unknown to this version;
steps with inconsistent records; requests not counted because they were observed only in part or
exceeded the limit of requests in flight.
"""
XIDS = tuple(_XIDS.values())
"""Xid errors that exist at 0 from the start; others are `xid_N` and appear at their first."""
FITTED = {"sm_active_ns": "gpu_sm_active_seconds", "energy_uj": "energy_joules"}
"""Metric names without prefix, by counter that a regression apportions to phases."""
SOURCES = ("probe", "device_clock", "nvml", "gpm", "pm", "dcgm")

__all__ = [
    "BOUNDS_A",
    "BOUNDS_B",
    "CANCELS",
    "CAUSES",
    "DEMAND",
    "DROPS",
    "FAILURES",
    "FINISHES",
    "FITTED",
    "HISTOGRAMS",
    "LABELS",
    "MOST_MODELS",
    "MOST_REPLICAS",
    "OF_ALL",
    "OTHER_MODEL",
    "PHASES",
    "QUEUES",
    "REFUSALS",
    "SOURCES",
    "SPEC_RESULTS",
    "STALLS",
    "STEP_PHASES",
    "TENANT_TOKENS",
    "TOKENS",
    "WASTES",
    "XIDS",
]
