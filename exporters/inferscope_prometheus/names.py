"""Label values of the page's metrics, and their limits: a contract with users' dashboards."""

from __future__ import annotations

from inferscope.records import XIDS as _XIDS

STALLS = ("not_scheduled", "preempted", "recompute", "paused")
"""Causes of a stall; recompute follows from one."""
QUEUES = ("queue", "queue_idle")

OTHER_MODEL = "other"
"""Label of an engine without a model name, or one beyond MOST_MODELS."""
MOST_MODELS = 100
MOST_REPLICAS = 256

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
"""Label values by counter that a regression apportions to phases."""
SOURCES = ("probe", "device_clock", "nvml", "gpm", "pm", "dcgm")
