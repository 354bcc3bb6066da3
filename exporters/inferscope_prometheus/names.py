"""What is exported under which name: a contract with other people's dashboards and alerts.

Bounds are constants, never configuration: quantiles over replicas with different bounds are wrong.
"""

from __future__ import annotations

from inferscope.records import CAUSES, FINISHES
from inferscope.records import XIDS as _XIDS

BOUNDS_A = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75),
    *(1.0, 1.5, 2.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0),
)
"""Seconds: of requests and their parts. Answers of reasoning models take minutes."""
BOUNDS_B = (
    *(0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.0125, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05),
    *(0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0),
)
"""Seconds: of tokens and steps."""

LABELS = ("model_name", "engine", "engine_id", "dp_rank", "role")
"""Of every family; a request's or a user's id is in none."""

OF_ALL = ("all",) * len(LABELS)
"""Their values where a number is no engine's: the collector's, or another exporter's."""

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
"""By name without prefix and unit."""
STALLS = ("not_scheduled", "preempted", "recompute", "paused")
"""Causes of a stall; recomputing only makes up for one."""
QUEUES = ("queue", "queue_idle")

OTHER_MODEL = "other"
"""Of an engine that does not name its model, or that came when there were MOST_MODELS."""
MOST_MODELS = 100
MOST_REPLICAS = 256

DEMAND = {
    "queued_prompt_tokens": "Prompt tokens of requests that wait, as far as they are known.",
    "predicted_queue_seconds": "Modelled: how long a request that came now would wait.",
    "headroom_ratio": "The least of what is left: slots, KV blocks, the steps' token budget.",
    "requests_admissible": "Queued requests that nothing scarce keeps from being admitted.",
}

STEP_PHASES = ("prefill", "decode", "mixed")
PHASES = ("prefill", "decode")
WASTES = ("cancel", "recompute", "rejected_draft", "padding", "retry")
CANCELS = ("client_cancel", "timeout")
FAILURES = ("server_abort", "rejected", "error", "engine_lost", "shed")
"""Ends after which a client has to ask again."""
REFUSALS = ("rejected", "shed")
"""Ends of requests that the engine never took."""
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
"""Frames overwritten or damaged before they were read; of a kind this version does not know;
steps whose records do not fit together; requests not counted because part of them was not seen,
or because too many were in flight."""
XIDS = tuple(_XIDS.values())
"""Errors that are there at 0 from the start; others are `xid_N`, and there from their first."""
FITTED = {"sm_active_ns": "gpu_sm_active_seconds", "energy_uj": "energy_joules"}
"""Counters that regressions apportion to phases, without prefix, by what is counted."""
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
